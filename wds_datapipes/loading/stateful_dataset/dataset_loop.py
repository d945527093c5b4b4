"""The loop over a loader of a `StatefulShards`: what it loads, the batches that it receives, and what it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from wds_datapipes.epoch import NO_EPOCH, Epoch
from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import Checkpoint, WorkerState, state_of, state_of_stream
from wds_datapipes.loading.checkpoint.received import leave
from wds_datapipes.loading.stateful_dataset.epochs import Epochs
from wds_datapipes.loading.stateful_dataset.tracking import RecordedBatch, TrackedEpoch, WorkerRow, begin_recording
from wds_datapipes.pipes.instance import own_worker
from wds_datapipes.received_epochs import ReceivedEpochs
from wds_datapipes.types import Instance


class DatasetLoop(Epochs):
    """The epochs of a `StatefulShards`, and the position of the loop that receives them.

    The arguments are those of `Epochs`.
    """

    _tracked: TrackedEpoch | None = None

    def load(self, state: Any, *, amend: bool) -> None:
        """Load a state, from which the next iteration resumes.

        Args:
            state: the state of any of the loaders.
            amend: whether the pipeline may change the run.

        Raises:
            StateError: the argument is not a state, or belongs to another pipeline, seed or rank.
        """
        worker = None if get_worker_info() is None else own_worker(self.state.rank)
        self.state.load_and_check(state, self.seed, worker, amend=amend)
        self._resume()

    def end(self) -> None:
        """End the current epoch early, after the loop has received part of it."""
        self.state.loaded = [replace(each.ended(), epoch=leave(each, self.state.graph)) for each in self.checkpoints()]
        self._resume()

    def _resume(self) -> None:
        """Resume from the loaded checkpoints at the next iteration."""
        info, last = get_worker_info(), self.state.loaded[0]
        self._tracked = None
        self._loads += 1
        epoch = NO_EPOCH if last.epoch.next is None else last.epoch
        wanted = last.epoch.wanted if last.is_over else None
        self.shared.resume(epoch, self._loads, wanted, None if info is None else info.id)

    def state_dict(self) -> dict[str, str]:
        """Return the position of the loop, or of the worker that calls this.

        Raises:
            StateError: worker processes read the data, but the loop is not tracked.
        """
        worker = get_worker_info()
        if self.spans_epochs and worker is not None and not self.shared.read(worker.id).loaded:
            return state_of_stream()  # StatefulDataLoader calls this with each batch, and cannot know the epoch's end
        return state_of(self.checkpoints())

    def checkpoints(self) -> list[Checkpoint]:
        """Return the position on this rank, or the loaded checkpoints of all ranks if no epoch has started since.

        Raises:
            StateError: worker processes read the data, but the loop is not tracked.
        """
        info, row = get_worker_info(), self.shared.read(own_worker().worker)
        if row.loaded:
            return self.state.loaded
        if info is not None:
            instance = self.state.rank.on_worker(self.number, info.num_workers)
            return [self._saved(instance, row, [self.part], is_of_worker=True)]
        tracked = self._tracked
        if tracked is not None and tracked.row == self.shared.read(tracked.process):
            return [self._saved_by(tracked, tracked.row)]
        if self.shared.loop.has_workers:
            raise StateError(
                "The positions of the worker processes are unknown. Loop over data.tracked(loader), call "
                "StatefulDataLoader.state_dict(), or use DataLoader2 with ShardReadingService"
            )
        rank = self.state.rank.on_worker(0, 0)
        return [self._saved(rank, row, [self.part], is_over=self.is_over, is_drained=self.is_drained)]

    def _saved_by(self, tracked: TrackedEpoch, row: WorkerRow) -> Checkpoint:
        parts = self._parts(tracked)
        rank = self.state.rank.on_worker(0, len(parts))
        return self._saved(rank, row, parts, tracked.received, is_over=tracked.is_over, next_worker=tracked.turn)

    def _parts(self, tracked: TrackedEpoch) -> list[WorkerState]:
        """Return the position of each worker; that of one whose stream has just begun has the seeds of its epoch."""
        parts, row = tracked.states(), tracked.row
        if not self.spans_epochs or row is None:
            return parts
        return [self.beginning(row.epoch, n) if part.stages is None else part for n, part in enumerate(parts)]

    def _saved(
        self,
        instance: Instance,
        row: WorkerRow,
        parts: Sequence[WorkerState],
        received: ReceivedEpochs | None = None,
        **facts: Any,
    ) -> Checkpoint:
        """Return the position of the loop in the epoch of a row; before the first epoch, it is the end of epoch -1."""
        epoch = Epoch.before(self.seed) if row.epoch == NO_EPOCH else row.epoch
        received = self.received if received is None else received
        epoch = replace(epoch, wanted=self.shared.chosen(row.begun), received=received)
        return self.state.checkpoint(instance, epoch, parts, **facts)

    def leave(self, find: Callable[[], Sequence[Checkpoint]]) -> None:
        """Record how the loop has left its epoch, before the next one begins.

        Args:
            find: returns the position of the loop.
        """
        row = self.shared.read(0)
        if not self.state.counts_steps or not row.begun or row.loaded:
            return
        with suppress(StateError):
            saved = find()[0]
            left = self.state.left(saved)
            self.received, self.known = saved.epoch.received.leave(left), row.begun
            self.shared.leave(left, row.begun)

    def track(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield one epoch from a loader, and record the batches that the loop receives.

        Raises:
            StateError: untracked workers have begun it, or their number has changed.
        """
        if not loader.num_workers:
            self.counts_batches = True
            try:
                for batch in loader:
                    self.receive()
                    yield batch
            except (Exception, KeyboardInterrupt):
                self.interrupt()
                raise
            self.is_over, self.is_drained = True, False
            return
        self.is_tracked = True
        self.shared.set(is_tracked=True)
        iterator, tracked, begun = None, None, self.shared.read(0).begun
        try:
            tracked = self._begin_tracking(loader.num_workers)
            iterator = begin_recording(loader)
            self._tracked = tracked
            for recorded in iterator:
                if not isinstance(recorded, RecordedBatch):
                    raise StateError(
                        "The workers of this loader do not report their positions, because an untracked loop started "
                        "them. With persistent_workers, use tracked() from the first epoch on"
                    )
                tracked.note(recorded, self.shared.read(recorded.process))
                if not recorded.is_empty:
                    yield recorded.batch
            tracked.end(self.shared.read(0))
        finally:
            if tracked is not None and tracked.row is None and self.shared.read(0).begun > begun:
                tracked.row = self.shared.read(0)  # an error, or Ctrl-C, came before the first batch
            if self.spans_epochs and not (tracked is not None and tracked.is_over and tracked.is_in_order):
                # Start new workers: persistent ones are past the position of the loop, or hold other workers' streams.
                loader._iterator = None
            # Workers that are still starting belong to this loop and must end before the loop is recorded as over.
            iterator = None
            self.is_tracked = False
            self.shared.set(is_tracked=False)

    def _begin_tracking(self, workers: int) -> TrackedEpoch:
        """Return an object that tracks the next epoch."""
        last, row = self._tracked, self.shared.read(0)
        turn, parts = 0, [WorkerState()] * workers
        self.leave(self.checkpoints)
        received, is_resumed = self.received_before(row), False
        self.before = None
        if row.loaded:
            resumed_from = self.state.resume(workers)
            self.state.loaded = [resumed_from]  # so that workers need not reshard it again
            received, is_resumed = resumed_from.epoch.received, not resumed_from.is_over
            turn, parts = 0 if resumed_from.is_over else resumed_from.next_worker, [*resumed_from.parts] or parts
        elif self.spans_epochs:
            self.check_workers(row, workers, is_tracked=True)
        if not row.loaded and self.spans_epochs and last is not None:
            found = self._parts(last)
            self.before = self._saved(self.state.rank.on_worker(0, workers), last.row or row, found)
            parts = [part.renewed() for part in found]
        return TrackedEpoch(parts, turn, received, is_resumed=is_resumed)
