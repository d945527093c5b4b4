"""Random permutations of numbers that are computed rather than stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from wds_datapipes.seeds import derived_seed

Numbers: TypeAlias = "npt.NDArray[np.int64]"

#: The number of rounds. In small networks, fewer than 24 make some permutations more likely than others.
ROUNDS, MANY_ROUNDS, FEW_BITS = 8, 24, 10
#: The multipliers of the finalizer of MurmurHash3.
FACTORS = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
HALF = np.uint64(33)
#: The maximum number of values permuted at a time.
CHUNK = 1 << 15


class Permutation:
    """A random permutation of ``range(size)``, in constant memory.

    It is a Feistel network on as many bits as ``size`` needs. Each round adds a hash of one half of the bits to the
    other half, so the network is invertible: a permutation of a power of two. Numbers that it maps beyond ``size`` are
    mapped again until they are not (cycle walking), which leaves a permutation of ``range(size)``; fewer than two steps
    are needed on average. The result depends only on the arguments, on all platforms.

    Args:
        size: the number of values.
        seed: selects the permutation.

    Examples:
        >>> Permutation(5, seed=0)(np.arange(5)).tolist()
        [4, 0, 3, 1, 2]
    """

    def __init__(self, size: int, *, seed: int) -> None:
        if not 0 <= size <= 1 << 62:
            raise ValueError(f"a permutation has a size from 0 to 2**62, not {size}")
        self.size = size
        bits = max(size - 1, 0).bit_length()
        low, high = (bits + 1) // 2, bits // 2
        rounds = MANY_ROUNDS if bits <= FEW_BITS else ROUNDS
        #: The bits of the low half; the key of each round, 0 after the last; and the mask of the half that it changes.
        self.row = np.zeros(1 + 2 * MANY_ROUNDS, np.uint64)
        self.row[0] = low
        self.row[1 : 1 + rounds] = [derived_seed("permutation", seed, size, number) for number in range(rounds)]
        self.row[1 + MANY_ROUNDS :][:rounds] = [(1 << (high if number % 2 else low)) - 1 for number in range(rounds)]

    def __call__(self, numbers: Numbers) -> Numbers:
        """Return the number to which each number is mapped."""
        return permute(numbers, np.zeros(len(numbers), np.int64), [self])


def permute(numbers: Numbers, which: Numbers, permutations: Sequence[Permutation]) -> Numbers:
    """Return the number to which each number is mapped by its own permutation, whose index is in ``which``."""
    found = numbers.astype(np.uint64)
    sizes = np.array([each.size for each in permutations], np.uint64)
    rows = np.stack([each.row for each in permutations], axis=1) if permutations else np.zeros((49, 0), np.uint64)
    rounds = MANY_ROUNDS if rows[1 + ROUNDS].any() else ROUNDS
    table = np.concatenate([rows[: 1 + rounds], rows[1 + MANY_ROUNDS :][:rounds]])
    for start in range(0, len(numbers), CHUNK):  # a part of the table has up to 49 entries for each number
        pending = np.arange(start, min(start + CHUNK, len(numbers)))
        is_one = (which[pending] == which[start]).all()
        while len(pending):
            own = which[pending[:1] if is_one else pending]
            moved = found[pending] = _encrypt(found[pending], table[:, own])
            pending = pending[moved >= sizes[own]]
    return found.astype(np.int64)


def _encrypt(numbers: npt.NDArray[np.uint64], table: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the numbers after all rounds of their networks, whose rows are the columns of a table."""
    rounds = len(table) // 2
    shift, keys, masks = table[0], table[1 : 1 + rounds], table[1 + rounds :]
    low, high = numbers & masks[0], numbers >> shift
    for number in range(rounds):
        if number % 2:
            high ^= hash_numbers(low ^ keys[number]) & masks[number]
        else:
            low ^= hash_numbers(high ^ keys[number]) & masks[number]
    encrypted: npt.NDArray[np.uint64] = low | high << shift
    return encrypted


def hash_numbers(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a different hash of each number."""
    hashed: npt.NDArray[np.uint64] = numbers ^ numbers >> HALF
    for factor in FACTORS:
        hashed *= factor
        hashed ^= hashed >> HALF
    return hashed
