"""What all benchmarks share: contenders that take turns, and their times as a table, a JSON file and a plot.

A machine is never the same for long: its clock, its caches and its other users drift by more than most differences
that matter. So contenders take turns within one process, a round is one turn of each, and ratios are formed within a
round, where both sides met nearly the same machine. The median of these ratios is what to quote, never a bare time.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

__all__ = [
    "Contender",
    "Contest",
    "Result",
    "Work",
    "machine",
    "options",
    "parse",
    "plot_bars",
    "plot_contests",
    "pyplot",
    "write_report",
]

T = TypeVar("T")

#: The packages whose versions a report tells.
PACKAGES = ("wds-datapipes", "webdataset", "torch", "torchdata", "numpy", "pillow")


class Work(NamedTuple):
    """What one run of a contender did."""

    items: int
    #: Bytes of payload, or 0 where they do not matter.
    size: int


def _no_size(_item: Any) -> int:
    return 0


@dataclass(frozen=True)
class Contender:
    """Somebody who does the work of a contest.

    Args:
        name: what to call it.
        begin: begins the work anew, and returns the items that it delivers.
        size_of: the bytes of payload of an item; asked once, before the timing.
        is_limit: it does something else on purpose, such as reading without parsing, and is not held to the others'
            number of items and bytes.
    """

    name: str
    begin: Callable[[], Iterable[Any]]
    size_of: Callable[[Any], int] = _no_size
    is_limit: bool = False

    def count(self) -> Work:
        """Do all of the work, and count the items and their bytes."""
        items = size = 0
        for item in self.begin():
            items += 1
            size += self.size_of(item)
        return Work(items, size)

    def run(self) -> None:
        """Do all of the work, and nothing else; as in any loop, an item is held while the next one is made."""
        for _ in self.begin():
            pass


@dataclass
class Result:
    """The times of one contender: one of each for each round, in seconds for an item."""

    name: str
    item_size: float
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Items a second, by the median of the rounds."""
        return 1 / statistics.median(self.wall)

    @property
    def best_rate(self) -> float:
        """Items a second in the best round."""
        return 1 / min(self.wall)

    @property
    def spread(self) -> float:
        """How far the middle half of the rounds lies apart, as a part of the median."""
        if len(self.wall) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.wall, n=4, method="inclusive")
        return (high - low) / statistics.median(self.wall)

    def times(self, reference: Result) -> float:
        """How many times as fast as the reference it was: the median of the ratios within each round."""
        return statistics.median(theirs / ours for ours, theirs in zip(self.wall, reference.wall, strict=True))

    def times_cpu(self, reference: Result) -> float:
        """The same, by processor time instead of time on the clock."""
        return statistics.median(theirs / ours for ours, theirs in zip(self.cpu, reference.cpu, strict=True))


@dataclass
class Contest:
    """Contenders for one piece of work; those that are not held to the same count and bytes come last.

    Args:
        title: what is done, for people.
        contenders: in the order of their turns.
        reference: the name of the contender that ratios are formed to.
        unit: what an item is called.
        shortest_turn: a turn is repeated until it has lasted so long, in seconds.
    """

    title: str
    contenders: Sequence[Contender]
    reference: str
    unit: str = "sample"
    shortest_turn: float = 0.3
    results: list[Result] = field(default_factory=list)

    def check(self) -> dict[str, Work]:
        """Let each contender work once, and raise unless all of them did the same work."""
        done = {contender.name: contender.count() for contender in self.contenders}
        held = {contender.name: done[contender.name] for contender in self.contenders if not contender.is_limit}
        if len(set(held.values())) != 1:
            raise AssertionError(f"{self.title}: the contenders did not do the same work: {held}")
        return done

    def run(self, rounds: int) -> list[Result]:
        """Check that all do the same work, then time them in turn; limits are counted in the items of the others."""
        done = self.check()
        work = next(done[contender.name] for contender in self.contenders if not contender.is_limit)
        self.results = [Result(each.name, done[each.name].size / work.items) for each in self.contenders]
        # What is imported and cached by now is left out of later collections, so that the heap of one contender is
        # no burden to another. The collector stays on: what a contender allocates is its own cost.
        gc.collect()
        gc.freeze()
        with Progress(transient=True) as progress:
            bar = progress.add_task(self.title, total=rounds * len(self.contenders))
            for _ in range(rounds):
                for contender, result in zip(self.contenders, self.results, strict=True):
                    wall, cpu, turns = _turn(contender.run, self.shortest_turn)
                    result.wall.append(wall / turns / work.items)
                    result.cpu.append(cpu / turns / work.items)
                    progress.advance(bar)
        gc.unfreeze()
        return self.results

    def result(self, name: str) -> Result:
        """Return one contender's result."""
        return next(result for result in self.results if result.name == name)

    def show(self) -> None:
        """Print the table, the fastest first."""
        reference = self.result(self.reference)
        table = Table(title=self.title, title_justify="left")
        table.add_column("contender", no_wrap=True)
        headings = [f"{self.unit}s/s", "best", "spread", "MB/s", f"µs/{self.unit}", "CPU µs", "times", "times (CPU)"]
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for result in sorted(self.results, key=lambda result: -result.rate):
            table.add_row(
                result.name,
                f"{result.rate:,.0f}",
                f"{result.best_rate:,.0f}",
                f"{result.spread:.0%}",
                f"{result.rate * result.item_size / 1e6:,.0f}" if result.item_size else "",
                f"{1e6 / result.rate:,.2f}",
                f"{1e6 * statistics.median(result.cpu):,.2f}",
                f"{result.times(reference):.2f}",
                f"{result.times_cpu(reference):.2f}",
                style="bold" if result is reference else None,
            )
        console = Console(width=max(132, Console().width))
        console.print(table)
        console.print(f"times: as fast as {self.reference}, median of the ratios within {len(reference.wall)} rounds\n")

    def facts(self) -> dict[str, Any]:
        """Return the results for a JSON file, with all times, in seconds for an item."""
        reference = self.result(self.reference)
        return {
            "title": self.title,
            "unit": self.unit,
            "reference": self.reference,
            "contenders": [
                {
                    "name": result.name,
                    f"{self.unit}s_per_s": result.rate,
                    "best": result.best_rate,
                    "spread": result.spread,
                    "bytes_per_item": result.item_size,
                    "times_reference": result.times(reference),
                    "times_reference_cpu": result.times_cpu(reference),
                    "wall_s": result.wall,
                    "cpu_s": result.cpu,
                }
                for result in self.results
            ],
        }


