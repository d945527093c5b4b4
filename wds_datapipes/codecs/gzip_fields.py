"""Gzip compression of fields whose names end in ``.gz``; the rest of the name selects the codec."""

from __future__ import annotations

import gzip
import zlib

from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits

__all__ = ["gunzip", "is_gzip", "to_gzip"]


#: The maximum expansion of deflate: 258 bytes from two bits.
MAX_DEFLATE_RATIO = 1032


def gunzip(data: bytes, *, limits: ReadLimits = DEFAULT_LIMITS) -> bytes:
    """Decompress all members of gzip data, and verify their checksums.

    Raises:
        ValueError: the data are empty.
        OSError, EOFError, zlib.error: the data are not gzip, truncated, or damaged.
        ReadLimitError: the data expand to more than the limits; decompression stops there.
    """
    if not data:
        raise ValueError("the data are empty, but even an empty file has bytes when compressed")
    if limits.most_of_field(len(data)) >= len(data) * MAX_DEFLATE_RATIO:
        return gzip.decompress(data)
    pieces, size, rest = [], 0, data
    while rest:
        member = zlib.decompressobj(wbits=31)  # 16: with gzip's header and checksum; 15: the largest window
        pieces.append(member.decompress(rest, int(limits.most_of_field(len(data))) - size + 1))
        size += len(pieces[-1])
        limits.check_field(len(data), size, "gzip data", is_all=member.eof)
        if not member.eof:
            raise EOFError("the gzip data are truncated")
        rest = member.unused_data.lstrip(b"\0")
    return b"".join(pieces)


def to_gzip(data: bytes) -> bytes:
    """Compress data without time and name in the header, for reproducible bytes."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)  # 16: with gzip's header and checksum; 15: the largest window
    return compressor.compress(data) + compressor.flush()


def is_gzip(data: bytes) -> bool:
    """Whether data start with the gzip magic bytes."""
    return data[:3] == b"\x1f\x8b\x08"
