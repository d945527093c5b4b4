"""Substitutes: which sample is read at each position of an epoch that excludes samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from wds_datapipes.errors import EmptySourceError, WdsError, plural
from wds_datapipes.index.order.indexed_shards import IndexedShards
from wds_datapipes.index.order.join import NAMED
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.sample_order import TRIES, Chunk, LaneOrder
from wds_datapipes.index.order.select import split_by_shards
from wds_datapipes.user_warnings import warn_user


class Substitutes:
    """Finds the sample to read at each position of an epoch; another sample replaces each excluded one.

    The position determines this substitute. It is from the same lane and dataset, unless none of the first candidates
    can be used. No other sample moves, for any number of ranks and workers. The index of a shard determines its
    excluded samples before the shard is opened.

    Args:
        shards: the shards.
        order: the order of the epoch.
        start: calls a function, in a thread if the indexes are remote.
        are_read: whether excluded samples are replaced; otherwise, their positions stay empty.

    Attributes:
        holes: how often each position was found, but not read yet, whose sample is replaced or left out.
        errors: the errors of shards whose indexes cannot be read, so that their samples cannot be read either.
    """

    def __init__(
        self,
        shards: IndexedShards,
        order: LaneOrder,
        start: Callable[[Callable[[], Any]], Future[Any]],
        *,
        are_read: bool = True,
    ) -> None:
        self._shards, self._order, self._start, self._are_read = shards, order, start, are_read
        self.holes, self.errors = Counter[int](), dict[int, WdsError | OSError]()
        self._mask = lru_cache(shards.most_open)(self._find_excluded)
        #: For each shard, whether its excluded samples were found; their datasets and keys; and whether any shard has
        #: samples that are not excluded.
        self._is_known, self._found = shards.all_sizes == 0, set[tuple[str, str]]()
        self._leaves_some = False

    def locate(self, positions: Numbers) -> Iterator[tuple[Numbers, Chunk]]:
        """Yield positions, with the shards of the samples to read there, or -1, and the samples' numbers in the shards.

        Raises:
            EmptySourceError: all or nearly all samples are excluded.
        """
        shards, numbers = self._shards.find(self._order.find(positions))
        if not self._shards.exclusions:
            yield positions, (shards, numbers)
            return
        for own in split_by_shards(shards, self._shards.most_open):
            self._fill(positions[own], shards[own], numbers[own])
            yield positions[own], (shards[own], numbers[own])

    def shard_of(self, position: int) -> int:
        """Return the shard of the sample at a position, which may be excluded."""
        return int(self._order.find(np.array([position]))[0][0])

    def find_others(self, positions: Numbers, number: int) -> Chunk:
        """Return substitutes for samples; shard -1 means that a substitute is excluded or from another dataset.

        Args:
            positions: the positions of the samples.
            number: the number of the try, up to `TRIES`.
        """
        shards, numbers = self._shards.find(self._order.find(self._order.substitutes(positions, number)))
        is_unfit = self._are_excluded(shards, numbers)
        if number <= TRIES * 3 // 4:
            own, _ = self._order.find(positions)
            is_unfit |= self._shards.datasets_of(own) != self._shards.datasets_of(shards)
        return np.where(is_unfit, -1, shards), numbers

    def _fill(self, positions: Numbers, shards: Numbers, numbers: Numbers) -> None:
        """Replace excluded samples."""
        left = np.flatnonzero(self._are_excluded(shards, numbers))
        self.holes.update(positions[left].tolist())
        shards[left] = -1
        for number in range(1, TRIES + 1):
            if not len(left) or (self._leaves_some and not self._are_read):
                return
            others, their_numbers = self.find_others(positions[left], number)
            is_free = others >= 0
            if self._are_read:
                shards[left[is_free]], numbers[left[is_free]] = others[is_free], their_numbers[is_free]
            left = left[~is_free]
        for error in self.errors.values():
            raise error
        raise EmptySourceError(
            f"EpochOptions(exclude=) leaves out a sample of an epoch of {len(self._order)} and all {TRIES} substitutes "
            "tried. If only a few samples remain, choose them with select= instead"
        )

    def _are_excluded(self, shards: Numbers, numbers: Numbers) -> npt.NDArray[np.bool_]:
        are_excluded = np.zeros(len(shards), bool)
        distinct = np.unique(shards).tolist() if self._shards.exclusions else []
        tasks = [self._start(partial(self._mask, shard)) for shard in distinct]  # remote ones together
        for shard, task in zip(distinct, tasks, strict=True):
            is_own = shards == shard
            are_excluded[is_own] = task.result()[numbers[is_own]]
        return are_excluded

    def _find_excluded(self, shard: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the excluded samples of a shard; if its index cannot be read, all are excluded."""
        (name,) = self._shards.names(np.array([shard]))
        try:
            mask, keys = self._shards.exclusions.find_in(name, self._shards.read_index(shard))
        except (WdsError, OSError) as error:
            self.errors[shard] = error
            return np.ones(self._shards.all_sizes[shard], bool)
        self.errors.pop(shard, None)
        self._is_known[shard] = True
        self._leaves_some = self._leaves_some or not mask.all()
        self._found.update((name, key) for key in keys)
        return mask

    def warn_of_unknown_keys(self) -> None:
        """Warn about excluded keys that no sample has, if this epoch has read from all shards."""
        if not self._is_known.all():
            return
        names = dict.fromkeys(self._shards.names(np.arange(len(self._is_known))))
        keys = ((name, key) for name in names for key in self._shards.exclusions.keys_of(name))
        if unknown := sorted(key for name, key in keys if (name, key) not in self._found):
            named = ", ".join(map(repr, unknown[:NAMED])) + (", ..." if len(unknown) > NAMED else "")
            warn_user(
                f"No sample has the following {plural(len(unknown), 'key')} of EpochOptions(exclude=): {named}. "
                "Compare with the keys that wds-datapipes ls prints"
            )
