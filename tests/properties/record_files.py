"""Record shards, written by the libraries of their formats."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

#: The functions that encode a record, by file extension.
ENCODERS: dict[str, Callable[[Any], bytes]] = {
    "jsonl": lambda value: json.dumps(value).encode() + b"\n",
    # Some tests run without the extras.
    "msgpack": lambda value: import_module("msgpack").packb(value),
    "cbors": lambda value: import_module("cbor2").dumps(value),
}
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": lambda data: import_module("zstandard").compress(data),
}


def write_records(path: str, records: Iterable[Any], ending: str = "") -> str:
    """Write records in the format of an extension, by default that of the file, and return the path."""
    data = b"".join(map(ENCODERS[ending or path.split(".")[1]], records))
    Path(path).write_bytes(COMPRESSORS.get(Path(path).suffix, bytes)(data))
    return path
