"""Seeds that follow from other seeds and numbers, in every process and interpreter alike."""

from __future__ import annotations

from hashlib import sha256

__all__ = ["derived_seed"]


def derived_seed(*facts: int | str) -> int:
    """Return a number of 63 bits that follows from all ``facts`` and their order.

    >>> derived_seed("order", 1, 2) == derived_seed("order", 1, 2) != derived_seed("order", 2, 1)
    True
    """
    return int.from_bytes(sha256(repr(facts).encode()).digest()[:8], "big") >> 1
