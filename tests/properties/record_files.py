"""Record shards, written by the libraries of their formats."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import cbor2
import msgpack
import zstandard

#: How each format encodes a record, by the extension of its files.
ENCODERS: dict[str, Callable[[Any], bytes]] = {
    "jsonl": lambda value: json.dumps(value).encode() + b"\n",
    "msgpack": msgpack.packb,
    "cbors": cbor2.dumps,
}
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.compress}


def write_records(path: str, records: Iterable[Any], ending: str = "") -> str:
    """Write records in the format of an extension, by default that of the file, and return the path."""
    data = b"".join(map(ENCODERS[ending or path.split(".")[1]], records))
    Path(path).write_bytes(COMPRESSORS.get(Path(path).suffix, bytes)(data))
    return path
