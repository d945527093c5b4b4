"""Epoch order: the order of the samples of a dataset in an epoch, computed from the sizes of its shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import numpy as np

from wds_datapipes.index.order.permutation import Numbers, Permutation
from wds_datapipes.seeds import derived_seed

Order: TypeAlias = Literal["global", "window", "sequential"]
"""``"global"`` shuffles all samples, ``"window"`` the shards and then those of a few shards at a time."""


class SampleOrder(Protocol):
    """Finds the samples of an epoch by their positions in it."""

    def __len__(self) -> int:
        """Return the number of samples in the epoch."""

    def find(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shard of the sample at each position of the epoch, and the number of the sample in it."""


class EpochOrder:
    """The order of the samples in an epoch: a function of a seed and the sizes of the shards.

    Its memory grows with the number of shards, and not with that of samples.

    Args:
        sizes: the number of samples in each shard.
        order: ``"global"``, ``"window"`` or ``"sequential"``.
        seed: the seed of the epoch.
        window_shards: how many shards ``"window"`` shuffles together.

    Examples:
        >>> order = EpochOrder([2, 3], "sequential", seed=0)
        >>> [each.tolist() for each in order.find(np.arange(5))]
        [[0, 0, 1, 1, 1], [0, 1, 0, 1, 2]]
    """

    def __init__(self, sizes: Sequence[int] | Numbers, order: Order, *, seed: int, window_shards: int = 16) -> None:
        counts = np.asarray(sizes, np.int64)
        self._shards = np.arange(len(counts))  # the shard at each place
        if order == "window":
            self._shards = Permutation(len(counts), seed=derived_seed("shards", seed))(self._shards)
        self._ends = np.cumsum(counts[self._shards])
        self._size = int(self._ends[-1]) if len(counts) else 0
        self._seed, self._order = seed, order
        self._last = -1, Permutation(0, seed=0)
        #: The positions at which windows end; without windows, there is one.
        self._window_ends = (
            np.append(self._ends[window_shards - 1 :: window_shards], self._size)
            if order == "window"
            else np.array([self._size])
        )

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._size

    def find(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shard of the sample at each position of the epoch, and the number of the sample in it.

        Args:
            positions: positions from 0 to ``len(order) - 1``.
        """
        if self._order != "sequential":
            positions = self._shuffle(positions)
        places = np.searchsorted(self._ends, positions, "right")
        starts = np.concatenate(([0], self._ends))[places]
        return self._shards[places], positions - starts

    def _shuffle(self, positions: Numbers) -> Numbers:
        """Return where each position is moved to inside of its window."""
        shuffled = np.empty_like(positions)
        windows = np.searchsorted(self._window_ends, positions, "right")
        for window in np.unique(windows).tolist():
            start = int(self._window_ends[window - 1]) if window else 0
            inside = windows == window
            shuffled[inside] = self._permutation(window)(positions[inside] - start) + start
        return shuffled

    def _permutation(self, window: int) -> Permutation:
        """Return the permutation of a window; that of the last one is kept."""
        if self._last[0] != window:
            start = int(self._window_ends[window - 1]) if window else 0
            size = int(self._window_ends[window]) - start
            self._last = window, Permutation(size, seed=derived_seed("window", self._seed, window))
        return self._last[1]
