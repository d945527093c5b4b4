"""The filter for fields whose name ends in ``.gz``: what is inside is decoded by the rest of the name."""

from __future__ import annotations

import gzip

__all__ = ["gunzip"]


def gunzip(data: bytes) -> bytes:
    """Decompress gzip, all of its members, and check its checksums.

    Raises:
        ValueError: the data is empty, and so no gzip file.
        OSError, EOFError, zlib.error: it is no gzip file, cut short, or damaged.
    """
    if not data:
        raise ValueError("no data, and even an empty file has some when it is compressed")
    return gzip.decompress(data)
