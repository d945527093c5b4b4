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

__all__ = ["Segment", "SegmentLender", "SegmentPool", "StatusPage", "map_segment", "new_memory"]

Bytes = NDArray[np.uint8]

#: Segment sizes are multiples of an eighth of the power of two below, so that few distinct sizes occur.
STEPS = 8
SMALLEST = 64 * 1024

#: As in linux/memfd.h. `os` defines it together with `os.memfd_create`.
MFD_CLOEXEC = 1


def new_memory(size: int) -> int:
    """Return the descriptor of new shared memory.

    Raises:
        OSError: there is not enough memory.
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
        os.posix_fallocate(file.fileno(), 0, size)  # so that a full disk is detected here, and not on a later write
        return os.dup(file.fileno())


def _new_memfd() -> int | None:
    """Return the descriptor of a file in memory, or ``None`` if that is not supported."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("wds-datapipes", os.MFD_CLOEXEC)
    # A portable interpreter, such as uv's or conda's, is built for a C library without memfd_create.
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "memfd_create"):
        return None
    descriptor: int = libc.memfd_create(b"wds-datapipes", MFD_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
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
        descriptor = new_memory(size)
        try:
            self.memory = map_segment(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor: int | None = descriptor

    def pass_on(self) -> int | None:
        """Return and forget the descriptor that the other side still needs; the receiver closes it."""
        descriptor, self._descriptor = self._descriptor, None
        return descriptor


class SegmentPool:
    """The segments that a process fills; it reuses those that the other side has returned.

    A segment in use is never overwritten, however many there are. The pool keeps some free segments, since reusing them
    is cheap.

    Args:
        spare: the number of free segments to keep.
    """

    def __init__(self, spare: int) -> None:
        self._spare = spare
        self._segments: dict[int, Segment] = {}
        self._free: list[Segment] = []
        self._numbers = itertools.count()

    def take(self, size: int) -> Segment:
        """Return a segment of at least ``size`` bytes, preferably the one that was returned last.

        Raises:
            OSError: there is not enough memory.
        """
        for position in range(len(self._free) - 1, -1, -1):
            if self._free[position].memory.size >= size:
                return self._free.pop(position)
        # A segment that is too small is freed, and its number is reused with more memory.
        number = self._free.pop(0).number if self._free else next(self._numbers)
        segment = self._segments[number] = Segment(number, round_up(size))
        return segment

    def give_up(self, number: int) -> None:
        """Forget a segment, which is never reused."""
        del self._segments[number]

    def give_back(self, number: int) -> int | None:
        """Mark a segment as free; return the number of one to give up, if any."""
        self._free.append(self._segments[number])
        if len(self._free) <= self._spare:
            return None
        return self._segments.pop(self._free.pop(0).number).number


class SegmentLender:
    """The segments of another process: lends views of them, and detects when the last view of one is gone.

    A process that is forked here keeps access to the segments lent at that time. Such a segment is given up instead of
    reused.
    """

    def __init__(self) -> None:
        self._memory: dict[int, Bytes] = {}
        self._lent: dict[int, weakref.ref[Bytes]] = {}
        self._forked: set[int] = set()
        #: The numbers of segments that can be returned, and the complements of those that are given up. Views end in
        #: any thread, at any time.
        self.returned: deque[int] = deque()
        _LENDERS.add(self)

    def __len__(self) -> int:
        """The number of segments that are lent."""
        return len(self._lent)

    def add(self, number: int, descriptor: int) -> None:
        """Add a segment that is new, or has new memory; closes the descriptor."""
        try:
            self._memory[number] = map_segment(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    def drop(self, number: int) -> None:
        """Forget a segment that the other process has given up."""
        del self._memory[number]

    def read(self, number: int) -> memoryview:
        """Return the bytes of a segment. The caller must call `give_back`, or `lend`, which does so."""
        return self._memory[number].data

    def give_back(self, number: int) -> None:
        """Return a segment to the other process, which reuses it."""
        self.returned.append(number)

    def lend(self, number: int) -> memoryview:
        """Return the bytes of a segment, which is returned once nothing refers to them or to a part of them."""
        # A memoryview keeps a reference to its source object, and so does every slice and array made from it. NumPy
        # bypasses views of arrays, but not an array created from a plain buffer.
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
        """Record the lent segments as seen by a process that is about to be forked."""
        self._forked.update(tuple(self._lent))


#: Every lender of this process, for the fork hook.
_LENDERS: weakref.WeakSet[SegmentLender] = weakref.WeakSet()


def _fork() -> None:
    """Record the segments that a fork inherits: only a hook sees the user's forks, and segments are reused."""
    for lender in tuple(_LENDERS):
        lender.fork()


os.register_at_fork(before=_fork)


def round_up(size: int) -> int:
    """Return the next larger segment size: multiples of a page, and of an eighth of a power of two."""
    step = max(1 << max(size.bit_length() - 1, 0), SMALLEST) // STEPS
    step = max(step, mmap.PAGESIZE)
    return max(-(-size // step) * step, SMALLEST)


#: The offset of the text, after the numbers and its length.
_TEXT_AT = 64
SIZE = 4096


class StatusPage:
    """The status of a process, which it writes and another process reads, without waiting for each other.

    A number is never read half written. The text may be, if it is read while it changes.

    Args:
        descriptor: the page, if it belongs to another process; it is closed.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = new_memory(SIZE) if descriptor is None else descriptor
        page = map_segment(self._descriptor, SIZE).data
        # Not `struct.pack_into`, which clears the memory first: each number is written and read atomically.
        self._numbers, self._length = page[:48].cast("d"), page[48:56].cast("Q")
        self._text = page[_TEXT_AT:]
        if descriptor is not None:
            os.close(descriptor)

    def pass_on(self) -> int:
        """Return the descriptor for the other process, which closes it."""
        return self._descriptor

    def write(self, *numbers: float) -> None:
        """Publish items, bytes, seconds spent making and waiting, bytes fetched from stores, and seconds for that."""
        for index, number in enumerate(numbers):
            self._numbers[index] = number

    def read(self) -> list[float]:
        """Return the numbers that were last written."""
        return [float(number) for number in self._numbers]

    @property
    def text(self) -> str:
        """A text, such as the name of the shard that was opened last."""
        return bytes(self._text[: self._length[0]]).decode(errors="replace")

    def note(self, text: str) -> None:
        """Publish a text."""
        data = text.encode(errors="replace")[: len(self._text)]
        self._length[0] = 0
        self._text[: len(data)] = data
        self._length[0] = len(data)
