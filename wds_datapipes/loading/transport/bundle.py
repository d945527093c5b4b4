"""A bundle collects the items of one message: their pickles, and their arrays in a segment of shared memory."""

from __future__ import annotations

import pickle
from array import array
from typing import Any, Protocol

import numpy as np

from wds_datapipes.loading.transport.flow_control import TOGETHER_BYTES
from wds_datapipes.loading.transport.protocol import INLINE, NUMBER, Header, Kind
from wds_datapipes.loading.transport.serialization import SerializedItem, Serializer
from wds_datapipes.loading.transport.shared_memory import Bytes

#: The alignment of arrays: the size of a cache line.
ALIGNMENT = 64

#: Pieces below this average size in bytes are joined before they are copied.
LONG = 8 * 1024


class MemoryPiece(Protocol):
    """A piece of memory for a message.

    Attributes:
        number: its identifier on both sides.
        memory: its bytes.
    """

    number: int
    memory: Bytes

    def pass_on(self) -> Any:
        """Return what the other side needs to read it, if it does not have that yet."""


class Memory(Protocol):
    """Memory for messages, such as a `SegmentPool`.

    Attributes:
        passes_arrays: whether the arrays of an item that has a message of its own are passed on as they are, because
            the message is sent before the pipeline may change them.
    """

    passes_arrays: bool

    def take(self, size: int) -> MemoryPiece:
        """Return a piece of at least ``size`` bytes."""

    def give_back(self, number: int) -> None:
        """Reuse a piece."""


class Bundle:
    """Collects the items of the next message.

    Arrays are copied when their item is added, because the pipeline may change them afterwards: they fill the segment
    from its beginning. Pickles are immutable, and are written at the end, to the message itself if they are small.
    Small items of plain values share a pickle, which takes a third of the time, unless there are other items among
    them.

    Args:
        pool: the memory for arrays and large messages.

    Attributes:
        count: the number of items.
        is_full: whether there is no room for another item as large as the latest one.
    """

    def __init__(self, pool: Memory) -> None:
        self.pool = pool
        self._segment: MemoryPiece | None = None
        self._forget()

    def clear(self) -> None:
        """Discard the items."""
        if self._segment is not None:
            self.pool.give_back(self._segment.number)
        self._forget()

    def _forget(self) -> None:
        self._segment = None
        self._plain: list[Any] = []
        self._lengths: list[int] = []
        self._counts: list[int] = []
        self._places: list[int] = []
        self._parts: list[bytes] = []
        self._passed: list[Bytes] = []
        self._size = self._end = self.count = 0
        self.is_full = False

    def add_plain(self, item: Any) -> bool:
        """Add a result of `plain_copy` if there is room; return whether it was added."""
        if self._lengths:
            return self.add(Serializer().pack(item))
        self._plain.append(item)
        self.count += 1
        return True

    def add(self, item: SerializedItem) -> bool:
        """Add an item if there is room, as there always is for the first; return whether it was added.

        Raises:
            OSError: there is not enough memory.
        """
        if self._plain:
            serializer, plain, self._plain, self.count = Serializer(), self._plain, [], 0
            for each in plain:
                self.add(serializer.pack(each))
        parts, length, arrays = item
        size = length + 2 * NUMBER  # an item has at most two numbers in the table, and so does each array
        if arrays:
            size += sum(_round_up(each.nbytes) + 2 * NUMBER for each in arrays)
        total = self._size + size
        if total > TOGETHER_BYTES and self.count:
            return False
        if total > TOGETHER_BYTES and length + 2 * NUMBER * len(arrays) < INLINE // 2 and self.pool.passes_arrays:
            self._passed = [np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in arrays]
            self._places += [0] * 2 * len(arrays)
        elif arrays:
            segment = self._segment = self._segment or self.pool.take(max(size, TOGETHER_BYTES))
            for each in arrays:
                target = segment.memory[self._end : self._end + each.nbytes].view(each.dtype)
                np.copyto(target.reshape(each.shape), each)
                self._places += (self._end, each.nbytes)
                self._end += _round_up(each.nbytes)
        self._lengths.append(length)
        self._counts.append(len(arrays))
        self._parts += parts
        self._size = total
        self.count += 1
        self.is_full = total + size > TOGETHER_BYTES
        return True

    def finish(self, kind: Kind, epoch: int, number: int, records: int = 0) -> tuple[Header, list[bytes], Any]:
        """Return the message that contains the items, and forget them.

        Args:
            kind: the kind of the message.
            epoch: the epoch that the items belong to.
            number: the number in its header.
            records: the size of their records, in bytes.

        Returns:
            tuple: the header; the parts of the body, unless it is in the segment; and what to pass on of that, if
                anything.

        Raises:
            OSError: there is not enough memory.
        """
        if self._plain:
            self._parts = [pickle.dumps(self._plain, pickle.HIGHEST_PROTOCOL)]
            self._lengths = [len(self._parts[0])]
            kind = Kind.PLAIN_ITEMS
        table = array("Q", self._lengths)
        if self._places:
            table.extend(self._counts)
            table.extend(self._places)
        body = [table.tobytes(), *self._parts]
        begin = end = self._end or sum(each.nbytes for each in self._passed)
        size = sum(map(len, body))
        if size > INLINE:
            segment = self._segment = self._segment or self.pool.take(size)
            for part in body if size > LONG * len(body) else [b"".join(body)]:
                segment.memory.data[end : end + len(part)] = part
                end += len(part)
            body = []
        segment_number, attached = -1, self._passed or None
        if self._segment is not None:
            segment_number, attached = self._segment.number, self._segment.pass_on()
        header = Header(kind, epoch, number, len(self._places) // 2, segment_number, begin, begin + size, records)
        self._forget()
        return header, body, attached


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
