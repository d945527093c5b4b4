"""Keys that occur repeatedly in a dataset, found by their hashes without keeping the keys in memory.

All tools that compare the keys of several shards use it. For a shard that is being read or written, a set of its own
keys suffices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt


def hash_keys(keys: Iterable[str]) -> npt.NDArray[np.int64]:
    """Return the hash of each key in this process."""
    return np.fromiter(map(hash, keys), np.int64)


def find_repeated_keys(
    hashes: npt.NDArray[np.int64], owners: npt.NDArray[np.int64], read_keys: Callable[[int], Iterable[str]]
) -> Iterator[tuple[int, str, int]]:
    """Yield each owner with a key that an earlier owner has, the key, and the first owner of the key.

    >>> shards = [["a", "b"], ["c"], ["b", "a", "b"]]
    >>> hashes = hash_keys(key for keys in shards for key in keys)
    >>> list(find_repeated_keys(hashes, np.array([0, 0, 1, 2, 2, 2]), shards.__getitem__))
    [(2, 'b', 0), (2, 'a', 0)]

    Args:
        hashes: the hash of each key.
        owners: the number of the shard or sample that has the key.
        read_keys: returns the keys of an owner. It is called only for owners of a hash that occurs repeatedly.
    """
    _, which, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    is_repeated = counts[which] > 1
    repeated, firsts = {*hashes[is_repeated].tolist()}, dict[str, int]()
    for owner in np.unique(owners[is_repeated]).tolist():
        for key in dict.fromkeys(read_keys(owner)):
            if hash(key) in repeated and (first := firsts.setdefault(key, owner)) != owner:
                yield owner, key, first
