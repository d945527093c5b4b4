"""Fields that are binary records: msgpack (``mp msgpack msg``) and ``cbor``."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

from wds_datapipes.core.optional import require

__all__ = ["decode_cbor", "decode_msgpack"]


def decode_msgpack(data: bytes) -> Any:
    """Decode one msgpack value; the keys of a map may be of any type, not only text."""
    return _msgpack().unpackb(data, strict_map_key=False)


def decode_cbor(data: bytes) -> Any:
    """Decode one CBOR value."""
    return _cbor().loads(data)


@cache
def _msgpack() -> ModuleType:
    return require("msgpack", extra="msgpack", purpose="decode msgpack fields")


@cache
def _cbor() -> ModuleType:
    return require("cbor2", extra="cbor", purpose="decode cbor fields")
