"""Codecs of binary records: msgpack (``mp msgpack msg``) and ``cbor``."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any, cast

from wds_datapipes.codecs import Codec
from wds_datapipes.extras import require

__all__ = ["cbor", "decode_cbor", "decode_msgpack", "encode_cbor", "encode_msgpack", "msgpack"]


def decode_msgpack(data: bytes) -> Any:
    """Decode a msgpack value; map keys may have any type."""
    return _msgpack().unpackb(data, strict_map_key=False)


def encode_msgpack(value: Any) -> bytes:
    """Encode a msgpack value; tuples become lists."""
    return cast(bytes, _msgpack().packb(value))


def decode_cbor(data: bytes) -> Any:
    """Decode a CBOR value."""
    return _cbor().loads(data)


def encode_cbor(value: Any) -> bytes:
    """Encode a CBOR value; tuples become lists."""
    return cast(bytes, _cbor().dumps(value))


@cache
def _msgpack() -> ModuleType:
    return require("msgpack", extra="msgpack", purpose="decode and encode msgpack fields")


@cache
def _cbor() -> ModuleType:
    return require("cbor2", extra="cbor", purpose="decode and encode cbor fields")


msgpack = Codec(
    decode_msgpack, encode_msgpack, "None, bool, int of 64 bits, float, str, bytes, and lists and dicts of these"
)
cbor = Codec(decode_cbor, encode_cbor, "None, bool, int, float, str, bytes, dates, and lists and dicts of these")