def _turn(run: Callable[[], None], shortest: float) -> tuple[float, float, int]:
    """Run until it has lasted long enough to be timed; return seconds, processor seconds, and how often it ran."""
    turns = 0
    cpu, wall = time.process_time(), time.perf_counter()
    while True:
        run()
        turns += 1
        if (lasted := time.perf_counter() - wall) >= shortest:
            return lasted, time.process_time() - cpu, turns


def in_child(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a forked process of its own, which begins with what this one has imported; wait for it."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)


def options(document: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all benchmarks have; ``document`` is the program's docstring."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of each contender (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the data, 1 is the usual one")
    parser.add_argument("--data", type=Path, help="folder for the data, kept for the next run (a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures, as PNG, SVG or PDF")
    parser.add_argument("--quick", action="store_true", help="little data and two rounds, to see that it works")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; ``--quick`` means less of everything."""
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.scale = 2, min(arguments.scale, 0.02)
    return arguments


def machine() -> dict[str, Any]:
    """Tell where figures were measured."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg(),
        "versions": {package: _version(package) for package in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write_report(path: Path | None, facts: Any) -> None:
    """Write the results as JSON, with the machine they were measured on."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), "results": facts}, indent=1) + "\n", encoding="utf-8")


def plot_bars(path: Path | None, values: Mapping[str, float], title: str, unit: str) -> None:
    """Draw one bar for each value."""
    if path is None:
        return
    plt = pyplot()
    figure, panel = plt.subplots(figsize=(9, 0.32 * len(values) + 1.1), layout="constrained")
    names = list(values)[::-1]
    bars = panel.barh(names, [values[name] for name in names], color=[_colour(name) for name in names])
    panel.bar_label(bars, fmt="{:.3g}", padding=3, fontsize=8)
    panel.set_title(title, loc="left", fontsize=10)
    panel.set_xlabel(unit, fontsize=8)
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def pyplot() -> Any:
    """Return matplotlib's pyplot, which only plots need."""
    import matplotlib

    matplotlib.use("Agg")  # draws into files, on machines without a screen too
    import matplotlib.pyplot as plt

    return plt


def _colour(name: str) -> str:
    return "tab:blue" if "ours" in name else "tab:orange" if "webdataset" in name else "tab:gray"


def plot_contests(path: Path | None, contests: Sequence[Contest]) -> None:
    """Draw one panel of bars for each contest: times the reference, with the range over the rounds."""
    if path is None:
        return
    plt = pyplot()
    figure, panels = plt.subplots(
        len(contests), 1, squeeze=False, figsize=(9, sum(0.32 * len(c.contenders) + 1.1 for c in contests)),
        height_ratios=[len(c.contenders) + 2 for c in contests], layout="constrained",
    )  # fmt: skip
    for panel, contest in zip(panels[:, 0], contests, strict=True):
        reference = contest.result(contest.reference)
        results = sorted((r for r in contest.results), key=lambda result: result.times(reference))
        for row, result in enumerate(results):
            ratios = [theirs / ours for ours, theirs in zip(result.wall, reference.wall, strict=True)]
            middle = result.times(reference)
            panel.barh(row, middle, color=_colour(result.name))
            panel.plot([min(ratios), max(ratios)], [row, row], color="black", linewidth=1)
            panel.text(max(ratios), row, f"  {middle:.1f}", va="center", fontsize=8)
        panel.set_yticks(range(len(results)), [result.name for result in results], fontsize=8)
        panel.set_title(contest.title, loc="left", fontsize=10)
        panel.set_xlabel(f"times as fast as {contest.reference}", fontsize=8)
        panel.margins(x=0.1)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
