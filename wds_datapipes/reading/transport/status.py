"""A page of shared memory on which a process says what it is at; it can be read when the process hangs, or has died."""

from __future__ import annotations

import os
import struct

from wds_datapipes.reading.transport.segments import mapped, new_memory

__all__ = ["StatusPage"]

#: Items, bytes, seconds spent making items, seconds spent waiting for the other side to take them.
_NUMBERS = struct.Struct("=QQdd")
_LENGTH = struct.Struct("=I")
_TEXT_AT = 64
SIZE = 4096


class StatusPage:
    """What one process writes and another reads, without either waiting for the other.

    A number is never read half written. The text may be, by a reader who comes in the very moment it changes.

    Args:
        descriptor: the page, if it is another process's; it is used up.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = new_memory(SIZE) if descriptor is None else descriptor
        self._page = mapped(self._descriptor, SIZE).data
        if descriptor is not None:
            os.close(descriptor)

    def pass_on(self) -> int:
        """Return the descriptor for the other process; whoever gets it closes it."""
        return self._descriptor

    def write(self, items: int, size: int, making_s: float, waiting_s: float) -> None:
        """Publish the numbers."""
        _NUMBERS.pack_into(self._page, 0, items, size, making_s, waiting_s)

    def read(self) -> tuple[int, int, float, float]:
        """Return the numbers that `write` got last."""
        items, size, making_s, waiting_s = _NUMBERS.unpack_from(self._page, 0)
        return items, size, making_s, waiting_s

    @property
    def text(self) -> str:
        """What the process is at, such as the shard that it opened last."""
        (length,) = _LENGTH.unpack_from(self._page, _TEXT_AT)
        begin = _TEXT_AT + _LENGTH.size
        return bytes(self._page[begin : begin + min(length, SIZE - begin)]).decode(errors="replace")

    def note(self, text: str) -> None:
        """Publish what the process is at."""
        begin = _TEXT_AT + _LENGTH.size
        data = text.encode(errors="replace")[: SIZE - begin]
        _LENGTH.pack_into(self._page, _TEXT_AT, 0)
        self._page[begin : begin + len(data)] = data
        _LENGTH.pack_into(self._page, _TEXT_AT, len(data))
