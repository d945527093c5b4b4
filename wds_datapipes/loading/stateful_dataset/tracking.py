"""Track the batches of torch's ``DataLoader``: each batch carries the position of its worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from wds_datapipes.epoch import NO_EPOCH, Epoch
from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.loading.snapshots import LoopPosition
from wds_datapipes.received_epochs import UNKNOWN, Left, ReceivedEpochs

#: A worker yields this after its last item if the next epoch continues the stream, to carry its final position.
END: Final = object()


class RecordedBatch(NamedTuple):
    """A batch with the position of the worker that produced it. torch pins the batch and leaves the rest unchanged.

    Attributes:
        batch: the batch, as the loader would return it to the loop.
        process: the number of the worker's process.
        worker: its number in the round-robin order of the epoch.
        snapshot: a snapshot of its pipeline after this batch, for `LoopPosition.add`.
        is_empty: whether it holds only the position at which the worker's epoch ended, without a batch.
    """

    batch: Any
    process: int
    worker: int
    snapshot: bytes
    is_empty: bool = False


class BatchRecorder:
    """Replaces a loader's ``collate_fn`` to add the position of the worker.

    Args:
        loader: the loader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._collate: Callable[[Any], Any] = loader.collate_fn
        self._is_batched = loader.batch_size is not None
        self._least = loader.batch_size if loader.batch_size and loader.drop_last else 1

    def __call__(self, items: Any) -> Any:
        """Return the result of the loader's function, with the position of the worker if it is tracked."""
        info = get_worker_info()
        if info is None:
            return self._collate(items)
        epochs = cast("Any", info.dataset).epochs
        if not self._is_batched:
            return epochs.recorded(self._collate(items)) if items is not END else epochs.record_end()
        found = [item for item in items if item is not END]
        if len(found) == len(items):
            return epochs.recorded(self._collate(items))
        # torch has requested a full batch, and does not drop an incomplete one itself.
        return epochs.record_end(*([self._collate(found)] if len(found) >= self._least else ()))


def begin_recording(loader: DataLoader[Any]) -> Iterator[Any]:
    """Begin an epoch of a loader whose batches carry the positions of their workers."""
    own = loader.collate_fn, loader._IterableDataset_len_called
    loader.collate_fn = BatchRecorder(loader)
    loader._IterableDataset_len_called = None  # torch would count records without a batch, too, and warn
    try:
        return iter(loader)
    finally:
        loader.collate_fn, loader._IterableDataset_len_called = own


class TrackedEpoch:
    """An epoch in the main process: tracks the batches received from each worker.

    Args:
        bases: the position at which each worker began.
        turn: the worker that yields the first batch.
        received: the epochs that the loop has received before.
        is_resumed: whether this is the last one of them, which resumes.
    """

    def __init__(self, bases: Sequence[WorkerState], turn: int, received: ReceivedEpochs, *, is_resumed: bool) -> None:
        #: Whether each process has the same number as its worker.
        self.is_in_order = turn == 0
        self.turn = turn
        self.is_over = False
        #: The shared row of a worker that has begun this epoch.
        self.row: WorkerRow | None = None
        self.process = 0
        self._positions = [LoopPosition(base) for base in bases]
        self._before, self._is_resumed = received, is_resumed

    def note(self, recorded: RecordedBatch, row: WorkerRow) -> None:
        """Record a batch that the loop receives, or the end of a worker's epoch."""
        if self.row is None:
            self.row, self.process = row, recorded.process
        positions = self._positions[recorded.worker]
        positions.add(recorded.snapshot, 0 if recorded.is_empty else 1)
        if not recorded.is_empty:
            self.turn = recorded.worker + 1
            positions.delivered += 1

    def end(self, row: WorkerRow) -> None:
        """Record that the epoch is over."""
        self.is_over = True
        if self.row is None:  # there was no batch
            self.row = row

    @property
    def received(self) -> ReceivedEpochs:
        """The epochs that the loop has received, with this one once it has begun."""
        return self._before if self._is_resumed or self.row is None else self._before.begin(self.row.epoch.number)

    def states(self) -> list[WorkerState]:
        """Return the position of each worker after the batches received by the loop."""
        return [positions.state() for positions in self._positions]


#: The maximum number of workers of a loader. torch initializes larger shared memory in several threads, which hang in
#: processes that are forked afterwards.
MAX_WORKERS = 512


class WorkerRow(NamedTuple):
    """The facts that a worker needs to begin an epoch. All numbers are initially 0.

    Attributes:
        epoch: the latest epoch that it has begun, without its record.
        begun: the number of epochs it has begun.
        workers: the number of workers in the latest epoch.
        loaded: the number of the loaded state from which it resumes, from 1; 0 if there is none.
    """

    epoch: Epoch = NO_EPOCH
    begun: int = 0
    workers: int = 0
    loaded: int = 0


