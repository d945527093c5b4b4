"""Shuffle a stream with a buffer: its default size, its state, and the order of its items."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from random import Random
from typing import Any, TypeVar

from wds_datapipes.samples.position_buffer import BufferContents, PositionBuffer
from wds_datapipes.shards.held_samples import NONE_AWAITED, Awaited, ItemCounter
from wds_datapipes.shards.position import SamplePosition

T = TypeVar("T")

#: The default number of samples in the buffer, as in webdataset.
BUFFER_SIZE = 1000

_END = object()


class ShuffleState:
    """Resume state of a shuffle.

    Attributes:
        at: the position of the last item yielded.
        waiting: the positions of the buffered items, in the order of the buffer.
        again: the items that later stages have buffered; when these are read again, they bypass the buffer.
        draws: the number of random numbers drawn.
        room: the capacity of the buffer, in items.
        is_ambiguous: whether two successive items have the same position, which then does not identify an item.
    """

    def __init__(self, room: int, waiting: Iterable[SamplePosition] = ()) -> None:
        self.at = SamplePosition(-1, 0, 0)
        self.waiting = PositionBuffer(waiting)
        self.again: Awaited = NONE_AWAITED
        self.draws = 0
        self.room = room
        self.is_ambiguous = False

    def contents(self) -> BufferContents:
        """Return the current positions of the buffered items, for a state."""
        return self.waiting.contents()


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
    if state.draws or state.waiting or state.again:
        buffer = yield from _refill_buffer(items, state, position)
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


def _refill_buffer(
    items: Iterator[Any], state: ShuffleState, position: Callable[[], SamplePosition] | None
) -> Generator[T, None, list[T]]:
    """Read the buffered items again and return them; yield those that later stages have buffered.

    The error policies of earlier stages may skip some, and a new item is then read to find that out.
    """
    missing = {waiting.identity: slot for slot, waiting in enumerate(state.waiting)}
    pending = ItemCounter(again=state.again)
    buffer: list[Any] = [_END] * len(missing)
    new: list[tuple[Any, SamplePosition]] = []
    while (missing or pending.has_pending) and not new:
        item: Any = next(items, _END)
        if item is _END:
            break
        at = position() if position is not None else SamplePosition(-1, 0, 0)
        slot = missing.pop(at.identity, None)
        if slot is not None:
            buffer[slot] = item
        elif position is not None and pending.is_repeat(position):
            state.at = at
            yield item
        else:
            new.append((item, at))
    if missing or new:
        found = [pair for pair in zip(buffer, state.waiting, strict=True) if pair[0] is not _END]
        buffer = [item for item, _ in (*found, *new)]
        state.waiting = PositionBuffer(at for _, at in (*found, *new))
    return buffer


def _take(items: list[T], index: int) -> T:
    """Remove the item at ``index`` in constant time: the last one takes its position."""
    items[index], last = items[-1], items[index]
    items.pop()
    return last


def nbytes(value: object) -> int:
    """Estimate the memory that a sample's values take, in bytes: the payload of bytes, arrays, tensors and images.

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
