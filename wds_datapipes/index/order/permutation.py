"""Random permutation of numbers that is computed for each number, and not stored."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from wds_datapipes.seeds import derived_seed

Numbers: TypeAlias = "npt.NDArray[np.int64]"

#: The number of rounds. In small networks, fewer than 24 leave some permutations more likely than others.
ROUNDS, MANY_ROUNDS, FEW_BITS = 8, 24, 10
#: The multipliers of the finalizer of MurmurHash3.
FACTORS = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
HALF = np.uint64(33)


class Permutation:
    """A random permutation of ``range(size)``, in constant memory.

    It is a Feistel network on as many bits as ``size`` needs. Each round adds a hash of one half of the bits to the
    other half, so it is invertible, and a permutation of a power of two. Numbers that it maps beyond ``size`` are
    mapped again until they are not (cycle walking), which leaves a permutation of ``range(size)``; fewer than two
    steps are needed on average. The result depends on nothing but the arguments, on all platforms.

    Args:
        size: how many numbers there are.
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
        self._low, self._high = (bits + 1) // 2, bits // 2
        rounds = MANY_ROUNDS if bits <= FEW_BITS else ROUNDS
        self._keys = [np.uint64(derived_seed("permutation", seed, size, number)) for number in range(rounds)]

    def __call__(self, numbers: Numbers) -> Numbers:
        """Return where each of the numbers is mapped to."""
        found = numbers.astype(np.uint64)
        pending = np.arange(len(found))
        while len(pending):
            moved = found[pending] = self._encrypt(found[pending])
            pending = pending[moved >= np.uint64(self.size)]
        return found.astype(np.int64)

    def _encrypt(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        shift, mask = np.uint64(self._low), np.uint64((1 << self._low) - 1)
        high_mask = np.uint64((1 << self._high) - 1)
        low, high = numbers & mask, numbers >> shift
        for number, key in enumerate(self._keys):
            if number % 2:
                high ^= hash_numbers(low ^ key) & high_mask
            else:
                low ^= hash_numbers(high ^ key) & mask
        encrypted: npt.NDArray[np.uint64] = low | high << shift
        return encrypted


def hash_numbers(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a hash of each number, which is another one for each."""
    for factor in FACTORS:
        numbers = (numbers ^ numbers >> HALF) * factor
    hashed: npt.NDArray[np.uint64] = numbers ^ numbers >> HALF
    return hashed
