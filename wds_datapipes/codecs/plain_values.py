"""Codecs of plain values: integers, text, JSON, msgpack, CBOR and pickles."""

from __future__ import annotations

import json
import operator
import pickle
from codecs import BOM_UTF8
from functools import cache, partial
from types import ModuleType
from typing import Any, cast

from wds_datapipes.codecs import Codec
from wds_datapipes.extras import require

#: NaN and infinities are not valid JSON: Python reads them, but other programs do not.
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
#: The newest pickle protocol that all supported Python versions read, fixed for reproducible bytes.
PROTOCOL = 5


def decode_integer(data: bytes) -> int:
    """Decode decimal text, which may begin with a byte order mark."""
    try:
        return int(data)
    except ValueError:
        if data.startswith(BOM_UTF8):
            return int(data[len(BOM_UTF8) :])
        raise


def encode_integer(value: Any) -> bytes:
    """Encode a whole number as decimal text."""
    if isinstance(value, bool):
        raise TypeError("True and False are not integers here")
    return b"%d" % operator.index(value)


def encode_text(value: Any) -> bytes:
    """Encode ``str`` to UTF-8 unchanged."""
    if not isinstance(value, str):
        raise TypeError("it is not text")
    return value.encode("utf-8")


def encode_json(value: Any) -> bytes:
    """Encode as JSON in UTF-8. A str becomes a JSON string; pass text that is already JSON as bytes.

    >>> encode_json({"boxes": [(0, 1, 2, 3)]}), encode_json("a"), encode_json(None)
    (b'{"boxes": [[0, 1, 2, 3]]}', b'"a"', b'null')
    """
    written = ENCODER.encode(value)
    try:
        return written.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate, which JSON can only escape
        return json.dumps(value, allow_nan=False).encode("ascii")


def decode_msgpack(data: bytes) -> Any:
    """Decode a msgpack value; map keys may have any type."""
    return load_msgpack().unpackb(data, strict_map_key=False)


def encode_msgpack(value: Any) -> bytes:
    """Encode a msgpack value; tuples become lists."""
    return cast(bytes, load_msgpack().packb(value))


def decode_cbor(data: bytes) -> Any:
    """Decode a CBOR value."""
    return load_cbor().loads(data)


def encode_cbor(value: Any) -> bytes:
    """Encode a CBOR value; tuples become lists."""
    return cast(bytes, load_cbor().dumps(value))


@cache
def load_msgpack() -> ModuleType:
    """Import msgpack, at the first field that needs it."""
    return require("msgpack", extra="msgpack", purpose="decode and encode msgpack fields")


@cache
def load_cbor() -> ModuleType:
    """Import cbor2, at the first field that needs it."""
    return require("cbor2", extra="cbor", purpose="decode and encode cbor fields")


#: Decimal text, which may be surrounded by whitespace, after an optional byte order mark.
integer = Codec(decode_integer, encode_integer, "an int, or an integer of NumPy or torch without dimensions")
#: UTF-8; newlines, whitespace and a byte order mark are kept.
text = Codec(bytes.decode, encode_text, "a str")
#: Decoded from UTF-8, UTF-16 or UTF-32, with or without a byte order mark.
jsons = Codec(
    json.loads, encode_json, "None, bool, int, float (without NaN and infinities), str, and lists and dicts of these"
)
msgpack = Codec(
    decode_msgpack, encode_msgpack, "None, bool, int of 64 bits, float, str, bytes, and lists and dicts of these"
)
cbor = Codec(decode_cbor, encode_cbor, "None, bool, int, float, str, bytes, dates, and lists and dicts of these")
#: Unpickling can run arbitrary code: only used with ``allow_pickle=True``, see `UNSAFE`.
pickled = Codec(pickle.loads, partial(pickle.dumps, protocol=PROTOCOL), "any picklable value")
