"""Selection: which samples of a dataset are read, by their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from wds_datapipes.fingerprint import fingerprint
from wds_datapipes.index.order.sample_order import Numbers
from wds_datapipes.index.shard_index import ShardIndex

Select: TypeAlias = slice | npt.ArrayLike | Callable[[ShardIndex], npt.ArrayLike]
"""A slice, the numbers of samples, a mask, or a function that returns numbers or a mask for the index of a shard."""


class Selection:
    """The selected samples of a dataset, in the order of the shards.

    A slice takes no memory per sample; numbers take 8 bytes for each.

    Args:
        select: which samples, by their numbers in the order of the shards.
        sizes: the number of samples in each shard.
        read_index: returns the index of a shard, for a function.
        among: a mask of the samples that may be selected; by default all.

    Raises:
        IndexError: there is no sample with one of the numbers.
        ValueError: a mask has another length, or a slice runs backwards.
        TypeError: the numbers are not integers.

    Examples:
        >>> selection = Selection(slice(None, None, 2), np.array([3, 2]), read_index=None)
        >>> selection.sizes.tolist(), selection.find(np.array([0, 0, 1]), np.array([0, 1, 0])).tolist()
        ([2, 1], [0, 2, 1])
    """

    def __init__(
        self,
        select: Select,
        sizes: Numbers,
        *,
        read_index: Callable[[int], ShardIndex] | None,
        among: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        ends = np.cumsum(sizes)
        self._starts = ends - sizes
        count = int(ends[-1]) if len(ends) else 0
        self._numbers: range | Numbers
        if isinstance(select, slice):
            self._numbers = range(*select.indices(count))
            if self._numbers.step < 0:
                raise ValueError(
                    f"select must run forwards, and {select} runs backwards. The order is chosen by order="
                )
        elif callable(select) and read_index is not None:
            parts = [
                _numbers_of(select(read_index(shard)), size, f" in shard {shard}")
                for shard, size in enumerate(sizes.tolist())
            ]
            moved = [part + start for part, start in zip(parts, self._starts.tolist(), strict=True)]
            self._numbers = np.concatenate([np.empty(0, np.int64), *moved])
        else:
            self._numbers = _numbers_of(select, count)
        if among is not None:
            self._numbers = self.numbers[among[self.numbers]]
        lasts = self._count_below(ends)
        self._firsts = np.concatenate(([0], lasts[:-1])) if len(lasts) else lasts
        #: How many samples of each shard are selected.
        self.sizes: Numbers = lasts - self._firsts

    @property
    def numbers(self) -> Numbers:
        """The numbers of the selected samples in the order of the shards."""
        return np.asarray(self._numbers, np.int64)

    def find(self, shards: Numbers, places: Numbers) -> Numbers:
        """Return the numbers of samples in their shards.

        Args:
            shards: the shard of each sample.
            places: its place among the selected samples of the shard.
        """
        chosen = self._firsts[shards] + places
        if isinstance(self._numbers, range):
            return self._numbers.start + chosen * self._numbers.step - self._starts[shards]
        return self._numbers[chosen] - self._starts[shards]

    def fingerprint(self) -> str:
        """Return a digest of the selected numbers."""
        if isinstance(self._numbers, range):
            return fingerprint([self._numbers.start, self._numbers.stop, self._numbers.step])
        return fingerprint(self._numbers.tobytes())

    def _count_below(self, ends: Numbers) -> Numbers:
        """Return how many of the selected numbers are below each end."""
        if isinstance(self._numbers, range):
            start, step = self._numbers.start, self._numbers.step
            return np.clip(-((start - ends) // step), 0, len(self._numbers))
        return np.searchsorted(self._numbers, ends, "left")


def _numbers_of(select: Any, count: int, where: str = "") -> Numbers:
    """Return numbers of samples in ascending order, from numbers or a mask; messages say where they are."""
    found = np.asarray(select)
    if found.ndim != 1:
        raise ValueError(f"select must have one dimension, not the shape {found.shape}{where}")
    if found.dtype == bool:
        if len(found) != count:
            raise ValueError(f"select is a mask of {len(found)} samples, and there are {count}{where}")
        return np.flatnonzero(found)
    if not len(found):
        return np.empty(0, np.int64)
    if not np.issubdtype(found.dtype, np.integer):
        raise TypeError(f"select must be numbers of samples or a mask, not an array of {found.dtype}{where}")
    numbers = np.sort(found)  # not converted before the check, since large unsigned numbers would become negative
    if numbers[0] < 0 or numbers[-1] >= count:
        wrong = numbers[0] if numbers[0] < 0 else numbers[-1]
        raise IndexError(f"There is no sample {wrong} to select: there are {count} samples{where}, numbered from 0")
    return numbers.astype(np.int64)
