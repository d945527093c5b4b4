"""What the processes of one `StatefulShards` know together: which epoch each worker begins next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["SharedEpochs", "WorkerRow"]

#: How many workers a loader may have. torch shares larger memory with several threads, which hang in a process that was
#: forked after they had run.
MOST_WORKERS = 512


class WorkerRow(NamedTuple):
    """What a worker has to know when it begins an epoch. All are numbers from 0, and 0 at first.

    Attributes:
        epoch: the number of the next epoch, unless another one is chosen.
        seed: of the epoch that was begun last, if one was.
        first: the seed of the first epoch, if it has begun.
        next: the seed of the next epoch, if the first has begun.
        begun: how many epochs it has begun.
        workers: among how many workers it has begun the last.
        loaded: which of the states that were loaded it goes on from, counted from 1; 0 if it goes on from none.
    """

    epoch: int = 0
    seed: int = 0
    first: int = 0
    next: int = 0
    begun: int = 0
    workers: int = 0
    loaded: int = 0


class SharedEpochs:
    """Memory that processes share which are started with it, a row for each worker.

    Workers may be started anew for each epoch, and know of the one before only from here.
    """

    def __init__(self) -> None:
        # A row for each worker, and one for what holds for all.
        tensor = torch.zeros((MOST_WORKERS + 1, len(WorkerRow._fields)), dtype=torch.int64)
        share: Callable[[], torch.Tensor] = tensor.share_memory_
        self._shared = share()

    def read(self, worker: int) -> WorkerRow:
        """Return the row of a worker."""
        return WorkerRow(*map(int, self._numbers[worker]))

    def write(self, row: WorkerRow, worker: int | None = None) -> None:
        """Set the row of a worker, or those of all."""
        self._numbers[slice(-1) if worker is None else worker] = row

    def has_other_workers(self, workers: int) -> bool:
        """Whether there was another number of workers before, so that not all know which epoch is next."""
        return any(self.read(number).workers not in (0, workers) for number in range(workers))

    def choose(self, epoch: int | None, begun: int | None = None) -> None:
        """Choose the number of an epoch.

        Args:
            epoch: the number; None is for none.
            begun: how many epochs are begun before it. By default, as many as any worker has begun: another one may
                still be about to begin the last of them.
        """
        found = self.begun if begun is None else begun
        self._numbers[-1, 2:4] = (0 if epoch is None else epoch + 1), found

    @property
    def begun(self) -> int:
        """How many epochs any worker has begun."""
        return int(self._numbers[:-1, WorkerRow._fields.index("begun")].max())

    def chosen(self, begun: int) -> int | None:
        """Return which epoch was chosen for when so many are begun, or None."""
        wanted, found = map(int, self._numbers[-1, 2:4])
        return wanted - 1 if wanted and found == begun else None

    @property
    def has_workers(self) -> bool:
        """Whether any worker has begun an epoch since a state was loaded."""
        return bool(self._numbers[-1, 0])

    @has_workers.setter
    def has_workers(self, value: bool) -> None:
        self._numbers[-1, 0] = value

    @property
    def is_tracked(self) -> bool:
        """Whether workers tell with each batch where they are."""
        return bool(self._numbers[-1, 1])

    @is_tracked.setter
    def is_tracked(self, value: bool) -> None:
        self._numbers[-1, 1] = value

    @property
    def _numbers(self) -> Any:
        return self._shared.numpy().view(np.uint64)  # seeds have 64 bits
