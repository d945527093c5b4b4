"""Integer codec, decimal text: ``cls cls2 class count index inx id``."""

from __future__ import annotations

import operator
from typing import Any

from wds_datapipes.codecs import Codec

__all__ = ["decode_integer", "encode_integer", "integer"]


def decode_integer(data: bytes) -> int:
    r"""Decode decimal text to ``int``; surrounding whitespace is accepted.

    >>> decode_integer(b" 7\n")
    7
    """
    return int(data)


def encode_integer(value: Any) -> bytes:
    """Encode a whole number as decimal text.

    >>> encode_integer(7)
    b'7'
    """
    if isinstance(value, bool):
        raise TypeError("True and False are not integers here")
    return b"%d" % operator.index(value)


integer = Codec(decode_integer, encode_integer, "an int, or an integer of NumPy or torch without dimensions")
