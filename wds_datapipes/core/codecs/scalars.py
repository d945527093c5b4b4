"""Fields that are one whole number in decimal text: ``cls cls2 class count index inx id``."""

from __future__ import annotations

__all__ = ["decode_integer"]


def decode_integer(data: bytes) -> int:
    r"""Decode decimal text to ``int``; blanks and a line end around the number are accepted.

    >>> decode_integer(b" 7\n")
    7
    """
    return int(data)
