"""Shards that are written to streams which somebody else has opened, and will close."""

from __future__ import annotations

import sys
from typing import Any

from wds_datapipes.errors import ShardNotWritten

__all__ = ["StreamTarget", "standard_output"]


class StreamTarget:
    """Writes to a stream. What was written stays there, but an archive that was broken off has no end marker."""

    def __init__(self, stream: Any, url: str = "") -> None:
        if not callable(getattr(stream, "write", None)):
            raise TypeError(f"a shard is written to a path, a URL or a binary stream, not to {stream!r}")
        self.url = url
        self._stream = stream

    def write(self, data: bytes, /) -> None:
        """Write all of the bytes, which a stream without a buffer may take in parts."""
        taken = self._stream.write(data)
        while isinstance(taken, int) and taken < len(data):
            data = data[taken:]
            taken = self._stream.write(data)

    def finish(self) -> None:
        """Hand on what the stream has buffered."""
        if callable(flush := getattr(self._stream, "flush", None)):
            flush()

    def discard(self) -> None:
        """Leave the stream as it is."""


def standard_output(url: str) -> StreamTarget:
    """Return the target of the URL ``-``."""
    stream = getattr(sys.stdout, "buffer", None)
    if stream is None:
        raise ShardNotWritten(f"The shard {url!r} is standard output, and this process has none that takes bytes")
    return StreamTarget(stream, url)
