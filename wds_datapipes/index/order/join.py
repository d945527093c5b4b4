"""Joins: the samples of other datasets that have the same keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from wds_datapipes.errors import DuplicateKeyError, MisalignedShardsError, plural
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.sample_order import Chunk
from wds_datapipes.io.openers import redact

if TYPE_CHECKING:
    from wds_datapipes.index.order.indexed_shards import IndexedShards

#: The number of keys that a message names.
NAMED = 3


class KeyTable:
    """The keys of samples in the order of their shards, and the numbers of samples by key.

    Each key takes 8 bytes in addition to its text, and 16 more after the first `find`. Keys are found by hash and then
    compared.

    Args:
        urls: the shards.
        indexes: their indexes.
    """

    def __init__(self, urls: Sequence[str], indexes: Iterable[ShardIndex]) -> None:
        self._urls = urls
        texts, bounds, counts, size = list[bytes](), [np.zeros(1, np.int64)], list[int](), 0
        for index in indexes:
            texts.append(index.columns["key_text"].tobytes())
            bounds.append(index.columns["key_ends"] + size)
            size += len(texts[-1])
            counts.append(len(index))
        self._text, self._bounds = b"".join(texts), np.concatenate(bounds)
        self._ends = np.cumsum(counts)
        self._by_hash: tuple[Numbers, Numbers] | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._bounds) - 1

    def __iter__(self) -> Iterator[str]:
        """Yield the key of each sample."""
        return (raw.decode("utf-8", "surrogateescape") for raw in self._all())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_by_hash": None}  # hashes differ between processes

    def find(self, keys: Iterable[str]) -> Numbers:
        """Return the number of the sample with each key, or -1.

        Raises:
            DuplicateKeyError: two samples have one of the keys.
        """
        wanted = [key.encode("utf-8", "surrogateescape") for key in keys]
        if self._by_hash is None:
            unsorted = np.fromiter(map(hash, self._all()), np.int64, len(self))
            order = np.argsort(unsorted, kind="stable")
            self._by_hash = order, unsorted[order]
        order, hashes = self._by_hash
        own = np.fromiter(map(hash, wanted), np.int64, len(wanted))
        firsts, stops = (np.searchsorted(hashes, own, side).tolist() for side in ("left", "right"))
        found = np.full(len(wanted), -1, np.int64)
        for at, (key, first, stop) in enumerate(zip(wanted, firsts, stops, strict=True)):
            for number in order[first:stop].tolist():
                if self._text[self._bounds[number] : self._bounds[number + 1]] == key:
                    if found[at] >= 0:
                        raise self._duplicate_error(key, int(found[at]), number)
                    found[at] = number
        return found

    def _duplicate_error(self, key: bytes, *numbers: int) -> DuplicateKeyError:
        first, second = (
            f"sample {number} (in {redact(self._urls[int(np.searchsorted(self._ends, number, 'right'))])})"
            for number in numbers
        )
        return DuplicateKeyError(
            f"The key {key.decode('utf-8', 'surrogateescape')!r} is not unique: {first} and {second} have it. "
            "Select samples by their numbers, or give each its own key"
        )

    def _all(self) -> Iterator[bytes]:
        return (self._text[begin:end] for begin, end in pairwise(self._bounds.tolist()))


class JoinedShards:
    """A dataset whose samples are joined with those of another one that have the same keys.

    Args:
        shards: the shards of the other dataset.
        joined: those of this dataset.

    Attributes:
        other: the shards of this dataset.

    Raises:
        DuplicateKeyError: this dataset has two samples with the same key.
    """

    def __init__(self, shards: IndexedShards, joined: IndexedShards) -> None:
        self.other, self._starts = joined, shards.all_starts
        table = KeyTable(joined.urls, map(joined.read_index, range(len(joined.urls))))
        keys = (shards.read_index(shard).keys for shard in range(len(shards.urls)))
        #: The numbers of the samples of this dataset with the keys of all samples of the other one, or -1.
        self._numbers: Numbers = np.concatenate([np.empty(0, np.int64), *map(table.find, keys)])

    @property
    def are_found(self) -> npt.NDArray[np.bool_]:
        """A mask of the samples that have a counterpart."""
        return self._numbers >= 0

    def find(self, chunk: Chunk) -> Chunk:
        """Return the shards and numbers of the counterparts of some samples; shard -1 means none."""
        shards, numbers = chunk
        wanted = np.where(shards < 0, -1, self._numbers[np.where(shards < 0, 0, self._starts[shards] + numbers)])
        found = np.searchsorted(self.other.all_starts, wanted, "right") - 1
        return np.where(wanted < 0, -1, found), wanted - self.other.all_starts[found]

    def check_complete(self, chunk: Chunk, read_index: Callable[[int], ShardIndex]) -> None:
        """Check that some samples have counterparts.

        Args:
            chunk: the shards and numbers of the samples.
            read_index: returns the index of such a shard.

        Raises:
            MisalignedShardsError: one has none.
        """
        shards, numbers = chunk
        is_absent = self._numbers[self._starts[shards] + numbers] < 0
        if count := int(is_absent.sum()):
            some = zip(shards[is_absent][:NAMED].tolist(), numbers[is_absent][:NAMED].tolist(), strict=True)
            named = ", ".join(repr(read_index(shard)[number].key) for shard, number in some)
            raise MisalignedShardsError(
                f"There is no counterpart of {plural(count, 'sample')} in {plural(len(self.other.urls), 'shard')} from "
                f"{redact(self.other.urls[0])}: {named}{', ...' if count > NAMED else ''}. Pass Join(shards, "
                'missing="skip") to leave out such samples, or missing="keep" to read them without those fields'
            )
