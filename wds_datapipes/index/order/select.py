"""Selection: which samples of a dataset are read."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from wds_datapipes.arguments import check_integer, checks_calls
from wds_datapipes.fingerprint import fingerprint
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.on_error.policy import note

Select: TypeAlias = slice | npt.ArrayLike | Callable[[ShardIndex], npt.ArrayLike]
"""A slice, the numbers of samples, a mask, or a function that returns numbers or a mask for the index of a shard."""


class Selection:
    """The selected samples of a dataset, in the order of the shards.

    A slice takes no memory per sample; numbers take 8 bytes for each.

    Args:
        select: the samples, by their numbers in the order of the shards.
        sizes: the number of samples in each shard.
        read_index: returns the index of a shard, for a function.
        among: a mask of the samples that may be selected; by default all.

    Raises:
        IndexError: there is no sample with one of the numbers.
        ValueError: a mask has a different length, or a slice runs backwards.
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
                raise ValueError(f"select must run forwards, but {select} runs backwards. Choose the order with order=")
        elif callable(select) and read_index is not None:
            parts = [
                numbers_of(values_of("select", select, read_index(shard)), size, f" in shard {shard}")
                for shard, size in enumerate(sizes.tolist())
            ]
            moved = [part + start for part, start in zip(parts, self._starts.tolist(), strict=True)]
            self._numbers = np.concatenate([np.empty(0, np.int64), *moved])
        else:
            self._numbers = numbers_of(select, count)
        if among is not None:
            self._numbers = self.numbers[among[self.numbers]]
        lasts = self._count_below(ends)
        self._firsts = np.concatenate(([0], lasts[:-1])) if len(lasts) else lasts
        #: The number of selected samples in each shard.
        self.sizes: Numbers = lasts - self._firsts

    @property
    def numbers(self) -> Numbers:
        """The numbers of the selected samples in the order of the shards."""
        return np.asarray(self._numbers, np.int64)

    def find(self, shards: Numbers, positions: Numbers) -> Numbers:
        """Return the numbers of samples in their shards.

        Args:
            shards: the shard of each sample.
            positions: the position of each sample among the selected samples of its shard.
        """
        chosen = self._firsts[shards] + positions
        if isinstance(self._numbers, range):
            return self._numbers.start + chosen * self._numbers.step - self._starts[shards]
        return self._numbers[chosen] - self._starts[shards]

    def fingerprint(self) -> str:
        """Return a digest of the selected numbers."""
        return _digest(self._numbers)

    def fingerprint_of(self, shards: slice) -> str:
        """Return a digest of the numbers selected from some shards, counted from the first of these shards."""
        first, end = (
            int(self._firsts[at]) if at < len(self._firsts) else len(self._numbers)
            for at in (shards.start, shards.stop)
        )
        own, start = self._numbers[first:end], int(self._starts[shards.start])
        return _digest(range(own.start - start, own.stop - start, own.step) if isinstance(own, range) else own - start)

    def _count_below(self, ends: Numbers) -> Numbers:
        """Return the number of selected samples below each end."""
        if isinstance(self._numbers, range):
            start, step = self._numbers.start, self._numbers.step
            return np.clip(-((start - ends) // step), 0, len(self._numbers))
        return np.searchsorted(self._numbers, ends, "left")


@checks_calls
def resample(weights: npt.ArrayLike, *, count: int | None = None, seed: int = 0) -> Numbers:
    """Return numbers of samples, repeated in proportion to their weights, for ``select`` of `IndexedSamples`.

    A sample occurs ``count * weight / sum(weights)`` times, rounded up or down, so a sample with weight 0 never occurs.

    Args:
        weights: the weight of each sample, such as ``1 / np.sqrt(frequencies[table.columns["label"]])``.
        count: the total number of samples; by default, the number of weights.
        seed: selects the samples that are rounded up.

    Raises:
        ValueError: a weight is negative or not finite, or none is positive.

    Examples:
        >>> resample([1, 0, 3], count=8).tolist()
        [0, 0, 2, 2, 2, 2, 2, 2]
    """
    try:
        given = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"weights must be one number for each sample, not {weights!r:.200}") from None
    if given.ndim != 1 or not np.all((given >= 0) & (given < np.inf)) or (len(given) and not given.any()):
        raise ValueError("weights must be one finite number for each sample, none negative, and at least one positive")
    check_integer("seed", seed, 0)
    wanted = len(given) if count is None else operator.index(count)
    if wanted < 0:
        raise ValueError(f"count must be at least 0, not {wanted}")
    if not len(given):
        return np.empty(0, np.int64)
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(given))
    ends = np.cumsum(given[order] / given.max())  # the sum of large weights would be infinite
    # Each sample has an interval as long as its weight, into which equidistant points fall.
    points = np.minimum(np.arange(wanted) + generator.random(), np.nextafter(wanted, 0))
    found = np.searchsorted(ends / ends[-1] * wanted, points, "right")
    return np.sort(order[found]).astype(np.int64)


