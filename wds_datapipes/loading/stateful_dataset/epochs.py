"""The epochs of a `StatefulShards` in one process: a worker of a loader, or the main process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import get_worker_info

from wds_datapipes.epoch import NO_EPOCH, Epoch, seed_after
from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import Checkpoint, WorkerState
from wds_datapipes.loading.data_parallel_group import DataParallelGroup
from wds_datapipes.loading.epoch_run import EpochRun, EpochStart
from wds_datapipes.loading.snapshots import Snapshot, SnapshotWriter, state_in
from wds_datapipes.loading.splitting import split_by_rank, split_by_worker
from wds_datapipes.loading.state import LoaderState
from wds_datapipes.loading.stateful_dataset.tracking import END, RecordedBatch, SharedEpochs, WorkerRow
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import PipelineGraph
from wds_datapipes.pipes.inspection import iteration_of
from wds_datapipes.pipes.instance import own_worker
from wds_datapipes.pipes.state.pipeline_state import next_epoch_state, replay_reason, save_state
from wds_datapipes.pipes.state.seeding import draw_global_seeds, seed_stages
from wds_datapipes.received_epochs import UNKNOWN, ReceivedEpochs
from wds_datapipes.seeds import SeedGenerator


class Epochs:
    """Reads a pipeline in this process, one epoch per iteration, and records the position.

    Args:
        graph: the pipeline, before the split.
        seed: the seed of the orders.
        group: the ranks that share the data.

    Attributes:
        state: what it loads and saves.
        shared: the memory that all processes share.
        seed: the seed of the first epoch.
        epoch: the current epoch.
        number: the number of this worker in the round-robin order of the epoch.
        is_over: whether the whole epoch has been yielded; true before the first epoch.
        is_drained: whether the pipeline has ended in this process, although the loader may hold its last items.
        spans_epochs: whether an epoch continues where the previous one ended.
        before: the position at which the previous epoch ended, for the processes that begin the next one.
        is_tracked: whether these processes belong to a tracked loop.
        received: the epochs that the loop has received.
        known: how many of the epochs that have begun they include.
        has_begun: whether the latest iteration in this process has begun its epoch.
        is_broken: whether an error has ended it within a batch.
        counts_batches: whether a tracked loop in this process begins, which calls `receive` after each batch.
    """

    def __init__(self, graph: PipelineGraph, seed: int, group: DataParallelGroup) -> None:
        self._is_split = group.is_split
        self.state = LoaderState(group.rank, graph)
        self.shared = SharedEpochs()
        self.seed = seed
        self.number = 0
        self.is_over = True
        self.is_drained = False
        self.spans_epochs = graph.spans_epochs
        self.before: Checkpoint | None = None
        self.is_tracked = False
        self.received = ReceivedEpochs()
        self.known = 0
        self._replay_reason = replay_reason(graph)
        self.is_broken = self.counts_batches = False
        self._received: Snapshot | WorkerState = None
        self._run: EpochRun | None = None
        self._loads = 0
        # The state of the current epoch.
        self.epoch = NO_EPOCH
        self.has_begun = False
        self._base = WorkerState()
        self._has_items = False
        self._iterations = list[tuple[Any, int]]()  # of the stages with a state, since the first item
        self._records = False
        self._has_recorded_end = False
        self._has_begun_any = False  # any epoch, as a worker
        self._snapshots: SnapshotWriter | None = None

    @property
    def part(self) -> WorkerState:
        """The state from which this process resumes."""
        if self.is_broken:
            if self._received is None:
                raise StateError(
                    "An error has ended the loop while it waited for a batch, and what was read for it would be lost. "
                    "Load a state that was saved before, or loop over data.tracked(loader)"
                )
            return state_in(self._received)
        # A stream that continues has a position even before the first item of an epoch.
        is_uninterrupted = self.spans_epochs and self._base.stages is None and self._run is not None
        if not self._has_items and not is_uninterrupted:
            return self._base
        if self.spans_epochs or not self.is_over:
            self._check_iterations()
        return WorkerState.of(save_state(self._graph))

    def _check_iterations(self) -> None:
        """Check that only this dataset has read the pipeline since its latest epoch began.

        Raises:
            StateError: another loop has read it, too, so its position is not that of this dataset.
        """
        if any(iteration_of(stage) != number for stage, number in self._iterations):
            raise StateError(
                "Something else has read the pipeline of this StatefulShards, or a part of it, in this process, so "
                "the position of this dataset is lost. Build a pipeline of its own for each dataset, and "
                "another one to look at samples"
            )

    @property
    def _graph(self) -> PipelineGraph:
        """The pipeline of the current epoch, or before the first one."""
        graph: PipelineGraph = self.state.graph if self._run is None else self._run.graph
        return graph

    def recorded(self, batch: Any) -> Any:
        """Return a batch; a worker of a tracked loop adds a snapshot after the batch."""
        if not self._records:
            return batch
        writer = self._writer()
        return RecordedBatch(batch, own_worker().worker, self.number, writer.pack([writer.snapshot()]))

    def receive(self) -> None:
        """Record that the loop in this process receives a batch, which an error within the next one does not change."""
        self._received = self._writer().snapshot()
        self.is_over = self.is_drained = False  # the loop is not over, but the pipeline may be

    def interrupt(self) -> None:
        """Record that an error has ended the loop in this process, which has not received what was read since."""
        self.is_broken = self._received is not None
        self.is_over, self.is_drained = self.is_over and not self.is_drained, False

    def _writer(self) -> SnapshotWriter:
        self._snapshots = self._snapshots or SnapshotWriter(self._graph)
        return self._snapshots

    def record_end(self, *batch: Any) -> RecordedBatch:
        """Return the position at which this worker's epoch ended, with its last batch, if any."""
        self._has_recorded_end = True
        recorded: RecordedBatch = self.recorded(batch[0] if batch else None)
        return recorded._replace(is_empty=not batch)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        self.has_begun, self.is_over, self._base, self._has_items = False, True, WorkerState(), False
        self.is_drained = False
        self.is_broken &= self.spans_epochs
        self._snapshots = None
        refusal = None
        if info is not None:
            # Not with the first item: even a loop that stops immediately has started its epoch in all workers.
            self.shared.set(has_workers=True)
            try:
                self._begin()
            except StateError as error:  # torch's loader would lose it, so the first item raises it
                refusal = str(error)
        return self._iterated(refusal)

    def _begin(self) -> None:
        """Begin an epoch.

        Raises:
            StateError: this worker cannot resume from the loaded state; or another epoch than the one in which the
                state was saved has been selected since; or the pipeline is a stream whose position is unknown.
        """
        info = get_worker_info()
        own, workers = (0, 0) if info is None else (info.id, info.num_workers)
        row = self.shared.read(own)
        # The values that a new process starts with are correct even if the loop has stopped meanwhile.
        is_tracked = self.shared.loop.is_tracked if self._has_begun_any else self.is_tracked
        self._records = info is not None and bool(is_tracked)
        self.check_workers(row, workers, is_tracked=self._records)
        before = replace(row.epoch, wanted=self.shared.chosen(row.begun), received=self.received_before(row))
        resumed_from = None
        if row.loaded:
            if row.loaded != self._loads or not self.state.loaded:
                raise StateError(
                    "The workers were started before the state was loaded, and persistent_workers keeps them running. "
                    "Load the state before the first epoch, or create a new loader"
                )
            resumed_from = self.state.resume(workers)
            before = replace(before, received=resumed_from.epoch.received)
            if own == 0:
                resumed_from.log_replay(self._replay_reason)
        ongoing = resumed_from if resumed_from is not None and not resumed_from.is_over else None
        epoch = before.follow(self.seed if before.next is None else before.next)
        if ongoing is not None:
            epoch = ongoing.epoch
            try:
                epoch.check_selected(before.wanted)
            except StateError:
                if ongoing.is_of_worker:
                    # A StatefulDataLoader begins the state's epoch even if its loop has ended, and then the next one.
                    self.state.loaded = []
                    self.shared.write(row._replace(loaded=0), own)
                raise
            if epoch.wanted is not None:
                self.shared.choose(epoch.wanted, row.begun + 1)
        self.number = own
        if resumed_from is not None and resumed_from.parts and (ongoing is not None or self.spans_epochs):
            self.number, self._base = resumed_from.part_of(own)
        elif resumed_from is None and info is not None and self.before is not None and not self._has_begun_any:
            self._base = self.before.parts[own].renewed()
        elif resumed_from is None and self.is_broken and self._received is not None:
            self._base = self.part.renewed()
        self.received, self.known = epoch.received, row.begun + 1
        self.epoch = replace(epoch, next=seed_after(epoch.seed))
        self.state.loaded, self._has_begun_any = [], info is not None
        row = WorkerRow(self.epoch.without_record(), row.begun + 1, workers)
        if info is None:
            self.shared.set(has_workers=False)
        self.shared.write(row, None if info is None else own)
        self.has_begun, self.is_over = True, False
        self._has_recorded_end = self.is_broken = False
        self._received = None

    def _iterated(self, refusal: str | None) -> Iterator[Any]:
        if refusal is not None:
            raise StateError(refusal)
        if not self.has_begun:
            self._begin()
        self.part_of_rank()
        pipe = split_by_worker(self.state.graph, self.state.rank.on_worker(self.number, own_worker().workers))
        is_worker = get_worker_info() is not None  # otherwise, the global generators belong to training
        seeds = self._seeds(self.epoch.seed, self.number if is_worker else None)
        state = None if self._base.stages is None else self._base
        if self._run is None:  # the pipeline may have been read before
            self._restart_streams()
        elif state is None and self.spans_epochs:
            self._check_iterations()
        start = EpochStart(seeds, state, self._replay_reason, owns_generators=is_worker, epoch=self.epoch)
        self._run = run = EpochRun(pipe, start)
        self._received, self.counts_batches = run.base if self.counts_batches else None, False
        try:
            for item in run.items:
                if not self._has_items:
                    self._has_items = True
                    self._iterations = [(stage, iteration_of(stage)) for stage in run.graph.stateful_stages()]
                yield item
        except (Exception, KeyboardInterrupt):
            self.is_broken = not is_worker and (self._has_items or self.spans_epochs) and self._run is run
            raise
        self.is_over = self.is_drained = True
        while self.spans_epochs and self._records and not self._has_recorded_end:  # until torch has batched END
            yield END

    def _seeds(self, seed: int, worker: int | None) -> Any:
        """Return the seed generator of a worker, or of this process, in the epoch with a seed."""
        seeds = SeedGenerator(seed)
        if self.state.rank.ranks > 1:
            seeds.spawn(self.state.rank.rank, inplace=True)
        return seeds if worker is None else seeds.spawn(worker)

    def _restart_streams(self) -> None:
        for stage in self.state.graph.stages:
            if declared(stage).spans_epochs:
                stage.load_state_dict({"stream": None})

    def beginning(self, epoch: Epoch, worker: int) -> WorkerState:
        """Return where a worker has begun its stream in an epoch; called in the main process, which reads nothing."""
        seeds = self._seeds(epoch.seed, worker)
        draw_global_seeds(seeds)
        self._restart_streams()
        seed_stages(self.state.graph, seeds, epoch)
        return WorkerState.of(next_epoch_state(save_state(self.state.graph)))

    def part_of_rank(self) -> Any:
        """Return the pipeline after splitting it between the ranks."""
        graph = self.state.graph
        return split_by_rank(graph, self.state.rank) if self._is_split else graph.pipe

    def received_before(self, row: WorkerRow) -> ReceivedEpochs:
        """Return the epochs that the loop has received before it begins another one.

        Args:
            row: the facts of the previous epoch.
        """
        if self.known != row.begun:  # other processes have read epochs, which were not reported to this one
            return self.received.begin(row.epoch.number).leave(UNKNOWN)
        return self.received.leave(self.shared.left(row.begun)) if row.begun else self.received

    def check_workers(self, row: WorkerRow, workers: int, *, is_tracked: bool) -> None:
        """Check that each worker knows where the previous epoch ended.

        Args:
            row: the facts of the previous epoch.
            workers: the current number of workers.
            is_tracked: whether the loop is tracked.

        Raises:
            StateError: some worker does not know it.
        """
        if self.spans_epochs and workers and not is_tracked:
            raise StateError(
                "with_epoch continues its stream from one epoch to the next, but the worker processes of this loader "
                "may end with each epoch. Loop over data.tracked(loader), and save data.state_dict(), even with a "
                "StatefulDataLoader; or use DataLoader2 with ShardReadingService, or num_workers=0"
            )
        is_other_stream = self.spans_epochs and row.begun and not row.loaded and row.workers != workers
        if is_other_stream or (workers and self.shared.has_other_workers(workers)):
            raise StateError(
                f"A StatefulShards requires the same number of workers in all epochs, but there are {workers} now. To "
                f"resume with a different number, create a new StatefulShards, and load the state of this one into it"
            )
