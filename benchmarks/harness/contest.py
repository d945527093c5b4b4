"""Contests: contenders that run in turn, and their times as a table, and as results for a file.

The speed of a machine drifts with its clock rate, its caches and its other users, often by more than the differences of
interest. Contenders therefore run in turn, each once per round, and ratios are computed within a round, in which
conditions are nearly equal. Those of a contest do so within one process. Quote the median of these ratios, never an
absolute time.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

__all__ = ["Contender", "Contest", "Result", "Work", "in_turn"]

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


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

    def run(self, rounds: int) -> dict[str, Any]:
        """Check that all do the same work, time them in turn, print a table, and return the results for a JSON file.

        The times of limits are per item of the others.
        """
        done = self.check()
        work = next(done[contender.name] for contender in self.contenders if not contender.is_limit)
        self.results = [Result(each.name, done[each.name].size / work.items) for each in self.contenders]
        # Exclude existing objects from garbage collection, so that the heap of one contender does not slow down others.
        # The collector stays on, because allocations are part of the cost of a contender.
        gc.collect()
        gc.freeze()
        measures = {each.name: partial(_measure, each.run, self.min_duration_s) for each in self.contenders}
        times, _ = in_turn(self.title, measures, rounds)
        gc.unfreeze()
        for result in self.results:
            result.wall = [wall / runs / work.items for wall, _, runs in times[result.name]]
            result.cpu = [cpu / runs / work.items for _, cpu, runs in times[result.name]]
        self.show()
        return self.facts()

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
        """Return the results, with all times in seconds per item."""
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


def in_turn(
    title: str,
    measures: Mapping[K, Callable[[], T]],
    rounds: int,
    *,
    errors: type[Exception] | tuple[type[Exception], ...] = (),
    required: Container[K] = (),
) -> tuple[dict[K, list[T]], dict[K, str]]:
    """Measure each contender once per round, in the opposite order every other round.

    Args:
        title: what the progress bar shows.
        measures: functions that measure each contender once.
        rounds: the number of rounds.
        errors: a contender that raises these is left out.
        required: the contenders whose errors are raised.

    Returns:
        The results of each contender, and why others are left out.
    """
    found: dict[K, list[T]] = {name: [] for name in measures}
    left_out: dict[K, str] = {}
    # Without a refresh thread, because measures fork processes.
    with Progress(transient=True, auto_refresh=False) as progress:
        bar = progress.add_task(title, total=rounds * len(found))
        for number in range(rounds):
            for name in [*found] if number % 2 == 0 else [*reversed(found)]:
                try:
                    found[name].append(measures[name]())
                except errors as error:
                    if name in required:
                        raise
                    left_out[name] = str(error)
                    del found[name]
                progress.update(bar, advance=1, refresh=True)
    return found, left_out


def _measure(run: Callable[[], None], min_duration_s: float) -> tuple[float, float, int]:
    """Run repeatedly for a minimum time; return the elapsed seconds, the CPU seconds, and the number of runs."""
    runs = 0
    cpu, wall = time.process_time(), time.perf_counter()
    while True:
        run()
        runs += 1
        if (elapsed := time.perf_counter() - wall) >= min_duration_s:
            return elapsed, time.process_time() - cpu, runs