def numbers_of(chosen: Any, count: int, where: str = "", *, argument: str = "select") -> Numbers:
    """Return numbers of samples in ascending order, from numbers or a mask; messages name the argument."""
    found = np.asarray(chosen)
    if found.ndim != 1:
        raise ValueError(f"{argument} must have one dimension, not the shape {found.shape}{where}")
    if found.dtype == bool:
        if len(found) != count:
            raise ValueError(f"{argument} is a mask of length {len(found)}, not {count}, the number of samples{where}")
        return np.flatnonzero(found)
    if not len(found):
        return np.empty(0, np.int64)
    if not np.issubdtype(found.dtype, np.integer):
        raise TypeError(f"{argument} must be numbers of samples or a mask, not an array of {found.dtype}{where}")
    numbers = np.sort(found)  # not converted before the check, because large unsigned numbers would become negative
    if numbers[0] < 0 or numbers[-1] >= count:
        wrong = numbers[0] if numbers[0] < 0 else numbers[-1]
        raise IndexError(f"There is no sample {wrong} to {argument}: numbers{where} are at least 0 and below {count}")
    return numbers.astype(np.int64)


def values_of(argument: str, function: Callable[..., Any], index: ShardIndex) -> npt.NDArray[Any]:
    """Return what a function that a user has passed returns for an index; its errors say for which one."""
    try:
        return np.asarray(function(index))
    except Exception as error:
        note(error, f"raised in the function {argument}=, for {index.columns.index_name}")
        raise


def by_dataset(argument: str, given: Any, names: Collection[str]) -> Mapping[str, Any]:
    """Return the value of an argument for each dataset, by name.

    Raises:
        TypeError: there are several datasets, and the value is neither a function nor a mapping from their names.
        ValueError: there is no dataset with one of the names.
    """
    if not isinstance(given, Mapping):
        if len(names) > 1 and given is not None and not callable(given):
            raise TypeError(f"With several datasets, {argument} is a function or a mapping by name, not {given!r:.100}")
        return dict.fromkeys(names, given)
    if unknown := [name for name in given if name not in names]:
        raise ValueError(f"{argument} is for the dataset {unknown[0]!r}, but the datasets are {sorted(names)}")
    return given


def _digest(numbers: range | Numbers) -> str:
    if isinstance(numbers, range):
        return fingerprint([numbers.start, numbers.stop, numbers.step])
    return fingerprint(numbers.tobytes())


def split_by_shards(shards: Numbers, most: int) -> Iterator[slice]:
    """Yield slices of a list of shards with at most ``most`` shards each."""
    start = 0
    while start < len(shards):
        firsts = np.sort(np.unique(shards[start:], return_index=True)[1])
        stop = start + int(firsts[most]) if len(firsts) > most else len(shards)
        yield slice(start, stop)
        start = stop
