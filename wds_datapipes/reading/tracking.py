"""What torch's ``DataLoader`` delivers from its workers, and where each of them was when it made it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from torch.utils.data import get_worker_info

from wds_datapipes.reading.board import Row
from wds_datapipes.reading.resuming import Resumed

__all__ = ["Telling", "Told", "Tracked"]


class Told(NamedTuple):
    """A batch, and where the worker was that has made it. torch pins the batch in it, and leaves the rest.

    Attributes:
        batch: as the loader would give it to the loop.
        process: the number of the worker's process.
        worker: its number in the round in which the epoch goes.
        items: how many items of the pipeline it has made in this epoch.
        stages: the state of its pipeline behind this batch, as JSON; None if it does not tell.
    """

    batch: Any
    process: int
    worker: int
    items: int
    stages: bytes | None


class Telling:
    """Takes the place of a loader's ``collate_fn``, and has the worker tell where it is.

    Args:
        collate: the loader's.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, items: Any) -> Any:
        """Return what the loader's function makes of the items, with the place of the worker where it is tracked."""
        info = get_worker_info()
        batch = self._collate(items)
        return batch if info is None else cast("Any", info.dataset).told(batch)


class Tracked:
    """An epoch in the main process: what the loop has got from each worker.

    Args:
        bases: where each worker has begun.
        turn: which worker's batch comes first.
    """

    def __init__(self, bases: Sequence[Resumed], turn: int) -> None:
        self.turn = turn
        self.is_over = False
        #: What the process of a worker has on the board that has begun this epoch.
        self.row: Row | None = None
        self.process = 0
        self._items = [base.items for base in bases]
        self._states: list[tuple[int, Any]] = [(base.items - base.skip, base.stages) for base in bases]

    def deliver(self, told: Told, row: Row) -> Any:
        """Take note that the loop gets a batch, and return it."""
        if self.row is None:
            self.row, self.process = row, told.process
        self._items[told.worker] = told.items
        self.turn = told.worker + 1
        if told.stages is not None:
            self._states[told.worker] = told.items, told.stages
        return told.batch

    def end(self, row: Row) -> None:
        """Take note that the epoch is over."""
        self.is_over = True
        if self.row is None:  # it had no batch
            self.row = row

    def states(self) -> list[Resumed]:
        """Return where each worker would have to go on behind what the loop has."""
        return [
            Resumed(items, items - since, json.loads(stages) if isinstance(stages, bytes) else stages)
            for items, (since, stages) in zip(self._items, self._states, strict=True)
        ]
