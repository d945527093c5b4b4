"""The filter for fields whose name ends in ``.gz``: what is inside is decoded by the rest of the name."""

from __future__ import annotations

import gzip
import zlib

__all__ = ["gunzip", "is_gzip", "to_gzip"]


def gunzip(data: bytes) -> bytes:
    """Decompress gzip, all of its members, and check its checksums.

    Raises:
        ValueError: the data is empty, and so no gzip file.
        OSError, EOFError, zlib.error: it is no gzip file, cut short, or damaged.
    """
    if not data:
        raise ValueError("no data, and even an empty file has some when it is compressed")
    return gzip.decompress(data)


def to_gzip(data: bytes) -> bytes:
    """Compress, with no time and no name in the header: the same data are the same bytes."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)  # 16: with gzip's header and checksum; 15: the largest window
    return compressor.compress(data) + compressor.flush()


def is_gzip(data: bytes) -> bool:
    """Whether data begin as gzip does."""
    return data[:3] == b"\x1f\x8b\x08"
