"""The framework of all benchmarks: contenders that run in turn, and their times as a table, a JSON file and a plot.

The speed of a machine drifts with its clock rate, its caches and its other users, often by more than the differences of
interest. Contenders therefore run in turn within one process, each once per round, and ratios are computed within a
round, in which conditions are nearly equal. Quote the median of these ratios, never an absolute time.
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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from plots import panels_of, plot_ratios, pyplot
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

__all__ = [
    "Contender",
    "Contest",
    "Result",
    "Work",
    "in_child",
    "machine",
    "options",
    "parse",
    "plot_contests",
    "pyplot",
    "write_report",
]

T = TypeVar("T")

#: The packages whose versions a report includes.
PACKAGES = ("wds-datapipes", "webdataset", "torch", "torchdata", "numpy", "pillow")


class Work(NamedTuple):
    """The work done by one run of a contender."""

    items: int
    #: The payload in bytes, or 0 if it does not matter.
    size: int


def _no_size(_item: Any) -> int:
    return 0


@dataclass(frozen=True)
class Contender:
    """A participant in a contest.

    Args:
        name: the name in tables and plots.
        begin: starts the work from the beginning, and returns an iterable of items.
        size_of: returns the payload of an item in bytes; called before timing only.
        is_limit: it intentionally does different work, such as reading without parsing, so its numbers of items and
            bytes are not compared.
    """

    name: str
    begin: Callable[[], Iterable[Any]]
    size_of: Callable[[Any], int] = _no_size
    is_limit: bool = False

    def count(self) -> Work:
        """Run to the end, and count the items and their bytes."""
        items = size = 0
        for item in self.begin():
            items += 1
            size += self.size_of(item)
        return Work(items, size)

    def run(self) -> None:
        """Run to the end without counting; like any loop, hold each item while the next one is produced."""
        for _ in self.begin():
            pass


@dataclass
class Result:
    """The times of one contender in each round, in seconds per item."""

    name: str
    item_size: float
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Items per second, by the median of the rounds."""
        return 1 / statistics.median(self.wall)

    @property
    def best_rate(self) -> float:
        """Items per second in the best round."""
        return 1 / min(self.wall)

    @property
    def spread(self) -> float:
        """The interquartile range of the rounds, relative to the median."""
        if len(self.wall) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.wall, n=4, method="inclusive")
        return (high - low) / statistics.median(self.wall)

    def times(self, reference: Result) -> float:
        """The speed relative to the reference: the median of the ratios within each round."""
        return statistics.median(theirs / ours for ours, theirs in zip(self.wall, reference.wall, strict=True))

    def times_cpu(self, reference: Result) -> float:
        """The speed relative to the reference in CPU time."""
        return statistics.median(theirs / ours for ours, theirs in zip(self.cpu, reference.cpu, strict=True))

    def cpu_facts(self, reference: Result) -> dict[str, Any]:
        """Return the results in CPU time for a JSON file."""
        return {"times_reference_cpu": self.times_cpu(reference), "cpu_s": self.cpu}


@dataclass
class Contest:
    """A comparison of contenders that do the same work; limits come last.

    Args:
        title: the title of the table and the plot.
        contenders: the contenders, in the order in which they run.
        reference: the name of the contender to which ratios refer.
        unit: the name of an item.
        min_duration_s: the minimum time to measure, in seconds; shorter runs are repeated.
        has_workers: whether other processes do the work, whose CPU time is not measured.
    """

    title: str
    contenders: Sequence[Contender]
    reference: str
    unit: str = "sample"
    min_duration_s: float = 0.3
    has_workers: bool = False
    results: list[Result] = field(default_factory=list)

    def check(self) -> dict[str, Work]:
        """Run each contender once, and raise unless all of them did the same work."""
        done = {contender.name: contender.count() for contender in self.contenders}
        compared = {contender.name: done[contender.name] for contender in self.contenders if not contender.is_limit}
        if len(set(compared.values())) != 1:
            raise AssertionError(f"{self.title}: the contenders did not do the same work: {compared}")
        return done

    def run(self, rounds: int) -> list[Result]:
        """Check that all do the same work, then time them in turn; the times of limits are per item of the others."""
        done = self.check()
        work = next(done[contender.name] for contender in self.contenders if not contender.is_limit)
        self.results = [Result(each.name, done[each.name].size / work.items) for each in self.contenders]
        # Exclude existing objects from garbage collection, so that the heap of one contender does not slow down others.
        # The collector stays on, because allocations are part of the cost of a contender.
        gc.collect()
        gc.freeze()
        with Progress(transient=True) as progress:
            bar = progress.add_task(self.title, total=rounds * len(self.contenders))
            for _ in range(rounds):
                for contender, result in zip(self.contenders, self.results, strict=True):
                    wall, cpu, runs = _measure(contender.run, self.min_duration_s)
                    result.wall.append(wall / runs / work.items)
                    result.cpu.append(cpu / runs / work.items)
                    progress.advance(bar)
        gc.unfreeze()
        return self.results

    def result(self, name: str) -> Result:
        """Return the result of a contender."""
        return next(result for result in self.results if result.name == name)

    def show(self) -> None:
        """Print the results as a table, the fastest first."""
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
        console.print(f"times: speed relative to {self.reference}, median of {len(reference.wall)} rounds\n")

    def facts(self) -> dict[str, Any]:
        """Return the results for a JSON file, with all times in seconds per item."""
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
                    "wall_s": result.wall,
                    **({} if self.has_workers else result.cpu_facts(reference)),
                }
                for result in self.results
            ],
        }


def _measure(run: Callable[[], None], min_duration_s: float) -> tuple[float, float, int]:
    """Run repeatedly for a minimum time; return the elapsed seconds, the CPU seconds, and the number of runs."""
    runs = 0
    cpu, wall = time.process_time(), time.perf_counter()
    while True:
        run()
        runs += 1
        if (elapsed := time.perf_counter() - wall) >= min_duration_s:
            return elapsed, time.process_time() - cpu, runs


def in_child(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a forked process, which inherits all imports, and return its result.

    The process may start others.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, *arguments).result()


def options(document: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks; ``document`` is the docstring of the program."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="the number of rounds (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="the size of the data, relative to the default")
    parser.add_argument("--data", type=Path, help="the folder for the data, kept for the next run (a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the results, as PNG, SVG or PDF")
    parser.add_argument("--quick", action="store_true", help="use little data and one round, as a smoke test")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; ``--quick`` reduces the rounds and the data."""
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.scale = 1, min(arguments.scale, 0.02)
    return arguments


def machine() -> dict[str, Any]:
    """Describe the machine on which results were measured."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg(),
        "versions": {package: _version(package) for package in PACKAGES},
    }


def _processor() -> str:
    """Return the model of the processor, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write_report(path: Path | None, facts: Any) -> None:
    """Write the results as JSON, with a description of the machine."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), "results": facts}, indent=1) + "\n", encoding="utf-8")


def plot_contests(path: Path | None, contests: Sequence[Contest]) -> None:
    """Plot a panel for each contest: the speed relative to the reference."""
    plot_ratios(path, panels_of(contest.facts() for contest in contests))
