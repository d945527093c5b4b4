"""Unnamed shared memory, independent of ``/dev/shm`` and freed with the last process that uses it."""

from __future__ import annotations

import ctypes
import itertools
import os
import weakref
from collections import deque
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from wds_datapipes.io.after_fork import at_fork

Bytes = NDArray[np.uint8]

#: The smallest size of a segment.
SMALLEST = 64 * 1024

#: As in linux/memfd.h.
MFD_CLOEXEC = 1


def new_memory(size: int) -> int:
    """Return the descriptor of new shared memory.

    Raises:
        OSError: there is not enough memory.
        NotImplementedError: the system does not support it.
    """
    # Not os.memfd_create, which the interpreters of uv and conda lack, because they are built for an older C library.
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "memfd_create"):
        raise NotImplementedError("worker processes require Linux 3.17 and glibc 2.27. Use num_workers=0 here")
    descriptor: int = libc.memfd_create(b"wds-datapipes", MFD_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_segment(descriptor: int, size: int) -> Bytes:
    """Return shared memory as an array, which keeps it alive; the descriptor can be closed."""
    # Not mmap.mmap, which keeps a descriptor open until Python 3.13: there may be thousands of views.
    path = f"/proc/self/fd/{descriptor}"
    memory: Bytes = torch.from_file(path, shared=True, size=size, dtype=torch.uint8).numpy()
    return memory


class Segment:
    """A piece of shared memory, in the process that created it.

    Attributes:
        number: its identifier on both sides.
        memory: its bytes.
    """

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.descriptor: int | None = new_memory(size)
        try:
            self.memory = map_segment(self.descriptor, size)
        except BaseException:
            self.close()
            raise

    def pass_on(self) -> int | None:
        """Return the descriptor that the other side still needs, if any, and forget it; the receiver closes it."""
        descriptor, self.descriptor = self.descriptor, None
        return descriptor

    def close(self) -> None:
        """Close the descriptor, unless it was passed on."""
        if (descriptor := self.pass_on()) is not None:
            os.close(descriptor)


class SegmentPool:
    """The segments that a process fills, and reuses once the other side has returned them.

    A segment in use is never overwritten, no matter how many there are.
    """

    passes_arrays = False

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.free: list[Segment] = []
        self._numbers = itertools.count()

    def take(self, size: int) -> Segment:
        """Return a segment of at least ``size`` bytes, preferably the most recently returned one.

        Raises:
            OSError: there is not enough memory.
        """
        for segment in reversed(self.free):
            if segment.memory.size >= size:
                self.free.remove(segment)
                return segment
        # If all are too small, one is freed, and its number is reused with more memory.
        number = self.free[0].number if self.free else next(self._numbers)
        # A power of two, so that few distinct sizes occur. Unused memory is not allocated.
        segment = Segment(number, max(1 << (size - 1).bit_length(), SMALLEST))
        if self.free:
            self.free.pop(0).close()
        self.segments[number] = segment
        return segment

    def give_back(self, number: int) -> None:
        """Reuse the segment with this number, or, if ``number`` is a complement, forget it."""
        if number < 0:
            del self.segments[~number]
        else:
            self.free.append(self.segments[number])

    def close(self) -> None:
        """Close the descriptors that were not passed on."""
        for segment in self.segments.values():
            segment.close()


class SegmentLender:
    """The segments of another process: lends views of them, and detects when the last view of one is gone.

    Segments are returned for reuse, which is cheap, but only a few are kept. A process forked from this one keeps
    access to the segments lent at that time, so these are not reused.

    Args:
        spare: the maximum number of segments kept for reuse.

    Attributes:
        returned: the numbers of segments to reuse, and the complements of those to drop. Views may end in any thread,
            at any time.
    """

    def __init__(self, spare: int) -> None:
        self.returned: deque[int] = deque()
        self._spare = spare
        self.memory: dict[int, Bytes] = {}
        self._lent: dict[int, weakref.ref[Bytes]] = {}
        self._forked: set[int] = set()
        _LENDERS.add(self)

    def __len__(self) -> int:
        """Return the number of lent segments."""
        return len(self._lent)

    def add(self, number: int, descriptor: int) -> None:
        """Add a segment that is new or has new memory, and close the descriptor."""
        try:
            self.memory[number] = map_segment(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    def lend(self, number: int) -> memoryview:
        """Return the bytes of a segment, which goes back to its owner once nothing refers to any part of them."""
        # A memoryview keeps a reference to its source object, and so does every slice and array made from it. NumPy
        # bypasses views of arrays, but not an array created from a plain buffer.
        whole = np.frombuffer(self.memory[number].data, np.uint8)
        self._lent[number] = weakref.ref(whole, partial(self._end, number))
        return whole.data

    def fork(self) -> None:
        """Record the lent segments as seen by a process that is about to be forked."""
        self._forked.update(tuple(self._lent))

    def _end(self, number: int, _: object) -> None:
        self._lent.pop(number, None)
        if number in self._forked or len(self.memory) - len(self._lent) > self._spare:
            self._forked.discard(number)
            self.memory.pop(number, None)
            number = ~number
        self.returned.append(number)


#: All lenders of this process. Only a hook sees the user's forks.
_LENDERS: weakref.WeakSet[SegmentLender] = weakref.WeakSet()


def _fork() -> None:
    for lender in tuple(_LENDERS):
        lender.fork()


at_fork("segments", before=_fork)
