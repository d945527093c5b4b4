"""`LoadingReport`: what the workers have done, and whether the loop or the workers were waited for."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wds_datapipes.counters import Skipped
from wds_datapipes.extras import require

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["LoadingReport", "WorkerReport", "log_skipped"]

LOGGER = logging.getLogger("wds_datapipes")


@dataclass(frozen=True)
class WorkerReport:
    """What one worker has done since it was started.

    Attributes:
        name: ``"Worker 0"``, or ``"The main process"`` if there are no workers.
        pid: its process.
        items: how many items it has made. They need not have been used yet.
        bytes: how large they were on their way, in bytes; 0 in the main process.
        making_s: how long the pipeline took to make them, in seconds, waiting for data included.
        waiting_s: how long the worker waited for the loop to use them, in seconds.
        waited_s: how long the loop waited for this worker, in seconds.
        shard: the shard that it opened last, or "".
        skipped: what its stages have passed over.
        fetched_bytes: how much it has got from stores, in bytes.
        fetching_s: how long it waited for stores, in seconds, all reads that were under way at a time added up. What is
            read ahead is waited for, too, and need not hold up anybody.
    """

    name: str
    pid: int
    items: int
    bytes: int
    making_s: float
    waiting_s: float
    waited_s: float
    shard: str
    skipped: Skipped
    fetched_bytes: int = 0
    fetching_s: float = 0.0


@dataclass(frozen=True)
class LoadingReport:
    """What the workers of a loader have done, in all epochs so far.

    ``print(report)`` shows a line, and rich's ``print`` a table.

    Attributes:
        epoch: the number of the epoch that began last, from 1; 0 before the first.
        workers: one report for each worker.
        dispatcher: that of the dispatching process, whose items the workers take, if there is one.
    """

    epoch: int
    workers: Sequence[WorkerReport]
    dispatcher: WorkerReport | None = None

    @property
    def items(self) -> int:
        """How many items were made."""
        return sum(worker.items for worker in self.workers)

    @property
    def skipped(self) -> Skipped:
        """What was passed over, by all processes together."""
        counts: Counter[str] = Counter()
        for process in self._processes:
            counts.update(process.skipped.counts)
        return Skipped(dict(counts), tuple(error for process in self._processes for error in process.skipped.latest))

    @property
    def _processes(self) -> list[WorkerReport]:
        return [*self.workers, *([] if self.dispatcher is None else [self.dispatcher])]

    def __str__(self) -> str:
        size = sum(worker.bytes for worker in self.workers)
        waited = sum(worker.waited_s for worker in self.workers)
        waiting = sum(worker.waiting_s for worker in self.workers)
        skipped = ", ".join(f"{count} x {what}" for what, count in sorted(self.skipped.counts.items()))
        makers = f"{len(self.workers)} workers" if len(self.workers) != 1 else _within(self.workers[0].name)
        epochs = f"{self.epoch} epoch{'s' * (self.epoch != 1)}"
        fetched = sum(process.fetched_bytes for process in self._processes)
        fetching = sum(process.fetching_s for process in self._processes)
        stores = f"; {_size(fetched)} came from stores, in {fetching:.1f} s" if fetched or fetching else ""
        return (
            f"{epochs}: {self.items:,} items, {_size(size)}, from {makers}; the loop waited {waited:.1f} s for them, "
            f"and they waited {waiting:.1f} s for the loop{stores}; passed over: {skipped or 0}"
        )

    def __rich__(self) -> Table:
        require("rich", extra="cli", purpose="show a report as a table")
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(str(self)), title_justify="left", title_style="", box=SIMPLE_HEAD, padding=0)
        table.add_column("worker", no_wrap=True)
        for heading in ("pid", "items", "size", "making", "waiting", "waited\nfor", "passed\nover"):
            table.add_column(heading, justify="right", no_wrap=True)
        has_stores = any(worker.fetching_s for worker in self._processes)
        for heading in ("from\nstores", "in") if has_stores else ():
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("shard", no_wrap=True)
        for worker in self._processes:
            seconds = (f"{value:.1f} s" for value in (worker.making_s, worker.waiting_s, worker.waited_s))
            total = str(worker.skipped.total)
            row: tuple[str, ...] = (
                worker.name,
                str(worker.pid),
                f"{worker.items:,}",
                _size(worker.bytes),
                *seconds,
                total,
            )
            if has_stores:
                row = (*row, _size(worker.fetched_bytes), f"{worker.fetching_s:.1f} s")
            table.add_row(*row, Text(worker.shard.rpartition("/")[2]))  # no markup, whatever brackets it has
        return table


def log_skipped(epoch: int, skipped: Skipped, told: Mapping[str, int]) -> Mapping[str, int]:
    """Log one line about what was passed over, if anything was that was not told of yet; return what was told by now.

    Args:
        epoch: the number of the epoch that has ended.
        skipped: what was passed over in all epochs.
        told: what this has returned last, or nothing.
    """
    new = {what: count - told.get(what, 0) for what, count in skipped.counts.items() if count > told.get(what, 0)}
    if new:
        counts = ", ".join(f"{count} x {what}" for what, count in sorted(new.items()))
        LOGGER.warning("epoch %d: passed over %d items: %s", epoch, sum(new.values()), counts)
    return skipped.counts


def _within(name: str) -> str:
    """Return a name as it stands within a sentence."""
    return name[:1].lower() + name[1:]


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 999.5:  # it would be rounded to 1e+03
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} TB" if count >= 999.5 else f"{count:.3g} TB"
