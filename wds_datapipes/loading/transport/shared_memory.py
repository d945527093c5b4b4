"""Unnamed shared memory: independent of ``/dev/shm``, and freed with the last process that uses it."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import tempfile
import weakref
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Segment", "SegmentLender", "SegmentPool", "map_segment", "new_memory"]

Bytes = NDArray[np.uint8]

#: The sizes of segments are multiples of an eighth of the power of two below, so that few sizes occur.
STEPS = 8
SMALLEST = 64 * 1024

#: As in linux/memfd.h. `os` has it together with `os.memfd_create`.
MFD_CLOEXEC = 1


def new_memory(size: int) -> int:
    """Return the descriptor of new shared memory.

    Raises:
        OSError: there is no memory left for it.
    """
    descriptor = _new_memfd()
    if descriptor is not None:
        try:
            os.ftruncate(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
    with tempfile.TemporaryFile(prefix="wds-datapipes-") as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk must not show when the memory is written
        return os.dup(file.fileno())


def _new_memfd() -> int | None:
    """Return the descriptor of a file in memory, or None if there is no such thing."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("wds-datapipes", os.MFD_CLOEXEC)
    # An interpreter that is made to run anywhere, such as uv's or conda's, is built for a C library that had none.
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "memfd_create"):
        return None
    descriptor: int = libc.memfd_create(b"wds-datapipes", MFD_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def map_segment(descriptor: int, size: int) -> Bytes:
    """Return shared memory as an array, which keeps it; the descriptor can be closed."""
    # Not mmap.mmap, which keeps a descriptor of its own open until Python 3.13: thousands of views may be kept.
    path = f"/proc/self/fd/{descriptor}"
    memory: Bytes = torch.from_file(path, shared=True, size=size, dtype=torch.uint8).numpy()
    return memory


class Segment:
    """A piece of shared memory as the process sees it that made it.

    Attributes:
        number: its name on both sides.
        memory: its bytes.
    """

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        descriptor = new_memory(size)
        try:
            self.memory = map_segment(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor: int | None = descriptor

    def pass_on(self) -> int | None:
        """Return the descriptor that the other side has yet to get, and forget it; whoever gets it closes it."""
        descriptor, self._descriptor = self._descriptor, None
        return descriptor


class SegmentPool:
    """The segments that a process fills: one that the other side has given back is filled again.

    A segment that is in use is never touched, however many that makes. Of those that are free, some are kept, since
    filling them again is cheap.

    Args:
        spare: how many free segments are kept.
    """

    def __init__(self, spare: int) -> None:
        self._spare = spare
        self._segments: dict[int, Segment] = {}
        self._free: list[Segment] = []
        self._numbers = itertools.count()

    def take(self, size: int) -> Segment:
        """Return a segment of at least ``size`` bytes, the one that was given back last if it is large enough.

        Raises:
            OSError: there is no memory left.
        """
        for position in range(len(self._free) - 1, -1, -1):
            if self._free[position].memory.size >= size:
                return self._free.pop(position)
        # One that is too small makes room: its number lives on with more memory.
        number = self._free.pop(0).number if self._free else next(self._numbers)
        segment = self._segments[number] = Segment(number, round_up(size))
        return segment

    def give_up(self, number: int) -> None:
        """Take note that a segment is not to be filled again."""
        del self._segments[number]

    def give_back(self, number: int) -> int | None:
        """Take note that the other side no longer uses a segment; return the number of one to be given up, if any."""
        self._free.append(self._segments[number])
        if len(self._free) <= self._spare:
            return None
        return self._segments.pop(self._free.pop(0).number).number


class SegmentLender:
    """The segments of another process as this one sees them: lends views of them, and notices when the last is gone.

    A process that is forked here sees what is lent at the time, too, for as long as it likes. Such a segment is never
    filled again: it is given up instead.
    """

    def __init__(self) -> None:
        self._memory: dict[int, Bytes] = {}
        self._lent: dict[int, weakref.ref[Bytes]] = {}
        self._forked: set[int] = set()
        #: The numbers of segments that can be given back, and the complements of those that are given up. Views end in
        #: any thread, and at any time.
        self.returned: deque[int] = deque()
        _LENDERS.add(self)

    def __len__(self) -> int:
        """How many segments are lent at the moment."""
        return len(self._lent)

    def add(self, number: int, descriptor: int) -> None:
        """Take note of a segment that is new, or has new memory; the descriptor is used up."""
        try:
            self._memory[number] = map_segment(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    def drop(self, number: int) -> None:
        """Take note that the other process has given a segment up."""
        del self._memory[number]

    def read(self, number: int) -> memoryview:
        """Return the bytes of a segment. Whoever takes them calls `give_back`, or `lend`, which sees to it."""
        return self._memory[number].data

    def give_back(self, number: int) -> None:
        """Let the other process fill a segment again."""
        self.returned.append(number)

    def lend(self, number: int) -> memoryview:
        """Return the bytes of a segment, which is given back once nothing refers to them, or to a part of them."""
        # A memoryview refers to the object that it was made from, and so does every part and array that is made of it.
        # NumPy looks through views of arrays, though not through one that it got as a mere buffer.
        whole = np.frombuffer(self._memory[number].data, np.uint8)
        memory, lent, forked, returned = self._memory, self._lent, self._forked, self.returned

        def end(_: object) -> None:
            lent.pop(number, None)
            if number in forked:
                forked.discard(number)
                memory.pop(number, None)
                returned.append(~number)
            else:
                returned.append(number)

        self._lent[number] = weakref.ref(whole, end)
        return whole.data

    def fork(self) -> None:
        """Take note that a process is about to be forked."""
        self._forked.update(tuple(self._lent))


_LENDERS: weakref.WeakSet[SegmentLender] = weakref.WeakSet()


def _fork() -> None:
    for lender in tuple(_LENDERS):
        lender.fork()


os.register_at_fork(before=_fork)


def round_up(size: int) -> int:
    """Return the next larger size of those that occur: multiples of a page, and of an eighth of a power of two."""
    step = max(1 << max(size.bit_length() - 1, 0), SMALLEST) // STEPS
    step = max(step, mmap.PAGESIZE)
    return max(-(-size // step) * step, SMALLEST)
