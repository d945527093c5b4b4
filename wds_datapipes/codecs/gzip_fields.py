"""Gzip codec for fields whose name ends in ``.gz``; the rest of the name chooses the codec of the content."""

from __future__ import annotations

import gzip
import zlib

from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits

__all__ = ["gunzip", "is_gzip", "to_gzip"]


#: How many times as large as its data what they expand to can be: 258 bytes for two bits, at most.
MOST_OF_DEFLATE = 1032


def gunzip(data: bytes, *, limits: ReadLimits = DEFAULT_LIMITS) -> bytes:
    """Decompress gzip, all of its members, and check its checksums.

    Raises:
        ValueError: the data is empty, and so no gzip file.
        OSError, EOFError, zlib.error: it is no gzip file, cut short, or damaged.
        ReadLimitError: it expands to more than its limits; no more than these is decompressed.
    """
    if not data:
        raise ValueError("no data, and even an empty file has some when it is compressed")
    if limits.most_of_field(len(data)) >= len(data) * MOST_OF_DEFLATE:
        return gzip.decompress(data)
    pieces, size, rest = [], 0, data
    while rest:
        member = zlib.decompressobj(wbits=31)  # 16: with gzip's header and checksum; 15: the largest window
        pieces.append(member.decompress(rest, int(limits.most_of_field(len(data))) - size + 1))
        size += len(pieces[-1])
        limits.check_field(len(data), size, "gzip data", is_all=member.eof)
        if not member.eof:
            raise EOFError("the gzip data are cut short")
        rest = member.unused_data.lstrip(b"\0")
    return b"".join(pieces)


def to_gzip(data: bytes) -> bytes:
    """Compress, with no time and no name in the header: the same data are the same bytes."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)  # 16: with gzip's header and checksum; 15: the largest window
    return compressor.compress(data) + compressor.flush()


def is_gzip(data: bytes) -> bool:
    """Whether data begin as gzip does."""
    return data[:3] == b"\x1f\x8b\x08"
