"""How full are packed rows, how equal is the work of the ranks, and what does it cost to plan rows from an index?

    python benchmarks/environments.py grain grain
    python benchmarks/bench_packing.py

200,000 sequences of three kinds are packed into rows of 8,192 tokens. The logarithms of their lengths have a normal
distribution: those of texts are spread most, documents with images are longer, and sounds are alike. A sequence costs
``tokens + tokens**2 / 8192``, as attention does. Contenders:

- "planned, mixed" and "planned, similar": ``Pack`` with its default window of 16 steps.
- ".pack_samples()": our stage for streams, with 64 open rows.
- "Grain best fit": ``BestFitPackIterDataset`` with 64 bins, if the environment ``grain`` exists.
- "next fit": a row ends with the first sequence that does not fit into it.

For each, the tables show the part of the rows that is padding; the cost of the busiest rank of a step over the mean of
the ranks, as the median over the steps, for some numbers of ranks and of their rows in a step; how alike the rows of a
step are (the intraclass correlation of their costs, 0 for a random step and 1 if all cost the same); and the processor
time per sequence. Of the planned rows, that is the time to plan all rows of all ranks without reading a sample; of the
others, to join sequences in memory.

The last table shows what planning costs a process, with one lane and with one for each rank: the time per sample of the
epoch, the longest pause for a window, and the time until a run that resumes at the end of the epoch has its first rows.

Results: planned rows have 0.1% to 0.3% padding, those of ``.pack_samples()`` 0.1% to 1.0%, and those of Grain 0.5% to
2.5%. With 4 rows on each of 8 ranks, the busiest rank has 1.02 to 1.05 times the mean cost if rows are mixed, 1.00 if
they are similar, and up to 1.13 times without a plan.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from environments import python_of
from harness.questions import Question, answer, options
from numpy.typing import NDArray
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes.index import Pack
from wds_datapipes.index.format.options import Balance
from wds_datapipes.index.order.lanes import Lanes
from wds_datapipes.index.order.rows.row_columns import RowColumns
from wds_datapipes.index.order.rows.row_plan import RowPlan, window_of
from wds_datapipes.index.order.sample_order import EpochOrder

COUNT, ROW, SHARD, OPEN = 200_000, 8192, 2000, 64
#: The mean and the standard deviation of the logarithms of the lengths.
KINDS = {"texts": (6.2, 1.1), "documents": (7.5, 0.8), "sounds": (6.6, 0.5)}
#: The numbers of ranks, and of the rows of each in a step.
TOPOLOGIES = ((8, 4), (64, 2), (512, 1))
GRAIN = Path(__file__).parent / "measures" / "packed_by_grain.py"

Lengths = NDArray[np.int64]


class Rows(NamedTuple):
    """Packed rows: the tokens and the cost of each, in the order of the steps, and the seconds that they took."""

    tokens: Lengths
    costs: Lengths
    seconds: float


def lengths_of(kind: str, count: int) -> Lengths:
    mean, deviation = KINDS[kind]
    return np.random.default_rng(0).lognormal(mean, deviation, count).clip(1, ROW).astype(np.int64)


def cost_of(lengths: Lengths) -> Lengths:
    return lengths + lengths**2 // ROW


def plan_of(lengths: Lengths, step: int, balance: Balance = "mixed", lanes: int = 1) -> RowPlan:
    """Return the plan of a shuffled epoch of shards."""
    sizes = np.diff(np.append(np.arange(0, len(lengths), SHARD), len(lengths)))
    pack = Pack(length="tokens", row=ROW, cost="cost", balance=balance)
    window = plan_window(lengths, step)
    columns = RowColumns(lengths.astype(np.int32), cost_of(lengths), None)
    order, divided = EpochOrder(sizes, "window", seed=1, lanes=lanes), Lanes(len(lengths), step, lanes)
    starts = np.cumsum(sizes) - sizes
    return RowPlan(order, starts, columns, pack, lanes=divided, step=step, window=window, seed=1)


def plan_window(lengths: Lengths, step: int) -> int:
    return window_of(Pack(length="tokens", row=ROW), step, len(lengths), int(lengths.sum()))


def planned(lengths: Lengths, step: int, balance: Balance) -> Rows:
    plan = plan_of(lengths, step, balance)
    begin = time.process_time()
    count = len(plan)
    seconds = time.process_time() - begin
    measured = plan_of(lengths, step, balance)
    found = list[tuple[Lengths, Lengths]]()
    done = 0
    while done < count // step * step:  # while its windows are kept
        while measured.rows_known < done + step and not measured.is_complete:
            measured.extend()
        found.append(measured.measure(np.arange(done, done + step)))
        done += step
    empty = np.empty(0, np.int64)
    tokens, costs = zip(*found, strict=True) if found else ((), ())
    return Rows(np.concatenate([empty, *tokens]), np.concatenate([empty, *costs]), seconds)


def joined(lengths: Lengths, counts: Lengths, seconds: float) -> Rows:
    """Return rows whose sequences have these lengths, one row after the other."""
    ends = np.cumsum(counts)
    tokens, costs = (np.concatenate([[0], np.cumsum(each)]) for each in (lengths, cost_of(lengths)))
    return Rows(tokens[ends] - tokens[ends - counts], costs[ends] - costs[ends - counts], seconds)


def stream(lengths: Lengths, _step: int) -> Rows:
    tokens = np.ones(ROW, np.int32)
    samples = [{"__key__": number, "tokens": tokens[:length]} for number, length in enumerate(lengths.tolist())]
    pipe: Any = IterableWrapper(samples, deepcopy=False)
    begin = time.process_time()
    keys = [row["__key__"] for row in pipe.pack_samples(ROW, "tokens", open_rows=OPEN)]
    seconds = time.process_time() - begin
    return joined(lengths[np.concatenate(keys)], np.array([*map(len, keys)]), seconds)


def grain(lengths: Lengths, _step: int) -> Rows:
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/lengths.npy", lengths)
        files = [f"{folder}/{name}" for name in ("lengths.npy", "rows.npz")]
        subprocess.run([str(python_of("grain")), str(GRAIN), *files, str(ROW), str(OPEN)], check=True)
        with np.load(f"{folder}/rows.npz") as found:
            return joined(found["lengths"], found["counts"], float(found["seconds"]))


def next_fit(lengths: Lengths, _step: int) -> Rows:
    begin = time.process_time()
    counts, used = list[int](), ROW + 1
    for length in lengths.tolist():
        if used + length > ROW:
            counts.append(0)
            used = 0
        counts[-1] += 1
        used += length
    return joined(lengths, np.array(counts), time.process_time() - begin)


def contenders() -> dict[str, Callable[[Lengths, int], Rows]]:
    found: dict[str, Callable[[Lengths, int], Rows]] = {
        "planned, mixed": lambda lengths, step: planned(lengths, step, "mixed"),
        "planned, similar": lambda lengths, step: planned(lengths, step, "similar"),
        ".pack_samples()": stream,
        "next fit": next_fit,
    }
    if python_of("grain").exists():
        return {**found, "Grain best fit": grain}
    print("Grain is left out: python benchmarks/environments.py grain grain installs it")
    return found


def figures_of(rows: Rows, ranks: int, own: int) -> dict[str, float]:
    """Return the padding, and the balance of the steps."""
    step = ranks * own
    costs = rows.costs[: len(rows.costs) // step * step].reshape(-1, step).astype(np.float64)
    if not len(costs):
        return {}
    by_rank = costs.reshape(len(costs), ranks, own).sum(axis=2)
    between, within = step * costs.mean(axis=1).var(ddof=min(len(costs) - 1, 1)), costs.var(axis=1, ddof=1).mean()
    return {
        "padding": 1 - float(rows.tokens.sum()) / (ROW * len(rows.tokens)),
        "busiest": float(np.median(by_rank.max(axis=1) / by_rank.mean(axis=1))),
        "worst": float((by_rank.max(axis=1) / by_rank.mean(axis=1)).max()),
        "likeness": float((between - within) / (between + (step - 1) * within)),
    }


def packing(arguments: Namespace) -> dict[str, Any]:
    """Compare ways to pack."""
    count = max(2000, int(COUNT * arguments.scale))
    result = dict[str, Any]()
    for kind in KINDS:
        lengths = lengths_of(kind, count)
        own_result = result.setdefault(f"{count:,} {kind} of {lengths.mean():,.0f} tokens", {})
        for name, pack in contenders().items():
            plans = name.startswith("planned")
            rows = {shape: pack(lengths, shape[0] * shape[1]) for shape in TOPOLOGIES[: 3 if plans else 1]}
            first = rows[TOPOLOGIES[0]]
            found = {f"{own} x {each}": figures_of(rows.get((own, each), first), own, each) for own, each in TOPOLOGIES}
            own_result[name] = {"seconds_per_sample": first.seconds / count, **found}
    return result


def planning(arguments: Namespace) -> dict[str, Any]:
    """Measure what planning costs a process."""
    count = max(2000, int(5 * COUNT * arguments.scale))
    lengths, result = lengths_of("texts", count), dict[str, Any]()
    for ranks, own, lanes in [(*each, lanes) for each in TOPOLOGIES for lanes in (1, each[0])]:
        plan, pauses = plan_of(lengths, ranks * own, lanes=lanes), list[float]()
        while not plan.is_complete:
            begin = time.process_time()
            plan.extend()
            pauses.append(time.process_time() - begin)
        last = plan.rows_known - plan.step
        anchor = plan.window_at(last)
        begin = time.process_time()
        resumed = plan_of(lengths, ranks * own, lanes=lanes)
        if anchor:  # states do not count the rows of very many lanes
            resumed.begin_at(*anchor)
        while resumed.rows_known < last + plan.step:
            resumed.extend()
        resumed.expand(np.arange(last, last + own))
        resumes = time.process_time() - begin
        figures = {"seconds_per_sample": sum(pauses) / count, "longest_pause": max(pauses), "resume": resumes}
        shape = f"{ranks} x {own}, {lanes} lanes" if lanes > 1 else f"{ranks} x {own}"
        result[shape] = {"window": plan_window(lengths, ranks * own), **figures}
    return {"samples": count, "shapes": result}


if __name__ == "__main__":
    answer(options(__doc__), Question("packing", packing, 1), Question("planning", planning, 1))
