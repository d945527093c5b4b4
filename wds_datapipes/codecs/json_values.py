"""JSON codec: ``json jsn``."""

from __future__ import annotations

import json
from typing import Any

from wds_datapipes.codecs import Codec

__all__ = ["decode_json", "encode_json", "jsons"]

#: NaN and infinities are not valid JSON: Python reads them, but other programs do not.
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def decode_json(data: bytes) -> Any:
    """Decode JSON in UTF-8, UTF-16 or UTF-32, with or without a byte order mark; ``null`` is ``None``.

    >>> decode_json(b'{"boxes": [[0, 1, 2, 3]]}')
    {'boxes': [[0, 1, 2, 3]]}
    """
    return json.loads(data)


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


jsons = Codec(
    decode_json,
    encode_json,
    "None, bool, int, float (without NaN and infinities), str, and lists and dicts of these",
)
