"""Shuffle a stream with a buffer: its default size, its state, and the order of its items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from random import Random
from typing import Any, TypeVar

from wds_datapipes.samples.position_buffer import HeldSamples, PositionBuffer
from wds_datapipes.shards.position import SamplePosition

T = TypeVar("T")

#: The default number of samples in the buffer, as in webdataset.
BUFFER_SIZE = 1000
#: What any other value than bytes, arrays and images counts as, such as text without its characters.
OBJECT_BYTES = 48

_END = object()


class ShuffleState(HeldSamples):
    """Resume state of a shuffle.

    Attributes:
        draws: the number of random numbers drawn.
        room: the capacity of the buffer, in items.
    """

    def __init__(self, room: int, waiting: Iterable[SamplePosition] = ()) -> None:
        super().__init__(waiting)
        self.draws = 0
        self.room = room


def shuffle_samples(
    source: Iterable[T],
    *,
    rng: Random,
    buffer_size: int,
    state: ShuffleState,
    max_bytes: int | None,
    position: Callable[[], SamplePosition] | None = None,
) -> Iterator[T]:
    """Yield each item of ``source`` once, in an order drawn by ``rng``.

    The first item is yielded when the initial capacity is filled. From then on, two items are read for each item
    yielded until the buffer holds ``buffer_size`` items, and one for each after that. Items are also yielded while the
    buffer exceeds ``max_bytes``.

    Args:
        source: the items, preceded by those that ``state`` lists as buffered, in any order.
        rng: the random generator.
        buffer_size: the final number of buffered items.
        state: the state to resume from; updated in place.
        max_bytes: the maximum size of the buffered items.
        position: returns the position of the last item of ``source``, if known.
    """
    items: Iterator[Any] = iter(source)
    buffer: list[T] = []
    at: SamplePosition | None = None
    if state.draws or state.waiting or state.awaited:
        found = yield from state.find(items, position)
        state.waiting = PositionBuffer(at for at, _, _ in found)
        buffer = [item for _, _, item in found]
        del found
        for _ in range(state.draws):
            rng.random()
    waiting = state.waiting
    sizes = [0 if max_bytes is None else nbytes(item) for item in buffer]  # in bytes; all 0 without a limit
    held = sum(sizes)
    while True:
        while len(buffer) >= state.room or (buffer and max_bytes is not None and held > max_bytes):
            state.room = min(state.room + 1, buffer_size)
            index = int(rng.random() * len(buffer))
            state.draws += 1
            held -= _take(sizes, index)
            if position is not None:
                state.at = waiting.take(index)
            yield _take(buffer, index)
        item: Any = next(items, _END)
        if item is _END:
            break
        size = 0 if max_bytes is None else nbytes(item)
        buffer.append(item)
        sizes.append(size)
        held += size
        if position is not None:
            before, at = at, position()
            state.is_ambiguous |= at == before
            waiting.append(at)
        del item  # free the item once it is yielded
    while buffer:
        index = int(rng.random() * len(buffer))
        state.draws += 1
        if position is not None:
            state.at = waiting.take(index)
        yield _take(buffer, index)


def _take(items: list[T], index: int) -> T:
    """Remove the item at ``index`` in constant time: the last one takes its position."""
    items[index], last = items[-1], items[index]
    items.pop()
    return last


def nbytes(value: object) -> int:
    """Estimate the memory that a sample's values take, in bytes: the payload of bytes, arrays, tensors and images.

    The order of a bounded buffer depends on it, so it is the same with each release of Python.

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
    return OBJECT_BYTES + (len(value) if isinstance(value, str) else 0)
