"""Fields that are text: ``txt text transcript html htm``."""

from __future__ import annotations

__all__ = ["decode_text"]


def decode_text(data: bytes) -> str:
    r"""Decode UTF-8 to ``str``, as it is: line ends, blanks and a byte order mark stay.

    >>> decode_text(b"a caf\xc3\xa9\n")
    'a café\n'
    """
    return data.decode("utf-8")
