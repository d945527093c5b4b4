"""The epochs of a `StatefulShards` in one process, which may be a worker of a loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import distributed
from torch.utils.data import get_worker_info

from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import Checkpoint, WorkerState
from wds_datapipes.loading.checkpoint.resharding import state_of_rank
from wds_datapipes.loading.philox import SeedGenerator
from wds_datapipes.loading.rank_and_worker import (
    RankIdentity,
    WorkerIdentity,
    own_worker,
    split_by_rank,
    split_by_worker,
)
from wds_datapipes.loading.seeding import EpochSeeds, guard_lists, reset_pipeline, seed_of, seed_stages
from wds_datapipes.loading.stateful_dataset.shared_state import SharedEpochs, WorkerRow
from wds_datapipes.loading.stateful_dataset.tracking import END, RecordedBatch
from wds_datapipes.pipes.state.pipeline_state import load_state, record_state, save_state, spans_epochs
from wds_datapipes.pipes.state.recording import Recorder, pack_records
from wds_datapipes.pipes.state.shard_order import remove_listings

__all__ = ["Epochs"]


class Epochs:
    """Reads a pipeline in this process, as often as it is iterated, and knows how far it is.

    Args:
        pipe: the pipeline, before it is split.
        seed: what the orders follow from.
        board: what all processes know.

    Attributes:
        rank: of this process, among how many ``ranks``, if the run is ``distributed``.
        loaded: the states that were loaded, until an epoch has begun from them.
        number: of this worker, in the round in which the epoch goes.
        is_over: whether all of the epoch was yielded; so it is before the first one.
        is_drained: whether the pipeline has ended in this process, and the loader may hold its last items.
        lasts: whether an epoch goes on where the one before has ended.
        before: where that is, for the processes that begin the next one.
        is_tracked: whether those processes are of a loop that is tracked.
    """

    def __init__(self, pipe: Any, seed: int, board: SharedEpochs) -> None:
        self.distributed = distributed.is_available() and distributed.is_initialized()
        self.rank, self.ranks = 0, 1
        if self.distributed:
            self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        self.loaded: list[Checkpoint] = []
        self.number = 0
        self.is_over = True
        self.is_drained = False
        self.lasts = spans_epochs(pipe)
        self.before: Checkpoint | None = None
        self.is_tracked = False
        self._pipe = pipe
        self._seed = seed  # of the first epoch
        self._board = board
        self._loads = 0
        # Of the present epoch.
        self._seeds = EpochSeeds()
        self._is_begun = False
        self._base = WorkerState(None)
        self._has_items = False
        self._tells = False
        self._has_told_end = False
        self._has_begun = False  # any epoch, as a worker
        self._recorder = Recorder()

    @property
    def part(self) -> WorkerState:
        """Where this process goes on."""
        # A stream that goes on as it is knows where it is, also before the first item of an epoch.
        goes_on = self.lasts and self._base.stages is None
        if not self._has_items and not goes_on:
            return self._base
        return WorkerState(save_state(self._pipe))

    def place(self, workers: int) -> tuple[int, int, bool, int]:
        """Return where this process is, among so many workers, as a checkpoint has it."""
        return self.rank, self.ranks, self.distributed, workers

    def load(self, loaded: list[Checkpoint]) -> int:
        """Begin the next epoch from states; return how many times that was asked for."""
        self.loaded = loaded
        self._loads += 1
        return self._loads

    def placed(self, workers: int) -> Checkpoint:
        """Return where the states go on that were loaded, on this rank."""
        if self.loaded[0].worker is not None:
            return self.loaded[0]
        return state_of_rank(self.loaded, self._pipe, self.place(workers))

    def told(self, batch: Any, *, is_first: bool = False) -> Any:
        """Return a batch, in a worker, with the record of the worker behind it if the loop is tracked.

        Args:
            batch: the batch.
            is_first: whether the record has to be the first of a run.
        """
        if not self._tells:
            return batch
        record = record_state(self._pipe, self._recorder, is_first=is_first)
        return RecordedBatch(batch, own_worker().worker_id, self.number, pack_records([record]))

    def told_end(self, *batch: Any) -> RecordedBatch:
        """Return the place where the epoch of this worker has ended, with its last batch if there is one more."""
        self._has_told_end = True
        told: RecordedBatch = self.told(batch[0] if batch else None, is_first=True)
        return told._replace(is_empty=not batch)

    def __iter__(self) -> Iterator[Any]:
        self._is_begun, self.is_over, self._base, self._has_items = False, True, WorkerState(None), False
        self.is_drained = False
        self._recorder = Recorder()
        refusal = None
        if get_worker_info() is not None:
            # Here, and not with the first item: a loop that is broken off at once has begun its epoch in all workers.
            self._board.has_workers = True
            try:
                self._begin()
            except StateError as error:  # torch's loader would lose it here: it comes with the first item
                refusal = str(error)
        return self._iterated(refusal)

    def _begin(self) -> None:
        """Begin an epoch.

        Raises:
            StateError: this worker cannot go on from the state that was loaded; or it was saved in the middle of
                another epoch than that which was chosen since; or the pipeline is a stream, whose place is not known.
        """
        info = get_worker_info()
        own, workers = (0, 0) if info is None else (info.id, info.num_workers)
        row = self._board.read(own)
        # What a new process was given is right even if the loop has been broken off meanwhile.
        self._tells = info is not None and (self._board.is_tracked if self._has_begun else self.is_tracked)
        if self.lasts:
            self.check_stream(row, workers, is_tracked=self._tells)
        if info is not None and self._board.has_other_workers(workers):
            raise StateError(
                f"A StatefulShards has the same number of workers in all epochs, and there are {workers} now. Make "
                f"another one for another number, and load the state of this one in it to go on"
            )
        chosen = self._board.chosen(row.begun)
        going_on = None
        if row.loaded:
            if row.loaded != self._loads or not self.loaded:
                raise StateError(
                    "The workers were started before the state was loaded, and persistent_workers keeps them. Load it "
                    "before the first epoch, or make another loader"
                )
            going_on = self.placed(workers)
        seeds, generator = EpochSeeds(), SeedGenerator(row.next if row.epoch else self._seed)
        self.number = own
        if going_on is None or going_on.is_over:
            if row.epoch:
                seeds.follow(epoch=row.epoch - 1, first=row.first, next=row.next)
            if chosen is not None:
                seeds.set_epoch(chosen)
            seeds.begin(generator, (lambda seed: seed) if self.distributed else None)
            if self.lasts and going_on is not None and going_on.parts:
                self._base = going_on.parts[own]
            elif self.lasts and info is not None and self.before is not None and not self._has_begun:
                self._base = self.before.parts[own].renewed()
        elif chosen not in (None, going_on.epoch):
            if going_on.worker is not None:
                # A StatefulDataLoader begins the epoch of a state also where the loop has ended, and then the next one.
                self.loaded = []
                self._board.write(row._replace(loaded=0), own)
            raise StateError(
                f"set_epoch({chosen}) was called, and the state was saved in the middle of epoch {going_on.epoch}. To "
                f"go on there, call set_epoch({going_on.epoch}), or do not call it before this epoch"
            )
        else:
            if going_on.wanted is not None:
                self._board.choose(going_on.wanted, row.begun + 1)
            seeds.resume(generator, seed=going_on.seed, epoch=going_on.epoch, first=going_on.first, engines=None)
            if going_on.worker is not None:
                self.number, self._base = going_on.worker, going_on.parts[0]
            else:
                # The loader begins with its worker 0, and the epoch goes on with the worker whose turn it is.
                self.number = (own + going_on.turn) % len(going_on.parts)
                self._base = going_on.parts[self.number]
        self._seeds, self.loaded, self._has_begun = seeds, [], info is not None
        seeds.end(generator)
        row = WorkerRow(seeds.epoch + 1, seeds.seed, seeds.first, seeds.next or 0, row.begun + 1, workers)
        if info is None:
            self._board.has_workers = False
        self._board.write(row, None if info is None else own)
        self._is_begun, self.is_over = True, False
        self._has_told_end = False

    def _iterated(self, refusal: str | None) -> Iterator[Any]:
        if refusal is not None:
            raise StateError(refusal)
        if not self._is_begun:
            self._begin()
        worker, place = WorkerIdentity(own_worker().num_workers, self.number), RankIdentity(self.ranks, self.rank)
        pipe = split_by_worker(self.part_of_rank(), worker, place)
        self._seed_stages(pipe, self._seeds.seed, self._base.mark)
        self._base.load(pipe)
        for item in pipe:
            self._has_items = True
            yield item
        self.is_over = self.is_drained = True
        while self.lasts and self._tells and not self._has_told_end:  # until torch has made a batch of it
            yield END

    def part_of_rank(self) -> Any:
        """Return the pipeline, split between the ranks."""
        if not self.distributed:
            return self._pipe
        return split_by_rank(self._pipe, RankIdentity(self.ranks, self.rank))

    def _seed_stages(self, pipe: Any, seed: int, mark: int | None = None) -> None:
        """Have the pipeline begin an epoch of a seed, or resume it at a mark, when it is iterated next."""
        generator, info = SeedGenerator(seed), own_worker()
        if self.distributed:
            generator.spawn(self.rank, inplace=True)
        if get_worker_info() is None:  # the generators of this process are those of the training
            remove_listings(pipe)
            seed_stages(pipe, generator)
            guard_lists(pipe, seed_of(generator))
        else:
            generator = generator.spawn(self.number)
            reset_pipeline(pipe, info, generator, iter_reset_fn=None, worker_reset_fn=None, mark=mark)
        load_state(pipe, None)

    def check_stream(self, row: WorkerRow, workers: int, *, is_tracked: bool) -> None:
        """Make sure that it is known where an epoch begins that goes on where the last one has ended.

        Args:
            row: what is known of the last one.
            workers: how many there are now.
            is_tracked: whether the loop is.

        Raises:
            StateError: it cannot.
        """
        if workers and not is_tracked:
            raise StateError(
                "with_epoch goes on from one epoch to the next, and the worker processes of this loader may end with "
                "each. Loop over data.tracked(loader), and save data.state_dict(), also with a StatefulDataLoader; or "
                "use DataLoader2 with ShardReadingService, or num_workers=0"
            )
        if row.begun and not row.loaded and row.workers != workers:
            raise StateError(
                f"with_epoch goes on where each worker was in its own stream, and there are {workers} workers now, "
                f"where there were {row.workers}. Go on with as many as before"
            )
