"""Compression formats: how each is detected by its first bytes and decompressed."""

from __future__ import annotations

import bz2
import contextlib
import importlib
import lzma
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from wds_datapipes.extras import require

__all__ = ["HEAD_BYTES", "Compression", "DecompressorUnit", "detect_compression"]

#: Compressed bytes per call of a decompressor.
INPUT_BYTES = 64 << 10
#: Compressed bytes per call of zstandard, which returns the whole output: up to 32,768 times as many bytes.
ZSTD_INPUT_BYTES = 4 << 10
#: Memory limit of xz: more than its strongest preset needs, with the largest dictionary in common use.
XZ_MEMORY_BYTES = 2 << 30
#: Length of the longest magic bytes below.
HEAD_BYTES = 10


class DecompressorUnit(Protocol):
    """Decompressor of one independent unit: a gzip member, a bz2 or xz stream, a zstd frame."""

    @property
    def eof(self) -> bool:
        """Whether the unit was read to its end and its checksums are correct."""

    @property
    def needs_input(self) -> bool:
        """Whether more input is needed to produce output."""

    @property
    def unused_data(self) -> bytes:
        """The input after the end of the unit."""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Decompress ``data`` and return at most ``max_length`` bytes, if the library supports that limit."""


class GzipDecompressorUnit:
    """One gzip member."""

    def __init__(self) -> None:
        self._object = zlib.decompressobj(wbits=31)  # 16: with gzip's header and checksum; 15: any window
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._object.eof

    @property
    def unused_data(self) -> bytes:
        return self._object.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        out = self._object.decompress(self._object.unconsumed_tail + data, max_length)
        self.needs_input = len(out) < max_length and not self._object.unconsumed_tail
        return out


class ZstandardDecompressorUnit:
    """One zstd frame, by the package zstandard."""

    needs_input = True

    def __init__(self, frame: Any) -> None:
        self._frame = frame

    @property
    def eof(self) -> bool:
        return bool(self._frame.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._frame.unused_data)

    def decompress(self, data: bytes, max_length: int) -> bytes:  # noqa: ARG002  zstandard has no such limit
        return bytes(self._frame.decompress(data))


class Compression(NamedTuple):
    """A compression format: its magic bytes, and its decompressor."""

    name: str
    starts: Callable[[bytes], bool]
    #: Creates the decompressor of a unit.
    unit: Callable[[], DecompressorUnit]
    errors: tuple[type[Exception], ...]
    input_bytes: int = INPUT_BYTES


def starts_bz2(head: bytes) -> bool:
    """Whether a block size and a block or end marker follow ``BZh``: a plain tar may start with a ``BZh9.txt``."""
    return head[:3] == b"BZh" and head[3:4].isdigit() and head[4:10] in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")


def starts_zstd(head: bytes) -> bool:
    """Whether a data frame or a skippable frame follows; parallel zstd tools write the latter first."""
    return head[:4] == b"\x28\xb5\x2f\xfd" or (head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5)


def zstd() -> Compression:
    """Return zstd of the standard library (Python 3.14 or later), or of the package zstandard."""
    with contextlib.suppress(ImportError):
        native = importlib.import_module("compression.zstd")
        return Compression("zstd", starts_zstd, native.ZstdDecompressor, (native.ZstdError,))
    zstandard = require("zstandard", extra="zst", purpose="read shards compressed with zstd")
    frames = zstandard.ZstdDecompressor()
    return Compression(
        "zstd",
        starts_zstd,
        lambda: ZstandardDecompressorUnit(frames.decompressobj()),
        (zstandard.ZstdError,),
        ZSTD_INPUT_BYTES,
    )


GZIP = Compression("gzip", lambda head: head[:3] == b"\x1f\x8b\x08", GzipDecompressorUnit, (zlib.error,))
BZIP2 = Compression("bz2", starts_bz2, bz2.BZ2Decompressor, (OSError, ValueError))
XZ = Compression(
    "xz",
    lambda head: head[:6] == b"\xfd7zXZ\0",
    lambda: lzma.LZMADecompressor(memlimit=XZ_MEMORY_BYTES),
    (lzma.LZMAError,),
)


def detect_compression(head: bytes) -> Compression | None:
    """Return the compression format that the first bytes of a stream identify, or None."""
    for compression in (GZIP, BZIP2, XZ):
        if compression.starts(head):
            return compression
    return zstd() if starts_zstd(head) else None
