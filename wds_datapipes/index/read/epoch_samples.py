"""Samples of an epoch by position, with substitutes for excluded and unreadable samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from wds_datapipes.errors import EmptySourceError, WdsError, plural
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.sample_order import TRIES, LaneOrder
from wds_datapipes.index.read.dataset_reader import Chunk, DatasetReader, split_by_shards
from wds_datapipes.index.read.indexed_shards import IndexedShards
from wds_datapipes.index.read.join import NAMED
from wds_datapipes.on_error.policy import ErrorPolicy, note
from wds_datapipes.types import Sample
from wds_datapipes.user_warnings import warn_user


class EpochSamples:
    """The samples at the positions of an epoch.

    Another sample of the epoch replaces each excluded sample and, if the policy skips errors, each unreadable one. The
    position determines this substitute. It is from the same lane and dataset, unless none of the first candidates can
    be used. No other sample moves, for any number of ranks and workers. The index of a shard determines its excluded
    samples before the shard is opened.

    Args:
        shards: the shards.
        readers: the readers of the shards and of joined shards.
        order: the order of the epoch.
        substitutes: whether samples are replaced; otherwise, their positions stay empty.

    Attributes:
        holes: the positions, found but not read yet, whose samples are replaced or left out.
        errors: the errors of shards whose indexes cannot be read, so that their samples cannot be read either.
    """

    def __init__(
        self, shards: IndexedShards, readers: Sequence[DatasetReader], order: LaneOrder, *, substitutes: bool = True
    ) -> None:
        self._shards, self._readers, self._order, self._substitutes = shards, readers, order, substitutes
        self.holes, self.errors = set[int](), dict[int, WdsError | OSError]()
        self._mask = lru_cache(shards.most_open)(self._find_excluded)
        #: For each shard, whether its excluded samples were found; their datasets and keys; and whether any shard has
        #: samples that are not excluded.
        self._is_known, self._found = shards.all_sizes == 0, set[tuple[str, str]]()
        self._leaves_some = False

    def read(self, chunks: Iterable[Numbers], policy: ErrorPolicy) -> Iterator[tuple[Sample | None, int, bool]]:
        """Yield the samples at some positions, their positions, and whether they are substitutes.

        Iteration ends at the first error for which a handler returns False.

        Args:
            chunks: arrays of positions; positions beyond the end of the epoch are padding.
            policy: what to do with samples that cannot be read.

        Raises:
            ShardError: neither a sample nor a substitute for it can be read.
            SidecarError: an index is missing or damaged.
            EmptySourceError: all or nearly all samples are excluded.
        """
        waiting = deque[int]()  # the positions of the samples that are being read
        begun = 0

        def find() -> Iterator[Chunk]:
            nonlocal begun
            for chunk in chunks:
                for part, found in self.locate(chunk):
                    waiting.extend(part.tolist())
                    begun += len(part)
                    yield found

        for item in self._shards.stream(self._readers, find()):
            position = waiting.popleft()
            if is_hole := position in self.holes:
                self.holes.remove(position)
            if (is_hole and self.errors) or isinstance(item, Exception):
                shard = int(self._order.find(np.array([position]))[0][0])
                item = self.errors.get(shard, item)
            if not isinstance(item, Exception):
                yield item, position, is_hole
                continue
            policy.tried = begun - len(waiting)
            if not policy.handle(item, url=self._shards.urls[shard]):
                return
            yield self._substitute(position, item) if self._substitutes else None, position, True
            del item  # its frames refer to this one

    def _substitute(self, position: int, error: Exception) -> Sample:
        """Return another sample of the epoch."""
        for number in range(1, TRIES + 1):
            for item in self._shards.stream(self._readers, [self._others(np.array([position]), number)]):
                if isinstance(item, dict):
                    return item  # errors of other samples are reported at their own positions
        note(error, f"{TRIES} other samples of the epoch were tried as substitutes, but none could be read")
        raise error

    def locate(self, positions: Numbers) -> Iterator[tuple[Numbers, Chunk]]:
        """Yield positions, with the shards of the samples to read there, or -1, and the samples' numbers in the shards.

        Raises:
            EmptySourceError: all or nearly all samples are excluded.
        """
        shards, numbers = self._shards.find(self._order.find(positions))
        if not self._shards.exclusions:
            yield positions, (shards, numbers)
            return
        for part in split_by_shards(shards, self._shards.most_open):
            self._fill(positions[part], shards[part], numbers[part])
            yield positions[part], (shards[part], numbers[part])

    def _fill(self, positions: Numbers, shards: Numbers, numbers: Numbers) -> None:
        """Replace excluded samples."""
        left = np.flatnonzero(self._are_excluded(shards, numbers))
        self.holes.update(positions[left].tolist())
        shards[left] = -1
        for number in range(1, TRIES + 1):
            if not len(left) or (self._leaves_some and not self._substitutes):
                return
            others, their_numbers = self._others(positions[left], number)
            is_free = others >= 0
            if self._substitutes:
                shards[left[is_free]], numbers[left[is_free]] = others[is_free], their_numbers[is_free]
            left = left[~is_free]
        for error in self.errors.values():
            raise error
        raise EmptySourceError(
            f"EpochOptions(exclude=) leaves out a sample of an epoch of {len(self._order)} and all {TRIES} substitutes "
            "tried. If only a few samples remain, choose them with select= instead"
        )

    def _others(self, positions: Numbers, number: int) -> Chunk:
        """Return substitutes for samples; shard -1 means that a substitute is excluded or from another dataset."""
        shards, numbers = self._shards.find(self._order.find(self._order.substitutes(positions, number)))
        is_unfit = self._are_excluded(shards, numbers)
        if number <= TRIES * 3 // 4:
            own, _ = self._order.find(positions)
            is_unfit |= self._shards.datasets_of(own) != self._shards.datasets_of(shards)
        return np.where(is_unfit, -1, shards), numbers

    def _are_excluded(self, shards: Numbers, numbers: Numbers) -> npt.NDArray[np.bool_]:
        are_excluded = np.zeros(len(shards), bool)
        distinct = np.unique(shards).tolist() if self._shards.exclusions else []
        tasks = [self._readers[0].start(partial(self._mask, shard)) for shard in distinct]  # remote ones together
        for shard, task in zip(distinct, tasks, strict=True):
            is_own = shards == shard
            are_excluded[is_own] = task.result()[numbers[is_own]]
        return are_excluded

    def _find_excluded(self, shard: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the excluded samples of a shard; if its index cannot be read, all are excluded."""
        (name,) = self._shards.names(np.array([shard]))
        try:
            mask, keys = self._shards.exclusions.find_in(name, self._readers[0].index_of(shard))
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
