"""Origins: where the version of a shard was recorded, because another copy of it has other times and ETags."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from wds_datapipes.io.openers import redact
from wds_datapipes.io.urls import local_path

#: The number of hexadecimal digits of an origin: 128 bits.
DIGITS = 32


def origin_of(url: str, storage_options: Mapping[str, Any] | None = None) -> str:
    """Return a digest of the location of a file: its host and path, or its URL without credentials, and its store.

    >>> origin_of("s3://bucket/a.tar") == origin_of("s3://copy/a.tar")
    False

    Args:
        url: the file.
        storage_options: the options of its store.
    """
    path = local_path(url)
    if path is not None:
        location = [_host(), str(Path(path).absolute())]
    else:
        location = [redact(url), *sorted(_endpoints(storage_options or {}))]
    return hashlib.sha256("\0".join(location).encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]


@cache
def _host() -> str:
    return platform.node()


def _endpoints(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the endpoints in the options of a store."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _endpoints(value)
        elif "endpoint" in str(name) and isinstance(value, str):
            yield redact(value)
