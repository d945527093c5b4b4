"""Shuffling of a stream with a buffer."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from random import Random
from typing import Any, TypeVar

from wds_datapipes.shards.position import SamplePosition, missing_samples_error

__all__ = ["ADDED", "ShuffleMoves", "ShuffleState", "list_waiting", "nbytes", "shuffle_samples"]

T = TypeVar("T")

_END = object()

#: Marks an item that was added in the last slot, among the items that were removed.
ADDED = -1


class ShuffleMoves:
    """The changes to an initially empty buffer of samples, as plain numbers to save memory.

    Args:
        waiting: the positions of the first items added.

    Attributes:
        slots: the changes in order: `ADDED`; the slot of an item that was removed, and replaced by the last item; or
            ``-2 - slot`` if the items after it moved up instead.
        added: the shard, start and end of each item that was added, flattened.
        routes: the index among the added items, and the route, of each item that has one.
    """

    __slots__ = ("added", "routes", "slots")

    def __init__(self, waiting: Iterable[SamplePosition] = ()) -> None:
        self.slots = array("q")
        self.added = array("q")
        self.routes: list[tuple[int, tuple[int, ...]]] = []
        for position in waiting:
            self.add(position)

    def add(self, position: SamplePosition) -> None:
        """Record that an item was added."""
        if position[3]:
            self.routes.append((len(self.added) // 3, position[3]))
        self.added.extend(position[:3])
        self.slots.append(ADDED)

    def remove_in_order(self, slot: int) -> None:
        """Record that an item was removed, and the items after it moved up."""
        self.slots.append(-2 - slot)


class ShuffleState:
    """Resume state of a shuffle.

    Attributes:
        at: the position of the last item yielded.
        waiting: the positions of the buffered items, in the order of the buffer.
        again: the positions of items that later stages have buffered; they bypass the buffer when they are read again.
        draws: the number of random numbers drawn.
        room: the capacity of the buffer, in items.
        moves: the changes to ``waiting`` since it was recorded; None if they are not recorded.
        is_ambiguous: whether two successive items have the same position, so that a position does not identify an item.
    """

    def __init__(self, room: int) -> None:
        self.at = SamplePosition(-1, 0, 0)
        self.waiting: list[SamplePosition] = []
        self.again: set[SamplePosition] = set()
        self.draws = 0
        self.room = room
        self.moves: ShuffleMoves | None = None
        self.is_ambiguous = False


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

    The first item is yielded when the initial capacity is filled. From then on, two items are read for each one
    yielded, until the buffer holds ``buffer_size``, and then one for one. Items are also yielded while the buffer
    exceeds ``max_bytes``.

    Args:
        source: the items, preceded by those that ``state`` lists as buffered, in any order.
        rng: the random generator.
        buffer_size: the final number of buffered items.
        state: the state to resume from; updated in place.
        max_bytes: the maximum size of the buffered items.
        position: returns the position of the last item of ``source``, if it is known.
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
                state.at = _take(waiting, index)
                if state.moves is not None:
                    state.moves.slots.append(index)
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
            if state.moves is not None:
                state.moves.add(at)
        del item  # do not keep the item alive once it is yielded
    while buffer:
        index = int(rng.random() * len(buffer))
        state.draws += 1
        if position is not None:
            state.at = _take(waiting, index)
            if state.moves is not None:
                state.moves.slots.append(index)
        yield _take(buffer, index)


def list_waiting(moves: Iterable[int]) -> list[int]:
    """Return the numbers of the items that are buffered after some moves of an empty buffer.

    Args:
        moves: the changes, as in `ShuffleMoves`.

    Examples:
        >>> list_waiting([ADDED, ADDED, ADDED, 0, ADDED]), list_waiting([ADDED, ADDED, ADDED, -2, ADDED])
        ([2, 1, 3], [1, 2, 3])
    """
    waiting: list[int] = []
    number = 0
    for slot in moves:
        if slot == ADDED:
            waiting.append(number)
            number += 1
        elif slot < 0:
            del waiting[-2 - slot]
        else:
            last = waiting.pop()
            if slot < len(waiting):
                waiting[slot] = last
    return waiting


def _refill_buffer(
    items: Iterator[Any], state: ShuffleState, position: Callable[[], SamplePosition] | None
) -> Generator[T, None, list[T]]:
    """Read the buffered items again, and return them; yield those that later stages have buffered."""
    missing = {waiting.identity: slot for slot, waiting in enumerate(state.waiting)}
    again = {waiting.identity for waiting in state.again}
    buffer: list[Any] = [None] * len(missing)
    while missing or again:
        item: Any = next(items, _END)
        if item is _END:
            raise missing_samples_error(len(missing) + len(again))
        at = position() if position is not None else SamplePosition(-1, 0, 0)
        slot = missing.pop(at.identity, None)
        if slot is not None:
            buffer[slot] = item
        elif at.identity in again:
            again.discard(at.identity)
            state.at = at
            yield item
        else:  # a new item, and an unlimited number may follow
            raise missing_samples_error(len(missing) + len(again))
    return buffer


def _take(items: list[T], index: int) -> T:
    """Remove the item at ``index`` in constant time: the last one takes its position."""
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
