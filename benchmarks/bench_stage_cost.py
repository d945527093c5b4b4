"""How much does each additional stage cost per item?

    python benchmarks/bench_stage_cost.py --json stages.json --plot stages.png

The same stage is chained 0 to 4 times after a source in memory. The slope of a line fitted to the times is the cost of
a stage. It does not include the source, whose cost differs between pipes and generators.

Results in µs per item: 0.02 for a plain generator, 0.11 for one of our pipes that yields its input, 0.32 for the same
pipe without our base class, and 0.6 for torch's ``.map``. With ``WDS_DATAPIPES_PATCHES=0``, the last two take 1.6 and
1.8. ``.map_dict`` (0.56), ``.rename`` (1.04) and ``.to_tuple`` (1.02) also create a new dict or tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from contest import Contender, Contest, options, parse, write_report
from plots import pyplot
from rich.console import Console
from rich.table import Table
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes import Stage

Build = Callable[[list[Any], int], Iterable[Any]]
STAGES = range(5)


def same(item: Any) -> Any:
    return item


def forward(source: Iterable[Any]) -> Iterator[Any]:
    # Not `yield from`, because stages handle each item.
    for item in source:  # noqa: UP028  see above
        yield item


class Forwarder(Stage[Any]):
    """A stage implemented like those of this package."""

    is_stateless = True

    def __init__(self, source: IterDataPipe[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return forward(self.source)


class PlainForwarder(IterDataPipe[Any]):
    """A stage implemented as in torch's documentation."""

    def __init__(self, source: IterDataPipe[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yield from forward(self.source)


def generators(items: list[Any], stages: int) -> Iterable[Any]:
    result: Iterable[Any] = iter(items)
    for _ in range(stages):
        result = forward(result)
    return result


def pipes(stage: Callable[[Any, int], Any]) -> Build:
    """Return a function that chains a stage; ``stage`` receives the number of stages before it."""

    def build(items: list[Any], stages: int) -> Iterable[Any]:
        pipe: IterDataPipe[Any] = IterableWrapper(items, deepcopy=False)
        for number in range(stages):
            pipe = stage(pipe, number)
        return pipe

    return build


KINDS: dict[str, Build] = {
    "plain generator": generators,
    "our pipe, yields its input": pipes(lambda pipe, _: Forwarder(pipe)),
    "ours, .map_dict(cls=same)": pipes(lambda pipe, _: pipe.map_dict(cls=same)),
    "ours, .rename(one field)": pipes(lambda pipe, number: pipe.rename(**{"ba"[number % 2]: "ab"[number % 2]})),
    "ours, .to_tuple(two fields)": pipes(lambda pipe, number: pipe.to_tuple("a", "cls") if number == 0 else pipe),
    "pipe as documented by torch, yields its input": pipes(lambda pipe, _: PlainForwarder(pipe)),
    "torch .map(same)": pipes(lambda pipe, _: pipe.map(same)),
}
#: Yields tuples instead of samples, so it cannot be chained.
ONCE = "ours, .to_tuple(two fields)"


def contender(kind: str, items: list[Any], stages: int) -> Contender:
    return Contender(f"{kind} x {stages}", lambda: KINDS[kind](items, stages))


def slopes(contest: Contest) -> dict[str, tuple[list[float], float]]:
    """Return the best times of each kind and the cost of a stage, in µs per item.

    A round takes only milliseconds, so an interruption distorts it; the best times are the most stable ones.
    """
    found = {}
    for kind in KINDS:
        counts = [0, 1] if kind == ONCE else list(STAGES)
        times = [1e6 / contest.result(f"{kind} x {count}").best_rate for count in counts]
        found[kind] = (times, float(np.polyfit(counts, times, 1)[0]))
    return found


def show(found: dict[str, tuple[list[float], float]]) -> None:
    table = Table(title="µs per item, with 0 to 4 stages (best rounds)", title_justify="left")
    table.add_column("stage", no_wrap=True)
    for heading in [*map(str, STAGES), "one more stage"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for kind, (times, slope) in found.items():
        cells = [f"{time:.2f}" for time in times] + [""] * (len(STAGES) - len(times))
        table.add_row(kind, *cells, f"{slope:.2f}")
    Console(width=100).print(table)


def plot(path: Path | None, found: dict[str, tuple[list[float], float]]) -> None:
    if path is None:
        return
    figure, panel = pyplot().subplots(figsize=(8, 5), layout="constrained")
    for kind, (times, slope) in found.items():
        panel.plot(range(len(times)), times, marker="o", label=f"{kind}: {slope:.2f} µs")
    panel.set_xticks(list(STAGES))
    panel.set_xlabel("number of stages")
    panel.set_ylabel("µs per item")
    panel.legend(frameon=False)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    arguments = parse(options(__doc__, rounds=25))
    samples = [{"__key__": str(number), "a": b"text", "cls": number} for number in range(int(20_000 * arguments.scale))]
    contenders = [
        contender(kind, samples, count) for kind in KINDS for count in STAGES if kind != ONCE or count in (0, 1)
    ]
    contest = Contest("One more stage", contenders, f"{next(iter(KINDS))} x 0", unit="item", min_duration_s=0.0)
    contest.run(arguments.rounds)
    found = slopes(contest)
    show(found)
    facts = {kind: {"us_per_item": times, "us_per_stage": slope} for kind, (times, slope) in found.items()}
    write_report(arguments.json, facts)
    plot(arguments.plot, found)


if __name__ == "__main__":
    main()
