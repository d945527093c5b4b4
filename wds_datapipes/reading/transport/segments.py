"""Shared memory without a name: it needs no room in ``/dev/shm``, and goes when the last process that uses it goes."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

__all__ = ["Lender", "Segment", "SegmentPool", "new_memory"]

Bytes = NDArray[np.uint8]

#: The sizes of segments are multiples of an eighth of the power of two below, so that few sizes occur.
STEPS = 8
SMALLEST = 64 * 1024


def new_memory(size: int) -> int:
    """Return the descriptor of new shared memory.

    Raises:
        OSError: there is no memory left for it.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("wds-datapipes", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile(prefix="wds-datapipes-") as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Segment:
    """A piece of shared memory as the process sees it that made it.

    Attributes:
        number: its name on both sides.
        memory: its bytes.
    """

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self._descriptor: int | None = new_memory(size)
        self._map = mmap.mmap(self._descriptor, size)
        self.memory: Bytes = np.frombuffer(self._map, np.uint8)
        self._is_empty = True

    def pass_on(self) -> int | None:
        """Return the descriptor that the other side has yet to get, and forget it; whoever gets it closes it."""
        descriptor, self._descriptor = self._descriptor, None
        return descriptor

    def fill(self) -> Bytes:
        """Return the memory, which is about to be written."""
        self._is_empty = False
        return self.memory

    def empty(self) -> None:
        """Give the memory's pages back to the system; it reads as zeros then, on both sides."""
        if not self._is_empty:
            self._map.madvise(mmap.MADV_REMOVE)
            self._is_empty = True


class SegmentPool:
    """The segments that a process fills: one that the other side has given back is filled again.

    A segment that is in use is never touched, however many that makes. Of those that are free, ``spare`` keep their
    pages, which makes filling them again cheap, and the others give theirs back.

    Args:
        spare: how many free segments keep their pages.
    """

    def __init__(self, spare: int) -> None:
        self._spare = spare
        self._segments: list[Segment] = []
        self._free: list[Segment] = []

    def take(self, size: int) -> Segment:
        """Return a segment of at least ``size`` bytes, the one that was given back last if it is large enough.

        Raises:
            OSError: there is no memory left.
        """
        for position in range(len(self._free) - 1, -1, -1):
            if self._free[position].memory.size >= size:
                return self._free.pop(position)
        # One that is too small makes room: its number lives on with more memory.
        number = self._free.pop(0).number if self._free else len(self._segments)
        segment = Segment(number, rounded(size))
        self._segments[number : number + 1] = [segment]
        return segment

    def give_back(self, number: int) -> None:
        """Take note that the other side no longer uses a segment."""
        self._free.append(self._segments[number])
        if len(self._free) > self._spare:
            self._free[-self._spare - 1].empty()


class Lender:
    """The segments of another process as this one sees them: lends views of them, and notices when the last is gone."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._lent: dict[int, weakref.ref[Bytes]] = {}
        #: The numbers of segments that can be given back. Views end in any thread, and at any time.
        self.returned: deque[int] = deque()

    def __len__(self) -> int:
        """How many segments are lent at the moment."""
        return len(self._lent)

    def add(self, number: int, descriptor: int) -> None:
        """Take note of a segment that is new, or has new memory; the descriptor is used up."""
        try:
            self._maps[number] = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)

    def read(self, number: int) -> memoryview:
        """Return the bytes of a segment. Whoever takes them calls `give_back`, or `lend`, which sees to it."""
        return memoryview(self._maps[number])

    def give_back(self, number: int) -> None:
        """Let the other process fill a segment again."""
        self.returned.append(number)

    def lend(self, number: int) -> memoryview:
        """Return the bytes of a segment, which is given back once nothing refers to them, or to a part of them."""
        # Each array that is made of a part of this one refers to it, so it lives as long as they do.
        whole = np.frombuffer(self._maps[number], np.uint8)
        lent, returned = self._lent, self.returned

        def end(_: object) -> None:
            lent.pop(number, None)
            returned.append(number)

        self._lent[number] = weakref.ref(whole, end)
        return whole.data


def rounded(size: int) -> int:
    """Return the next larger size of those that occur: multiples of a page, and of an eighth of a power of two."""
    step = max(1 << max(size.bit_length() - 1, 0), SMALLEST) // STEPS
    step = max(step, mmap.PAGESIZE)
    return max(-(-size // step) * step, SMALLEST)
