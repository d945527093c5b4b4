"""The pipeline of a `ShardReadingService` without workers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any

from wds_datapipes.counters import Counters
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.loading.epoch import EpochRun, EpochStart
from wds_datapipes.loading.progress import LoopPosition, SnapshotWriter
from wds_datapipes.loading.report import WorkerReport, log_skipped
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.stage import Stage
from wds_datapipes.pipes.state.pipeline_state import load_state, save_state


class LocalItems(Stage[Any]):
    """The whole pipeline, in the main process.

    Args:
        source: the pipeline.
    """

    is_loaders = True
    #: The main process is the only worker.
    turn = 0

    def __init__(self, source: IterDataPipe[Any]) -> None:
        self.source = source
        self.counters = Counters()
        self._items = 0
        self._making_s = 0.0
        self._epoch = 0
        self._logged: Mapping[str, int] = {}
        self._run: EpochRun | None = None
        self._has_begun = False  # whether this epoch has yielded an item
        #: One entry for each item that was taken but not delivered yet, if a later stage prefetches.
        self.ahead: deque[None] | None = None
        self._position = LoopPosition()
        self.is_over = False

    def begin(self, start: EpochStart, seeded: Any) -> None:
        """Begin an epoch.

        Args:
            start: how it begins.
            seeded: the whole pipeline of this process.
        """
        self._epoch += 1
        self._run = EpochRun(self.source, start, counters=self.counters, seeded=seeded)
        self.source = self._run.pipe
        base = self._run.base
        self._position.begin(WorkerState(None) if isinstance(base, str) else base)  # raised when a state is requested
        self._has_begun = False
        self.is_over = False
        if self.ahead is not None:
            self.ahead.clear()

    def __iter__(self) -> Iterator[Any]:
        begin = perf_counter()
        if self._run is None:
            raise RuntimeError("the pipeline of a ShardReadingService is read by its loader only")
        if self._has_begun:  # a later stage reads it again
            load_state(self._run.items, None)
        snapshots = None if self.ahead is None else SnapshotWriter(self._run.items)
        for item in self._run.items:
            self._making_s += perf_counter() - begin
            self._items += 1
            self._has_begun = True
            if self.ahead is not None and snapshots is not None:
                self._position.add(snapshots.pack([snapshots.snapshot()]), 1)
                self.ahead.append(None)
            yield item
            begin = perf_counter()
        self.is_over = self.ahead is None
        self._logged = log_skipped(self._epoch, self.counters.skipped(), self._logged)

    def deliver(self, mark: None) -> None:  # noqa: ARG002 - there is one worker
        """Count the next item as delivered to the loop."""
        self._position.deliver()

    def states(self) -> list[WorkerState]:
        """Return the positions from which to resume after the items that the loop has received.

        Raises:
            StateError: the pipeline has no state.
        """
        if self._run is not None and (
            (self.ahead is None and self._has_begun) or (self.is_over and self._run.spans_epochs)
        ):
            return [WorkerState(save_state(self._run.items))]
        return [self._position.state()]

    def report(self) -> WorkerReport:
        """Return statistics of the items so far."""
        fetched_bytes, fetching_s = self.counters.fetched()
        return WorkerReport(
            name="The main process",
            pid=os.getpid(),
            items=self._items,
            bytes=0,
            making_s=self._making_s,
            waiting_s=0.0,
            waited_s=self._making_s,
            shard=self.counters.shard,
            skipped=self.counters.skipped(),
            fetched_bytes=fetched_bytes,
            fetching_s=fetching_s,
        )


class DeliveredCount(Stage[Any]):
    """Reports delivered items to their source, one by one, after stages that prefetch."""

    is_loaders = True

    def __init__(self, source: IterDataPipe[Any], supplier: Any) -> None:
        self.source = source
        self._supplier = supplier
        supplier.ahead = deque()

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            if self._supplier.ahead:
                self._supplier.deliver(self._supplier.ahead.popleft())
            yield item
        self._supplier.is_over = True

    def is_replicable(self) -> bool:
        """Return False: it runs only in the main process."""
        return False


def users_part(pipe: Any) -> Any:
    """Return a pipeline without the stages that count its items, which are the last ones."""
    while declared(pipe).is_loaders:
        pipe = pipe.source
    return pipe
