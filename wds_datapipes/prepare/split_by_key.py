"""Parts of a dataset, such as for training and for tests: which one a sample belongs to follows from its key."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate

__all__ = ["KeySplit"]


class KeySplit:
    """Assigns samples to parts by their keys alone.

    A sample stays in its part whatever else the dataset holds, in which order, and in which shard.

    Args:
        shares: the name of each part and its share; only their proportions count.
        seed: another one gives other parts.

    Raises:
        ValueError: there are no shares, or one is not above 0.

    Examples:
        >>> parts = KeySplit({"train": 0.8, "val": 0.2})
        >>> [parts.part_of(f"{number:06d}") for number in range(6)]
        ['train', 'train', 'train', 'train', 'train', 'train']
    """

    def __init__(self, shares: Mapping[str, float], *, seed: int = 0) -> None:
        if not shares or not all(0 < share < float("inf") for share in shares.values()):
            raise ValueError(f"parts have shares above 0, as in {{'train': 0.9, 'val': 0.1}}, not {dict(shares)!r}")
        self.names = list(shares)
        self._ends = list(accumulate(shares.values()))
        self._seed = str(seed).encode()[:64]

    def part_of(self, key: str) -> str:
        """Return the part of the sample with a key."""
        digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=7, key=self._seed).digest()
        # Seven bytes are an exact float, and below 1 when they are divided.
        at = int.from_bytes(digest, "big") >> 3
        return self.names[bisect_right(self._ends, at / (1 << 53) * self._ends[-1], hi=len(self._ends) - 1)]
