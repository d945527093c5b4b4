"""Plan of rows: how full they are, and how equal the work of the ranks is, before a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from wds_datapipes.errors import EmptySourceError, plural
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.rows.row_plan import RowPlan
from wds_datapipes.pipes.samples.indexed_samples import IndexedSamples

#: The maximum number of rows that are measured, in steps that are spread over the epoch.
MEASURED = 1 << 17
#: Figures beyond these bounds cause a warning.
MAX_PADDING, MAX_BUSIEST, MAX_LOSS = 0.005, 1.1, 0.01


@dataclass(frozen=True)
class RowFigures:
    """The rows of an epoch.

    Attributes:
        samples: the number of samples.
        rows: the number of rows that hold all of them.
        steps: the number of steps.
        dropped: the number of rows that the epoch drops.
        padded: the number of rows that only pad the last step.
        samples_per_row: the mean number of samples in a row.
        padding: the fraction of the tokens of a row that are padding, in rows with samples.
        busiest: the cost of the busiest rank of a step over the mean of all ranks: the median over the steps, and the
            maximum.
        likeness: how alike the rows of a step are in cost, as the intraclass correlation: about 0 if each step has rows
            of all costs, and 1 if all rows of a step cost the same.
        warnings: the problems of this plan, each with the argument to change.
    """

    samples: int
    rows: int
    steps: int
    dropped: int
    padded: int
    samples_per_row: float
    padding: float
    busiest: tuple[float, float]
    likeness: float
    warnings: tuple[str, ...] = ()


def plan_rows(samples: IndexedSamples, ranks: int = 1) -> RowFigures:
    """Return figures of the rows of an epoch, of which no sample is read.

    Args:
        samples: the samples, with ``EpochOptions(pack=)``; its seed selects the epoch.
        ranks: the number of ranks.

    Raises:
        ValueError: it plans no rows, or the ranks do not divide a step.
        EmptySourceError: there are fewer rows than a step has.

    Examples:
        >>> from wds_datapipes.index import EpochOptions, Pack
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": f"{n}", "txt": "a"} for n in range(40)])
        >>> epoch = EpochOptions(pack=Pack(length=[5, 3, 6, 2] * 10, row=8))
        >>> figures = plan_rows(IndexedSamples(url, global_batch_size=4, epoch=epoch).set_seed(0), ranks=2)
        >>> figures.rows, figures.steps, figures.padding, figures.busiest
        (20, 5, 0.0, (1.0, 1.0))
    """
    samples.groups = {2: (ranks, 0)}
    samples.order_of_epoch()
    plan, step = samples.plan, samples.global_batch_size
    if plan is None or step is None:
        raise ValueError("plan_rows needs IndexedSamples with EpochOptions(pack=)")
    rows, kept = samples.rows_of_rank() * ranks, len(plan)  # refuses what a run would refuse
    if not rows:
        raise EmptySourceError(
            f"An epoch has {plural(kept, 'row')}, but a step takes {step:,}, so there is no whole step to measure. "
            "Choose a smaller global_batch_size"
        )
    tokens, costs = _measure(plan, rows, step)
    has_tokens = tokens > 0
    by_rank = costs.reshape(len(costs), ranks, -1).sum(axis=2)
    busiest = by_rank.max(axis=1) / np.maximum(by_rank.mean(axis=1), 1)
    rows = kept if samples.remainder == "keep" else rows
    found = RowFigures(
        samples=len(plan.order),
        rows=kept,
        steps=-(-rows // step),
        dropped=max(kept - rows, 0),
        padded=max(rows - kept, 0),
        samples_per_row=round(len(plan.order) / kept, 3),
        padding=round(1 - float(tokens.sum()) / max(int(has_tokens.sum()) * plan.row, 1), 6),
        busiest=(round(float(np.median(busiest)), 4), round(float(busiest.max()), 4)),
        likeness=round(_likeness(costs), 4),
    )
    return replace(found, warnings=tuple(_warnings(found, samples, ranks)))


def _measure(plan: RowPlan, rows: int, step: int) -> tuple[Numbers, Numbers]:
    """Return the tokens and the costs of the rows of some steps, a row of numbers for each step."""
    steps = rows // step
    every = -(-steps * step // MEASURED)
    found = [plan.measure(np.arange(each * step, (each + 1) * step)) for each in range(0, steps, every)]
    return np.stack([tokens for tokens, _ in found]), np.stack([costs for _, costs in found])


def _likeness(costs: Numbers) -> float:
    """Return the intraclass correlation of the costs of the rows of a step."""
    steps, size = costs.shape
    values: npt.NDArray[np.float64] = costs.astype(np.float64)
    if steps < 2 or size < 2:
        return 0.0
    between = size * values.mean(axis=1).var(ddof=1)
    within = values.var(axis=1, ddof=1).mean()
    total = between + (size - 1) * within
    return float((between - within) / total) if total else 0.0


def _warnings(found: RowFigures, samples: IndexedSamples, ranks: int) -> Iterator[str]:
    """Yield the problems of a plan, each with the argument to change."""
    pack = samples.epoch.pack
    if pack is None:
        return
    if found.padding > MAX_PADDING:
        yield f"rows are {found.padding:.1%} padding: choose a larger window, or a row that more samples share"
    if found.busiest[0] > MAX_BUSIEST and pack.balance == "mixed":
        yield (
            f"the busiest of {ranks} ranks has {found.busiest[0]:.2f} times the mean work: choose more rows per rank, "
            'or balance="similar", whose steps differ in length'
        )
    if found.dropped > MAX_LOSS * found.rows or found.padded > MAX_LOSS * found.rows:
        what = f"drops {found.dropped:,} of" if found.dropped else f"adds {plural(found.padded, 'empty row')} to"
        yield f"an epoch {what} {plural(found.rows, 'row')}: choose a smaller global_batch_size"
