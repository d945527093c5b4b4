"""Seeds derived from other seeds and numbers, identical in every process and interpreter."""

from __future__ import annotations

import copy
from hashlib import sha256
from typing import Any


def derived_seed(*facts: int | str) -> int:
    """Return a seed of 63 bits, derived from all ``facts`` in order.

    >>> derived_seed("order", 1, 2) == derived_seed("order", 1, 2) != derived_seed("order", 2, 1)
    True
    """
    return int.from_bytes(sha256(repr(facts).encode()).digest()[:8], "big") >> 1


#: The multipliers of the counter's words, and the increments of the key's words.
FACTORS = 0xD2511F53, 0xCD9E8D57
STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
WORD = 0xFFFFFFFF


class PhiloxEngine:
    """A generator of 64-bit seeds, whose attributes are named as in torchdata.

    Args:
        seed: a 64-bit seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Restart from a 64-bit seed."""
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
        """Return another engine, derived from this seed and a number, independent of the numbers generated so far."""
        block, half = divmod(number, 2)
        key = philox_block(self._seed, [0, 0, 0, 0])[:2]
        return PhiloxEngine(_number(philox_block(key, _words(2 * block, 4))[2 * half : 2 * half + 2]))


class SeedGenerator:
    """Two engines: one generates the same seeds on every rank and worker, the other different ones.

    Args:
        seed: a 64-bit seed.
    """

    def __init__(self, seed: int) -> None:
        self._shared_rng, self._worker_rng = PhiloxEngine(seed), PhiloxEngine(seed)

    def seed(self, seed: int) -> None:
        """Restart from a 64-bit seed."""
        self._shared_rng.seed(seed)
        self._worker_rng.seed(seed)

    def generate_shared_seed(self) -> int:
        """Return the next seed that is the same on all ranks and workers."""
        return self._shared_rng.generate()

    def generate_seed(self) -> int:
        """Return the next seed of this rank and worker."""
        return self._worker_rng.generate()

    def spawn(self, number: int, inplace: bool = False) -> SeedGenerator:
        """Return the generator of a rank or a worker, by its number; with ``inplace``, turn this one into it."""
        found = self if inplace else copy.deepcopy(self)
        found._worker_rng = self._worker_rng.spawn(number)
        return found

    def __getstate__(self) -> tuple[PhiloxEngine, PhiloxEngine]:
        return self._shared_rng, self._worker_rng

    def __setstate__(self, engines: tuple[PhiloxEngine, PhiloxEngine]) -> None:
        self._shared_rng, self._worker_rng = engines


def seed_of(seed_generator: Any) -> int:
    """Return the seed of a generator, ours or torchdata's."""
    low, high = seed_generator._shared_rng._seed
    return int(low | high << 32)


def philox_block(key: list[int], counter: list[int]) -> list[int]:
    """Return the block of four words that Philox4x32-10 computes from a counter and a key of two words."""
    (low, high), words = key, counter
    for _ in range(ROUNDS):
        first, second = FACTORS[0] * words[0], FACTORS[1] * words[2]
        words = [second >> 32 ^ words[1] ^ low, second & WORD, first >> 32 ^ words[3] ^ high, first & WORD]
        low, high = low + STEPS[0] & WORD, high + STEPS[1] & WORD
    return words


def _words(number: int, count: int) -> list[int]:
    """Return the lowest 32-bit words of a number, the lowest first."""
    return [number >> 32 * place & WORD for place in range(count)]


def _number(words: list[int]) -> int:
    return sum(word << 32 * place for place, word in enumerate(words))
