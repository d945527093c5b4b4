"""JSON codec: ``json jsn``."""

from __future__ import annotations

import json
from typing import Any

from wds_datapipes.codecs.codec import Codec

__all__ = ["decode_json", "encode_json", "jsons"]

#: NaN and the infinities are no JSON: Python's reader takes them, and those of other programs do not.
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def decode_json(data: bytes) -> Any:
    """Decode JSON in UTF-8, UTF-16 or UTF-32, with or without a byte order mark; ``null`` is ``None``.

    >>> decode_json(b'{"boxes": [[0, 1, 2, 3]]}')
    {'boxes': [[0, 1, 2, 3]]}
    """
    return json.loads(data)


def encode_json(value: Any) -> bytes:
    """Encode as JSON in UTF-8. A str becomes a JSON string too: text that is JSON already has to be given as bytes.

    >>> encode_json({"boxes": [(0, 1, 2, 3)]}), encode_json("a"), encode_json(None)
    (b'{"boxes": [[0, 1, 2, 3]]}', b'"a"', b'null')
    """
    written = ENCODER.encode(value)
    try:
        return written.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON has only as an escape
        return json.dumps(value, allow_nan=False).encode("ascii")


jsons = Codec(
    decode_json,
    encode_json,
    "None, bool, int, float (without NaN and infinities), str, and lists and dicts of these",
)
