"""The items of one message: their pickles, and their arrays in a segment of shared memory."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence

import numpy as np

from wds_datapipes.loading.transport.protocol import INLINE, Header, Kind
from wds_datapipes.loading.transport.serialization import Array, SerializedItem
from wds_datapipes.loading.transport.shared_memory import Segment, SegmentPool

__all__ = ["TOGETHER_BYTES", "Bundle", "write_parts"]

#: Items share a message up to this many bytes. The cost of a message then hardly matters to images of 100 KB, and
#: the messages on their way still fit in the caches of the processor.
TOGETHER_BYTES = 512 * 1024

#: The alignment of arrays, which is the size of a cache line.
ALIGNMENT = 64

#: Pieces below this average size in bytes are joined before they are copied.
LONG = 8 * 1024


class Bundle:
    """Collects the items of the next message.

    Arrays are copied when their item is added, because the pipeline may change them afterwards: they fill the segment
    from its beginning. Pickles are immutable, and are written at the end, to the message itself if they are small.

    Args:
        pool: the segments.

    Attributes:
        is_full: whether another item of the size of the latest one has no room.
    """

    def __init__(self, pool: SegmentPool) -> None:
        self._pool = pool
        self._unsent: list[Segment] = []
        self._segment: Segment | None = None
        self.clear()

    def __len__(self) -> int:
        """The number of items."""
        return len(self._lengths)

    def clear(self) -> None:
        """Discard the items."""
        if self._segment is not None:
            self._unsent.append(self._segment)  # the other process does not know it
        self._segment = None
        self._lengths: list[int] = []
        self._counts: list[int] = []
        self._places: list[int] = []
        self._parts: list[bytes] = []
        self._pickled = self._end = 0
        self.is_full = False

    def close(self) -> None:
        """Close the descriptors that were not passed on."""
        for segment in (*self._unsent, self._segment):
            if segment is not None and (descriptor := segment.pass_on()) is not None:
                os.close(descriptor)

    def has_room(self, item: SerializedItem) -> bool:
        """Whether an item may share the message with those that it has. The first item always may."""
        pickled, end = self._pickled + item.size, self._end
        if not self._lengths:
            return True
        if not item.arrays and not end:
            return pickled <= TOGETHER_BYTES
        end += _aligned(item.arrays)
        table = 8 * (2 * (len(self._lengths) + 1) + len(self._places) + 2 * len(item.arrays))
        return end <= TOGETHER_BYTES and pickled + table <= INLINE

    def add(self, item: SerializedItem) -> None:
        """Add an item.

        Raises:
            OSError: there is not enough memory.
        """
        size, latest = self._pickled + item.size, item.size
        if item.arrays:
            if self._segment is None:
                table = 8 * (2 + 2 * len(item.arrays))
                self._segment = self._open(_aligned(item.arrays) + table + item.size)
            for each in item.arrays:
                _copy_array(each, self._segment, self._end)
                self._places += (self._end, each.nbytes)
                self._end += _round_up(each.nbytes)
                latest += each.nbytes
        self._lengths.append(item.size)
        self._counts.append(len(item.arrays))
        self._parts += item.parts
        self._pickled = size
        self.is_full = size + self._end + latest > TOGETHER_BYTES

    def finish(self, epoch: int, records: int) -> tuple[Header, list[bytes], int | None]:
        """Return the message of the items, and forget them.

        Args:
            epoch: the epoch that they belong to.
            records: the size of their records, in bytes.

        Returns:
            tuple: the header; the body, in parts, if it is not in the segment; the descriptor to pass on, if any.

        Raises:
            OSError: there is not enough memory.
        """
        table = array("Q", self._lengths)
        if self._places:
            table.extend(self._counts)
            table.extend(self._places)
        body = [table.tobytes(), *self._parts]
        size = table.itemsize * len(table) + self._pickled
        if size > INLINE:
            self._segment = self._segment or self._pool.take(size)
            write_parts(self._segment, body, self._end)
            body = []
        arrays, begin = len(self._places) // 2, self._end
        segment, self._segment = self._segment, None
        number = -1 if segment is None else segment.number
        header = Header(Kind.ITEMS, epoch, len(self), arrays, number, begin, begin + size, records)
        self.clear()
        return header, body, None if segment is None else segment.pass_on()

    def _open(self, size: int) -> Segment:
        """Return a segment with room for an item and, unless it is large, for more."""
        for position, segment in enumerate(self._unsent):
            if segment.memory.size >= size:
                return self._unsent.pop(position)
        return self._pool.take(max(size, TOGETHER_BYTES))


def write_parts(segment: Segment, parts: list[bytes], begin: int = 0) -> None:
    """Write bytes to a segment."""
    data = segment.memory.data
    if sum(map(len, parts)) < LONG * len(parts):
        parts = [b"".join(parts)]
    for part in parts:
        data[begin : begin + len(part)] = part
        begin += len(part)


def _copy_array(each: Array, segment: Segment, begin: int) -> None:
    target = segment.memory[begin : begin + each.nbytes].view(each.dtype)
    fortran = not each.flags.c_contiguous and each.flags.f_contiguous
    np.copyto(target.reshape(each.shape, order="F" if fortran else "C"), each)


def _aligned(arrays: Sequence[Array]) -> int:
    """Return the size of arrays in a segment, in bytes."""
    return sum(_round_up(each.nbytes) for each in arrays)


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
