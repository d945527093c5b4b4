"""Streams of bytes that only read forward."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO, cast

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Trickle", "forward"]


class Trickle(io.RawIOBase):
    """A stream that only reads forward, and returns at most ``step`` bytes at a time."""

    def __init__(self, data: bytes, step: int) -> None:
        self._source = io.BytesIO(data)
        self._step = step

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        return self._source.readinto(memoryview(buffer).cast("B")[: self._step])


def forward(data: bytes, step: int = 1 << 20, buffer_size: int = 1 << 16) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(Trickle(data, step), buffer_size))
