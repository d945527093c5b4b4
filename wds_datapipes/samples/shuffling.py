"""Shuffling of a stream with a buffer."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from random import Random
from typing import Any, TypeVar

from wds_datapipes.shards.position import SamplePosition, samples_gone_error

__all__ = ["CAME", "ShuffleMoves", "ShuffleState", "nbytes", "shuffle_samples", "waiting_behind"]

T = TypeVar("T")

_END = object()

#: Stands among the slots that items have left for an item that was added, which gets the last slot.
CAME = -1


class ShuffleMoves:
    """The changes of a shuffle buffer that was empty at first, as plain numbers to save memory.

    Args:
        waiting: where the items are that have come at first.

    Attributes:
        slots: those that items have left, with `CAME` for each item that has come.
        came: the shard, start and end of each item that was added, flattened.
        ways: of the items that have come which way: their numbers in this order, and the ways.
    """

    __slots__ = ("came", "slots", "ways")

    def __init__(self, waiting: Iterable[SamplePosition] = ()) -> None:
        self.slots = array("q")
        self.came = array("q")
        self.ways: list[tuple[int, tuple[Any, ...]]] = []
        for address in waiting:
            self.come(address)

    def come(self, address: SamplePosition) -> None:
        """Record that an item was added."""
        if address[3]:
            self.ways.append((len(self.came) // 3, address[3]))
        self.came.extend(address[:3])
        self.slots.append(CAME)


class ShuffleState:
    """Resume state of a shuffle.

    Attributes:
        at: where the item is that it has yielded last.
        waiting: where the items are that wait in its buffer, in their order there.
        passing: what of its source a later stage waits for, which is handed on at once when it is read again.
        draws: how many numbers were drawn.
        room: how many items may wait.
        moves: how ``waiting`` has changed since it was recorded; None if it is not.
        is_unclear: whether two items in a row have come from one place, so that an address does not tell which it is.
    """

    def __init__(self, room: int) -> None:
        self.at = SamplePosition(-1, 0, 0)
        self.waiting: list[SamplePosition] = []
        self.passing: set[SamplePosition] = set()
        self.draws = 0
        self.room = room
        self.moves: ShuffleMoves | None = None
        self.is_unclear = False


def shuffle_samples(
    source: Iterable[T],
    *,
    rng: Random,
    buffer_size: int,
    state: ShuffleState,
    max_bytes: int | None,
    address: Callable[[], SamplePosition] | None = None,
) -> Iterator[T]:
    """Yield each item of ``source`` once, in an order drawn by ``rng``.

    The first item leaves when as many are there as have room. From then on two come for each that leaves, until
    ``buffer_size`` are there, and then one for one. Items also leave while those in the buffer hold more than
    ``max_bytes``.

    Args:
        source: the items; at first those that wait according to ``state``, in any order, if there are any.
        rng: draws.
        buffer_size: how many items wait in the end.
        state: where to begin; it is kept up to date.
        max_bytes: how large the items may be that wait.
        address: tells where the item is that ``source`` has yielded last, if that is known.
    """
    items: Iterator[Any] = iter(source)
    buffer: list[T] = []
    at: SamplePosition | None = None
    if state.draws or state.waiting or state.passing:
        buffer = yield from _refill_buffer(items, state, address)
        for _ in range(state.draws):
            rng.random()
    waiting = state.waiting
    sizes = [0 if max_bytes is None else nbytes(item) for item in buffer]  # in bytes; all 0 if there is no bound
    held = sum(sizes)
    while True:
        while len(buffer) >= state.room or (buffer and max_bytes is not None and held > max_bytes):
            state.room = min(state.room + 1, buffer_size)
            index = int(rng.random() * len(buffer))
            state.draws += 1
            held -= _take(sizes, index)
            if address is not None:
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
        if address is not None:
            before, at = at, address()
            state.is_unclear |= at == before
            waiting.append(at)
            if state.moves is not None:
                state.moves.come(at)
        del item  # so that what leaves is not kept alive by this name
    while buffer:
        index = int(rng.random() * len(buffer))
        state.draws += 1
        if address is not None:
            state.at = _take(waiting, index)
            if state.moves is not None:
                state.moves.slots.append(index)
        yield _take(buffer, index)


def waiting_behind(moves: Iterable[int]) -> list[int]:
    """Return the numbers of the items that are buffered after some moves of an empty buffer.

    Args:
        moves: the slot of each item that has left, and `CAME` for each that has come.

    Examples:
        >>> waiting_behind([CAME, CAME, 0, CAME])
        [1, 2]
    """
    waiting: list[int] = []
    number = 0
    for slot in moves:
        if slot < 0:
            waiting.append(number)
            number += 1
        else:
            last = waiting.pop()
            if slot < len(waiting):
                waiting[slot] = last
    return waiting


def _refill_buffer(
    items: Iterator[Any], state: ShuffleState, address: Callable[[], SamplePosition] | None
) -> Generator[T, None, list[T]]:
    """Return the buffered items once they were read again; yield those that a later stage waits for."""
    missing = {address.place: slot for slot, address in enumerate(state.waiting)}
    passing = {address.place for address in state.passing}
    buffer: list[Any] = [None] * len(missing)
    while missing or passing:
        item: Any = next(items, _END)
        if item is _END:
            raise samples_gone_error(len(missing) + len(passing))
        at = address() if address is not None else SamplePosition(-1, 0, 0)
        slot = missing.pop(at.place, None)
        if slot is not None:
            buffer[slot] = item
        elif at.place in passing:
            passing.discard(at.place)
            state.at = at
            yield item
        else:  # it is new, and more new ones may come forever
            raise samples_gone_error(len(missing) + len(passing))
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
