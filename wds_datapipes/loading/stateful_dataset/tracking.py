"""What torch's ``DataLoader`` delivers from its workers, and where each of them was when it made it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, cast

from torch.utils.data import DataLoader, get_worker_info

from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.loading.checkpoint.item_positions import ItemPositions
from wds_datapipes.loading.stateful_dataset.shared_state import WorkerRow

__all__ = ["END", "BatchRecorder", "RecordedBatch", "TrackedEpoch", "begin_recording"]

#: What a worker yields behind its last item where an epoch goes on in the next one, so that it can tell where it ends.
END: Final = object()


class RecordedBatch(NamedTuple):
    """A batch, and where the worker was that has made it. torch pins the batch in it, and leaves the rest.

    Attributes:
        batch: as the loader would give it to the loop.
        process: the number of the worker's process.
        worker: its number in the round in which the epoch goes.
        record: where its pipeline is behind this batch, for `ItemPositions.add`.
        is_empty: whether there is no batch, but only the place where the worker's epoch has ended.
    """

    batch: Any
    process: int
    worker: int
    record: bytes
    is_empty: bool = False


class BatchRecorder:
    """Takes the place of a loader's ``collate_fn``, and has the worker tell where it is.

    Args:
        loader: whose function it is.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._collate: Callable[[Any], Any] = loader.collate_fn
        self._is_batched = loader.batch_size is not None
        self._least = loader.batch_size if loader.batch_size and loader.drop_last else 1

    def __call__(self, items: Any) -> Any:
        """Return what the loader's function makes of the items, with the place of the worker where it is tracked."""
        info = get_worker_info()
        if info is None:
            return self._collate(items)
        data = cast("Any", info.dataset)
        if not self._is_batched:
            return data.told(self._collate(items)) if items is not END else data.told_end()
        found = [item for item in items if item is not END]
        if len(found) == len(items):
            return data.told(self._collate(items))
        # torch asks for as many as fit in a batch, and has dropped none of them.
        return data.told_end(*([self._collate(found)] if len(found) >= self._least else ()))


def begin_recording(loader: DataLoader[Any]) -> Iterator[Any]:
    """Begin an epoch of a loader in which each batch comes with the place of its worker."""
    own = loader.collate_fn, loader._IterableDataset_len_called
    loader.collate_fn = BatchRecorder(loader)
    loader._IterableDataset_len_called = None  # torch would count what tells the place alone, and warn of too many
    try:
        return iter(loader)
    finally:
        loader.collate_fn, loader._IterableDataset_len_called = own


class TrackedEpoch:
    """An epoch in the main process: what the loop has got from each worker.

    Args:
        bases: where each worker has begun.
        turn: which worker's batch comes first.
    """

    def __init__(self, bases: Sequence[WorkerState], turn: int) -> None:
        #: Whether each process has the worker of its own number.
        self.is_in_order = turn == 0
        self.turn = turn
        self.is_over = False
        #: What the process of a worker has on the board that has begun this epoch.
        self.row: WorkerRow | None = None
        self.process = 0
        self._trails = [ItemPositions() for _ in bases]
        for trail, base in zip(self._trails, bases, strict=True):
            trail.begin(base)

    def note(self, told: RecordedBatch, row: WorkerRow) -> None:
        """Take note that the loop gets a batch, or that there is none."""
        if self.row is None:
            self.row, self.process = row, told.process
        trail = self._trails[told.worker]
        trail.add(told.record, 0 if told.is_empty else 1)
        if not told.is_empty:
            self.turn = told.worker + 1
            trail.deliver()

    def end(self, row: WorkerRow) -> None:
        """Take note that the epoch is over."""
        self.is_over = True
        if self.row is None:  # it had no batch
            self.row = row

    def states(self) -> list[WorkerState]:
        """Return where each worker has to resume behind what the loop has."""
        return [trail.state() for trail in self._trails]
