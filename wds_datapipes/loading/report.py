"""`LoadingReport`: statistics of the workers, which show whether the loop or the workers are the bottleneck."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wds_datapipes.counters import Skipped, sum_skipped
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.parallel.progress import human_bytes
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.inspection import upstream

LOGGER = logging.getLogger("wds_datapipes")


@dataclass(frozen=True)
class WorkerReport:
    """Statistics of one worker since it was started.

    Attributes:
        name: ``"Worker 0"``, or ``"The main process"`` if there are no workers.
        pid: the ID of its process.
        items: the number of items it has made, including those that the loop has not received yet.
        bytes: the size of the items sent, in bytes; 0 in the main process.
        making_s: the time the pipeline took to make them, in seconds, including waiting for data.
        waiting_s: the time the worker waited for the loop, in seconds.
        waited_s: the time the loop waited for this worker, in seconds.
        shard: the shard that it opened last, or "".
        skipped: the items that its stages have skipped.
        fetched_bytes: the number of bytes received from stores.
        fetching_s: the time spent waiting for stores, in seconds, summed over concurrent reads. It includes
            prefetching, which does not necessarily delay the loop.
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
    """Statistics of the workers of a loader, over all epochs so far.

    ``print(report)`` prints one line.

    Attributes:
        epoch: the number of the latest epoch, from 1; 0 before the first.
        workers: one report for each worker.
    """

    epoch: int
    workers: Sequence[WorkerReport]

    @property
    def items(self) -> int:
        """The number of items made."""
        return sum(worker.items for worker in self.workers)

    @property
    def skipped(self) -> Skipped:
        """The items that all workers have skipped."""
        return sum_skipped(worker.skipped for worker in self.workers)

    def __str__(self) -> str:
        def total(name: str) -> Any:
            return sum(getattr(worker, name) for worker in self.workers)

        skipped = ", ".join(f"{count} x {what}" for what, count in sorted(self.skipped.counts.items()))
        makers = f"{len(self.workers)} workers"
        if len(self.workers) == 1:
            name = self.workers[0].name
            makers = name[:1].lower() + name[1:]
        fetched, fetching_s = total("fetched_bytes"), total("fetching_s")
        stores = f"; {human_bytes(fetched)} came from stores, in {fetching_s:.1f} s" if fetched or fetching_s else ""
        return (
            f"{self.epoch} epoch{'s' * (self.epoch != 1)}: {self.items:,} items, {human_bytes(total('bytes'))}, from "
            f"{makers}; the loop waited {total('waited_s'):.1f} s for them, and they waited {total('waiting_s'):.1f} s "
            f"for the loop{stores}; skipped: {skipped or 0}"
        )


def count_skipped(pipe: IterDataPipe[Any]) -> Skipped:
    """Return the items that the stages of a pipeline have skipped in this process, in all passes so far.

    With a loader, get a `LoadingReport` from its reading service instead, since it iterates over copies of the
    pipeline.

    Args:
        pipe: the last stage.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "cls": b"1"}, {"__key__": "b", "cls": b"x"}])
        >>> pipe = samples.wds_decode(on_error="skip")
        >>> len(list(pipe)), count_skipped(pipe).counts
        (1, {'wds_decode: DecodeError': 1})
    """
    counters = {id(each): each for each in (declared(stage).counters for stage in upstream(pipe))}
    return sum_skipped(each.skipped() for each in counters.values())


def log_skipped(epoch: int, skipped: Skipped, logged: Mapping[str, int]) -> Mapping[str, int]:
    """Log one line about the items skipped since the last call, if any; return the counts so far.

    Args:
        epoch: the number of the epoch that has ended.
        skipped: the items skipped in all epochs.
        logged: the previous return value, or an empty mapping.
    """
    new = {what: count - logged.get(what, 0) for what, count in skipped.counts.items() if count > logged.get(what, 0)}
    if new:
        counts = ", ".join(f"{count} x {what}" for what, count in sorted(new.items()))
        LOGGER.warning("epoch %d: skipped %d items: %s", epoch, sum(new.values()), counts)
    return skipped.counts
