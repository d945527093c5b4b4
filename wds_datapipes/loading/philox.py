"""Seed sequences: the same numbers as torchdata's ``SeedGenerator``, which newer releases of torchdata lack.

The generator is Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011): it encrypts a
counter with the seed as the key. Orders of epochs follow from its numbers, and states have them, so they never change.
"""

from __future__ import annotations

import copy

__all__ = ["PhiloxEngine", "SeedGenerator"]

#: The numbers that the words of the counter are multiplied by, and those that the words of the key grow by.
FACTORS = 0xD2511F53, 0xCD9E8D57
STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
WORD = 0xFFFFFFFF


class PhiloxEngine:
    """A source of seeds of 64 bits; its attributes are called as torchdata's are.

    Args:
        seed: of 64 bits.
    """

    def __init__(self, seed: int) -> None:
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Begin anew, with a seed of 64 bits."""
        self._seed = _words(seed, 2)
        self._ctr = [1, 0, 0, 0]  # `spawn` uses the block of counter 0
        self._generated_seeds: list[int] | None = None

    def generate(self) -> int:
        """Return the next number."""
        if self._generated_seeds is not None:
            words, self._generated_seeds = self._generated_seeds[2:], None
        else:
            words = self._generated_seeds = philox_block(self._seed, self._ctr)
            self._ctr = _words(_number(self._ctr) + 1, 4)
        return _number(words[:2])

    def spawn(self, number: int) -> PhiloxEngine:
        """Return another engine. It follows from the seed of this one and a number, and not from what this has made."""
        block, half = divmod(number, 2)
        key = philox_block(self._seed, [0, 0, 0, 0])[:2]
        return PhiloxEngine(_number(philox_block(key, _words(2 * block, 4))[2 * half : 2 * half + 2]))


class SeedGenerator:
    """Two engines: one gives the same seeds on every rank and worker, the other one other seeds in each.

    Args:
        seed: of 64 bits.
    """

    def __init__(self, seed: int) -> None:
        self._shared_rng, self._worker_rng = PhiloxEngine(seed), PhiloxEngine(seed)

    def seed(self, seed: int) -> None:
        """Begin anew, with a seed of 64 bits."""
        self._shared_rng.seed(seed)
        self._worker_rng.seed(seed)

    def generate_shared_seed(self) -> int:
        """Return the next seed that all ranks and workers have."""
        return self._shared_rng.generate()

    def generate_seed(self) -> int:
        """Return the next seed of this rank and worker."""
        return self._worker_rng.generate()

    def spawn(self, number: int, inplace: bool = False) -> SeedGenerator:
        """Return the generator of a rank or a worker, by its number; or become that one."""
        found = self if inplace else copy.deepcopy(self)
        found._worker_rng = self._worker_rng.spawn(number)
        return found

    def __getstate__(self) -> tuple[PhiloxEngine, PhiloxEngine]:
        return self._shared_rng, self._worker_rng

    def __setstate__(self, engines: tuple[PhiloxEngine, PhiloxEngine]) -> None:
        self._shared_rng, self._worker_rng = engines


def philox_block(key: list[int], counter: list[int]) -> list[int]:
    """Return the block of four words that Philox4x32-10 makes of a counter with a key of two words."""
    (low, high), words = key, counter
    for _ in range(ROUNDS):
        first, second = FACTORS[0] * words[0], FACTORS[1] * words[2]
        words = [second >> 32 ^ words[1] ^ low, second & WORD, first >> 32 ^ words[3] ^ high, first & WORD]
        low, high = low + STEPS[0] & WORD, high + STEPS[1] & WORD
    return words


def _words(number: int, count: int) -> list[int]:
    """Return the last words of 32 bits of a number, the lowest first."""
    return [number >> 32 * place & WORD for place in range(count)]


def _number(words: list[int]) -> int:
    return sum(word << 32 * place for place, word in enumerate(words))
