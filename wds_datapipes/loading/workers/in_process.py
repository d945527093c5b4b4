"""The pipeline of a `ShardReadingService` without workers."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from wds_datapipes.counters import Counters
from wds_datapipes.loading.checkpoint.format import Checkpoint, WorkerState
from wds_datapipes.loading.epoch_run import EpochRun, EpochStart
from wds_datapipes.loading.report import SHORTEST_S, WorkerReport, wait_bucket
from wds_datapipes.loading.snapshots import LoopPosition, Snapshot, SnapshotWriter, state_in
from wds_datapipes.loading.torchdata_api import WorkerInfo
from wds_datapipes.loading.workers.loop_items import LoopItems, Pipe
from wds_datapipes.pipes.graph import PipelineGraph
from wds_datapipes.pipes.stage import iterated_by_loader
from wds_datapipes.pipes.state.pipeline_state import load_state, save_state


@iterated_by_loader
class LocalItems(LoopItems):
    """The items of a pipeline that runs entirely in the main process, which acts as the only worker.

    Args:
        graph: the pipeline.
        worker_reset_fn: the user's function, called at the beginning of each epoch.
        replay_reason: why the pipeline resumes by replay, or "".
    """

    process_boundary = "loop"

    def __init__(
        self, graph: PipelineGraph, worker_reset_fn: Callable[[Any, Any, Any], Any] | None, replay_reason: str
    ) -> None:
        super().__init__([LoopPosition()], continues=graph.spans_epochs)
        self.source = graph.pipe
        self.counters = Counters()
        self._worker_reset_fn, self._replay_reason = worker_reset_fn, replay_reason
        self._items = 0
        self._making_s = 0.0
        self._waits = Counter[str]()
        self._run: EpochRun | None = None
        self._has_begun = False  # whether this epoch has yielded an item
        self._is_within_item = False  # whether it was asked for another one, and has not yielded it
        self._snapshot: Snapshot = None  # after the last one

    def begin(
        self, seed_generator: Any, resumed: Checkpoint | None, iter_reset_fn: Callable[[Pipe], Pipe] | None, pipe: Pipe
    ) -> None:
        """Begin an epoch."""
        # The pipeline itself is where the loop has left it, unless a stage prefetches or Ctrl-C interrupted an item.
        is_elsewhere = resumed is not None or self.ahead is not None or self._is_within_item
        bases, self._is_within_item = self.bases(resumed) if is_elsewhere else None, False
        super().begin(seed_generator, resumed, iter_reset_fn, pipe)
        start = EpochStart(
            copy.deepcopy(seed_generator),  # the next epoch must not depend on how many seeds are drawn
            None if bases is None else bases[0],
            self._replay_reason,
            iter_reset_fn=iter_reset_fn,
            worker_reset_fn=self._worker_reset_fn,
            info=WorkerInfo(1, 0),
            epoch=self.current,
        )
        self._run = EpochRun(self.source, start, counters=self.counters, seeded=pipe)
        self.source = self._run.pipe
        base = self._run.base
        self._positions[0].begin(WorkerState() if isinstance(base, str) else base)  # saving a state would raise it
        self._has_begun = False

    def __iter__(self) -> Iterator[Any]:
        begin = perf_counter()
        if self._run is None:
            raise RuntimeError("only its loader can read the pipeline of a ShardReadingService")
        if self._has_begun:  # a later stage reads it again
            load_state(self._run.graph, None)
        snapshots = SnapshotWriter(self._run.graph)
        self._is_within_item = True
        for item in self._run.items:
            took_s = perf_counter() - begin
            self._making_s += took_s
            if took_s > SHORTEST_S:
                self._waits[wait_bucket(took_s)] += 1
            self._items += 1
            self._has_begun = True
            self._snapshot = snapshots.snapshot()  # an error within the next item does not change it
            self._is_within_item = False
            if self.ahead is not None:
                self._positions[0].add(snapshots.pack([self._snapshot]), 1)
                self.taken(0)
            yield item
            self._is_within_item = True
            begin = perf_counter()
        self._is_within_item = False
        self.end()

    def states(self) -> list[WorkerState]:
        """Return the position after the items that the loop has received.

        Raises:
            StateError: the pipeline has no state.
        """
        if self._run is not None and self.is_over and self._run.spans_epochs:
            return [WorkerState.of(save_state(self._run.graph))]
        return [state_in(self._snapshot)] if self.ahead is None and self._has_begun else super().states()

    def reports(self) -> list[WorkerReport]:
        """Return statistics of the items so far."""
        report = WorkerReport(
            name="The main process",
            pid=os.getpid(),
            items=self._items,
            bytes=0,
            making_s=self._making_s,
            waiting_s=0.0,
            waited_s=self._making_s,
            shard=self.counters.shard,
            skipped=self.counters.skipped(),
            received=self._items,
            figures=self.counters.figures(),
            waits=Counter(self._waits),
        )
        return [report]
