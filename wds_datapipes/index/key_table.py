"""Key table: the keys of all samples of a dataset, and their numbers by key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.shard_index import ShardIndex

if TYPE_CHECKING:
    from typing_extensions import Self


class KeyTable:
    """The keys of samples, in the order of their shards, and the numbers of the samples that have some keys.

    It takes 8 bytes for each key in addition to its text, and 16 more after the first `find`. Keys are found by their
    hashes, and then compared.

    Args:
        texts: the keys of each shard in UTF-8, concatenated.
        ends: the end of each key in the text of its shard.

    Examples:
        >>> table = KeyTable([b"abb", b"c"], [np.array([1, 3]), np.array([1])])
        >>> list(table), table.find(["c", "a", "x"]).tolist()
        (['a', 'bb', 'c'], [2, 0, -1])
    """

    def __init__(self, texts: Sequence[bytes], ends: Sequence[Numbers]) -> None:
        starts = np.cumsum([0, *map(len, texts)])
        moved = [part + start for part, start in zip(ends, starts[:-1].tolist(), strict=True)]
        self._text = b"".join(texts)
        self._bounds: Numbers = np.concatenate([np.zeros(1, np.int64), *moved])
        self._by_hash: tuple[Numbers, Numbers] | None = None

    @classmethod
    def from_indexes(cls, indexes: Iterable[ShardIndex]) -> Self:
        """Copy the keys of shards from their indexes."""
        parts = [(each.columns["key_text"].tobytes(), np.array(each.columns["key_ends"])) for each in indexes]
        return cls([text for text, _ in parts], [ends for _, ends in parts])

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._bounds) - 1

    def __iter__(self) -> Iterator[str]:
        """Yield the key of each sample."""
        return map(_text, self._all())

    def __getitem__(self, number: int) -> str:
        """Return the key of a sample."""
        return _text(self._key(number))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_by_hash": None}  # hashes differ between processes

    def find(self, keys: Iterable[str]) -> Numbers:
        """Return the number of the first sample with each key, or -1."""
        wanted = [_raw(key) for key in keys]
        order, hashes = self._sorted()
        found = np.full(len(wanted), -1, np.int64)
        if not len(order):
            return found
        own = np.fromiter(map(hash, wanted), np.int64, len(wanted))
        places = np.searchsorted(hashes, own)
        candidates = order[np.minimum(places, len(order) - 1)]
        for at, (key, number) in enumerate(zip(wanted, candidates.tolist(), strict=True)):
            if self._key(number) == key:
                found[at] = number
            else:  # it is absent, or another key has the same hash
                found[at] = next(self._numbers_of(key, int(places[at])), -1)
        return found

    def repeated(self, numbers: Numbers) -> tuple[int, int] | None:
        """Return the number of one of some samples, and of another sample with the same key, if there is any."""
        order, hashes = self._sorted()
        is_repeated = np.zeros(len(order), np.bool_)
        is_repeated[:-1] = hashes[1:] == hashes[:-1]
        firsts = np.zeros(len(order), np.bool_)
        firsts[order[is_repeated]] = True  # few samples have the hash of another one
        for number in np.unique(numbers[firsts[numbers]]).tolist():
            key = self._key(number)
            others = self._numbers_of(key, int(np.searchsorted(hashes, hash(key))))
            if (other := next((other for other in others if other != number), None)) is not None:
                return number, other
        return None

    def _numbers_of(self, key: bytes, place: int) -> Iterator[int]:
        """Yield the numbers of the samples with a key, whose hash is at a place of the sorted ones."""
        order, hashes = self._sorted()
        value = hash(key)
        while place < len(order) and hashes[place] == value:
            if self._key(int(order[place])) == key:
                yield int(order[place])
            place += 1

    def _sorted(self) -> tuple[Numbers, Numbers]:
        """Return the numbers of samples in the order of the hashes of their keys, and these hashes."""
        if self._by_hash is None:
            hashes = np.fromiter(map(hash, self._all()), np.int64, len(self))
            order = np.argsort(hashes, kind="stable")
            self._by_hash = order, hashes[order]
        return self._by_hash

    def _all(self) -> Iterator[bytes]:
        return (self._text[begin:end] for begin, end in pairwise(self._bounds.tolist()))

    def _key(self, number: int) -> bytes:
        return self._text[self._bounds[number] : self._bounds[number + 1]]


def _raw(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
