"""A shuffle over a stream: a buffer that samples leave at random."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from random import Random
from typing import TypeVar

__all__ = ["nbytes", "shuffle_samples"]

T = TypeVar("T")


def shuffle_samples(
    source: Iterable[T], *, rng: Random, buffer_size: int, initial: int, max_bytes: int | None
) -> Iterator[T]:
    """Yield each item of ``source`` once, in an order drawn by ``rng``.

    The first item leaves when ``initial`` are there. From then on two come for each that leaves, until ``buffer_size``
    are there, and then one for one. Items also leave while those in the buffer hold more than ``max_bytes``.
    """
    buffer: list[T] = []
    sizes: list[int] = []  # of what is in the buffer, in bytes; all 0 if there is no bound
    held = 0
    room = initial
    for item in source:
        size = 0 if max_bytes is None else nbytes(item)
        buffer.append(item)
        sizes.append(size)
        held += size
        del item  # so that what leaves is not kept alive by this name
        while len(buffer) >= room or (max_bytes is not None and held > max_bytes):
            room = min(room + 1, buffer_size)
            index = int(rng.random() * len(buffer))
            held -= _take(sizes, index)
            yield _take(buffer, index)
    while buffer:
        yield _take(buffer, int(rng.random() * len(buffer)))


def _take(items: list[T], index: int) -> T:
    """Remove the item at ``index``; the last one gets its place, which is cheaper than moving all."""
    items[index], last = items[-1], items[index]
    items.pop()
    return last


def nbytes(value: object) -> int:
    """Estimate the memory of a sample's values, in bytes: the payload of bytes, arrays, tensors and images.

    >>> nbytes({"__key__": "a", "jpg": bytes(1000), "cls": 3}) > 1000
    True
    """
    if isinstance(value, bytes | bytearray):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(nbytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(nbytes, value))
    held = getattr(value, "nbytes", None)  # numpy arrays, memory views and torch tensors
    if isinstance(held, int):
        return held
    size, bands = getattr(value, "size", None), getattr(value, "getbands", None)
    if isinstance(size, tuple) and callable(bands):  # a Pillow image
        return int(size[0] * size[1] * len(bands()))
    return sys.getsizeof(value)
