"""Text codec, UTF-8: ``txt text transcript html htm``."""

from __future__ import annotations

from typing import Any

from wds_datapipes.codecs import Codec

__all__ = ["decode_text", "encode_text", "text"]


def decode_text(data: bytes) -> str:
    r"""Decode UTF-8 to ``str``, keeping newlines, whitespace and a byte order mark.

    >>> decode_text(b"a caf\xc3\xa9\n")
    'a café\n'
    """
    return data.decode("utf-8")


def encode_text(value: Any) -> bytes:
    r"""Encode ``str`` to UTF-8 unchanged.

    >>> encode_text("a café\n")
    b'a caf\xc3\xa9\n'
    """
    if not isinstance(value, str):
        raise TypeError("it is not text")
    return value.encode("utf-8")


text = Codec(decode_text, encode_text, "a str")
