"""Order of an epoch in which each batch has samples of similar length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from wds_datapipes.index.order.epoch_order import SampleOrder
from wds_datapipes.index.order.permutation import Numbers, Permutation
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.seeds import derived_seed

Lengths: TypeAlias = npt.ArrayLike | Callable[[ShardIndex], npt.ArrayLike]
"""The length of each sample, or a function that returns those of a shard from its index."""


class LengthOrder:
    """Sorts the samples of another order by length within windows, and shuffles the batches of each window.

    It moves samples only within their window. The samples after the last whole batch of the epoch stay at its end, so
    their choice does not depend on their length.

    Args:
        order: the other order.
        lengths: the length of each sample, in the order of the shards.
        starts: the number of the first sample of each shard.
        batch_size: the number of samples in a batch.
        window: the number of batches in a window.
        seed: the seed of the epoch; None keeps the batches sorted.

    Examples:
        >>> from wds_datapipes.index.order.epoch_order import EpochOrder
        >>> lengths = np.array([5, 1, 4, 2, 9, 3, 6])
        >>> order = EpochOrder([7], "sequential", seed=0)
        >>> sorted_order = LengthOrder(order, lengths, np.array([0]), batch_size=2, window=3, seed=None)
        >>> lengths[sorted_order.find(np.arange(7))[1]].tolist()
        [1, 2, 3, 4, 5, 9, 6]
    """

    def __init__(
        self, order: SampleOrder, lengths: Numbers, starts: Numbers, *, batch_size: int, window: int, seed: int | None
    ) -> None:
        self._order, self._lengths, self._starts = order, lengths, starts
        self._batch_size, self._window, self._seed = batch_size, window, seed
        self._last = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        """Return the number of samples in the epoch."""
        return len(self._order)

    def find(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shard of the sample at each position of the epoch, and the number of the sample in it."""
        size = self._window * self._batch_size
        windows = positions // size
        moved = np.empty_like(positions)
        for window in np.unique(windows).tolist():
            inside = windows == window
            moved[inside] = self._positions(window)[positions[inside] - window * size]
        return self._order.find(moved)

    def _positions(self, window: int) -> Numbers:
        """Return the positions in the other order, for a window; those of the last one are kept."""
        if self._last[0] != window:
            start = window * self._window * self._batch_size
            positions = np.arange(start, min(start + self._window * self._batch_size, len(self)))
            count = len(positions) // self._batch_size
            whole, rest = np.split(positions, [count * self._batch_size])
            shards, places = self._order.find(whole)
            by_length = whole[np.argsort(self._lengths[self._starts[shards] + places], kind="stable")]
            batches = by_length.reshape(count, self._batch_size)
            if self._seed is not None:
                seed = derived_seed("batches by length", self._seed, window)
                batches = batches[Permutation(count, seed=seed)(np.arange(count))]
            self._last = window, np.concatenate([batches.ravel(), rest])
        return self._last[1]


def check_lengths(lengths: Any, count: int, owner: str) -> Numbers:
    """Return lengths as an array.

    Args:
        lengths: the lengths.
        count: how many there must be.
        owner: what has so many samples, for messages.

    Raises:
        TypeError: they are not integers.
        ValueError: there are more or fewer, or one is negative.
    """
    found = np.asarray(lengths)
    if found.shape != (count,):
        raise ValueError(f"bucket_by has lengths of the shape {found.shape}, and {owner} has {count} samples")
    if not np.issubdtype(found.dtype, np.integer) and count:
        raise TypeError(f"bucket_by must have integers as lengths, not {found.dtype}")
    found = found.astype(np.int64)
    if count and found.min() < 0:
        raise ValueError(f"bucket_by has the length {found.min()} for the sample {found.argmin()} of {owner}")
    return found