#: The numbers of a row besides its epoch, and all numbers of a row, in which that of an epoch is one higher.
WORKER_NUMBERS = len(WorkerRow._fields) - 1
COLUMNS = WORKER_NUMBERS + 4


class LoopRow(NamedTuple):
    """The facts about a loop, for all of its workers. All are non-negative numbers, initially 0.

    Attributes:
        has_workers: whether any worker has begun an epoch since a state was loaded.
        is_tracked: whether workers add their position to each batch.
        wanted: the number selected for an epoch, plus 1; 0 if none is selected.
        begun: the number of epochs that began before that one.
        left: the number of epochs that began before the loop left the last one of them.
        steps: the number of steps that it received of that epoch, plus 2; 0 if it received all.
        known: the number of those whose samples are known.
    """

    has_workers: int = 0
    is_tracked: int = 0
    wanted: int = 0
    begun: int = 0
    left: int = 0
    steps: int = 0
    known: int = 0


class SharedEpochs:
    """Memory shared with the processes that are started with it, one row per worker.

    Workers may be restarted for each epoch, and then learn about the previous one only from this memory.
    """

    def __init__(self) -> None:
        # A row for each worker, and one for the loop.
        self._shared = torch.zeros((MAX_WORKERS + 1, COLUMNS), dtype=torch.int64)
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._share()  # a copy has memory of its own, unless a process is started with it

    def _share(self) -> None:
        share: Callable[[], torch.Tensor] = self._shared.share_memory_
        share()  # does nothing if it is shared

    def read(self, worker: int) -> WorkerRow:
        """Return the row of a worker."""
        first, number, seed, following, *others = map(int, self._numbers[worker])
        return WorkerRow(Epoch(first, number - 1, seed, following) if number else NO_EPOCH, *others)

    def write(self, row: WorkerRow, worker: int | None = None) -> None:
        """Set the row of a worker, or of all workers."""
        epoch, *others = row
        numbers = epoch.first, epoch.number + 1, epoch.seed, epoch.next or 0, *others
        self._numbers[slice(-1) if worker is None else worker] = numbers

    def resume(self, epoch: Epoch, loaded: int, wanted: int | None, worker: int | None = None) -> None:
        """Let a worker, or all of them, resume from a loaded state.

        Args:
            epoch: the epoch of the state.
            loaded: the number of the loaded state.
            wanted: the epoch that was selected to follow, if any.
            worker: the worker, if it has loaded the state itself.
        """
        begun = self.begun if worker is None else self.read(worker).begun
        self.write(WorkerRow(epoch, begun, loaded=loaded), worker)
        # A StatefulDataLoader loads its state when iteration begins, after the next epoch was selected.
        if worker is None and self.chosen(begun) is None:
            self.choose(wanted)

    def has_other_workers(self, workers: int) -> bool:
        """Whether the number of workers has changed, in which case not all of them know the next epoch."""
        return any(self.read(number).workers not in (0, workers) for number in range(workers))

    def leave(self, left: Left, begun: int) -> None:
        """Record how the loop has left the last of the epochs that have begun."""
        steps, known = (-2, 0) if left is None else left
        self.set(left=begun, steps=steps + 2, known=known)

    def left(self, begun: int) -> Left:
        """Return how the loop has left the last of the epochs that have begun."""
        loop = self.loop
        if loop.left != begun:
            return UNKNOWN
        return (loop.steps - 2, loop.known) if loop.steps else None

    def choose(self, epoch: int | None, begun: int | None = None) -> None:
        """Select the number of an epoch.

        Args:
            epoch: the number, or ``None`` for no selection.
            begun: the number of epochs that began before it. By default, the maximum over all workers, because some may
                not have begun the latest one yet.
        """
        self.set(wanted=0 if epoch is None else epoch + 1, begun=self.begun if begun is None else begun)

    @property
    def begun(self) -> int:
        """The maximum number of epochs that a worker has begun."""
        return int(self._numbers[:-1, -WORKER_NUMBERS].max())

    def chosen(self, begun: int) -> int | None:
        """Return the epoch selected to follow ``begun`` epochs, or ``None``."""
        loop = self.loop
        return loop.wanted - 1 if loop.wanted and loop.begun == begun else None

    @property
    def loop(self) -> LoopRow:
        """The row of the loop."""
        return LoopRow(*map(int, self._numbers[-1, : len(LoopRow._fields)]))

    def set(self, **values: int) -> None:
        """Set some numbers in the row of the loop; other processes may set others at the same time."""
        for name, value in values.items():
            self._numbers[-1, LoopRow._fields.index(name)] = value

    @property
    def _numbers(self) -> Any:
        return self._shared.numpy().view(np.uint64)  # seeds have 64 bits
