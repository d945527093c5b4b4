"""The pipeline of a `ShardReadingService` without workers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any

from torch.utils.data import IterDataPipe
from torchdata.dataloader2.utils import WorkerInfo

from wds_datapipes.counters import COUNTERS
from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.loading.checkpoint.item_positions import ItemPositions
from wds_datapipes.loading.report import WorkerReport, log_skipped
from wds_datapipes.loading.seeding import call_with_pipeline
from wds_datapipes.pipes.stage import Stage
from wds_datapipes.pipes.state.pipeline_state import (
    load_state,
    next_epoch_state,
    record_state,
    save_state,
    spans_epochs,
)
from wds_datapipes.pipes.state.recording import Recorder, pack_records

__all__ = ["LocalItems"]


class LocalItems(Stage[Any]):
    """The whole pipeline, in the main process.

    Args:
        source: the pipeline.
    """

    #: There is no other worker.
    turn = 0

    def __init__(self, source: IterDataPipe[Any]) -> None:
        self.source = source
        self._items = 0
        self._making_s = 0.0
        self._epoch = 0
        self._told: Mapping[str, int] = COUNTERS.skipped().counts
        self._resumed: WorkerState | None = None
        self._is_begun = False  # in this epoch, by an item
        #: Stands for the items that were taken and are not delivered yet, where a stage behind takes them ahead.
        self.ahead: deque[None] | None = None
        self._trail = ItemPositions()
        self._recorder = Recorder()
        self.is_over = False

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, None
        begin = perf_counter()
        load_state(self.source, None)
        if resumed is not None:
            resumed.load(self.source)
        for item in self.source:
            self._making_s += perf_counter() - begin
            self._items += 1
            self._is_begun = True
            if self.ahead is not None:
                record = record_state(self.source, self._recorder)
                self._trail.add(pack_records([record]), 1)
                self.ahead.append(None)
            yield item
            begin = perf_counter()
        self.is_over = self.ahead is None
        self._told = log_skipped(self._epoch, COUNTERS.skipped(), self._told)

    def go_on_from(self, resumed: WorkerState) -> None:
        """Go on in the middle of an epoch when it is iterated next."""
        self._resumed = resumed
        self._trail.begin(resumed)

    def deliver(self, mark: None) -> None:  # noqa: ARG002 - there is one worker
        """Take note that the loop has the next item."""
        self._trail.deliver()

    def states(self) -> list[WorkerState]:
        """Return where to resume behind what the loop has.

        Raises:
            StateError: the pipeline has no state.
        """
        if (self.ahead is None and self._is_begun) or (self.is_over and spans_epochs(self.source)):
            return [WorkerState(save_state(self.source))]
        return [self._trail.state()]

    def reset_with(
        self,
        iter_reset_fn: Callable[[Any], Any] | None,
        worker_reset_fn: Callable[[Any, Any, Any], Any] | None,
        seed_generator: Any,
    ) -> None:
        """Call what is to be called at the beginning of an epoch."""
        self._epoch += 1
        base = self._beginning()
        self._resumed = None if self._resumed is None else base
        self._trail.begin(base)
        self._recorder = Recorder()
        self._is_begun = False
        self.is_over = False
        if self.ahead is not None:
            self.ahead.clear()
        if iter_reset_fn is not None:
            self.source = call_with_pipeline("iter_reset_fn", iter_reset_fn(self.source))
        if worker_reset_fn is not None:
            source = worker_reset_fn(self.source, WorkerInfo(1, 0), seed_generator)
            self.source = call_with_pipeline("worker_reset_fn", source)

    def _beginning(self) -> WorkerState:
        """Return where an epoch begins behind the last one."""
        if self._resumed is not None:
            return self._resumed.renewed()
        try:
            return WorkerState(next_epoch_state(save_state(self.source)) if spans_epochs(self.source) else None)
        except StateError:  # it is raised where a state is asked for
            return WorkerState(None)

    def report(self) -> WorkerReport:
        """Return what was done so far. All that is passed over in this process counts."""
        return WorkerReport(
            name="The main process",
            pid=os.getpid(),
            items=self._items,
            bytes=0,
            making_s=self._making_s,
            waiting_s=0.0,
            waited_s=self._making_s,
            shard=COUNTERS.shard,
            skipped=COUNTERS.skipped(),
            fetched_bytes=COUNTERS.fetched_bytes,
            fetching_s=COUNTERS.fetching_s,
        )
