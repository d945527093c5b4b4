"""Shards that are written to streams which somebody else has opened."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from wds_datapipes.errors import ShardWriteError

__all__ = ["StreamSink", "standard_output"]


class StreamSink:
    """Writes to a stream. What was written stays there, but an archive that was broken off has no end marker.

    Args:
        stream: what has a method ``write`` that takes bytes.
        url: what it is called.
        close: close the stream at the end, which is left to its owner otherwise.
    """

    def __init__(self, stream: Any, url: str = "", *, close: bool = False) -> None:
        if not callable(getattr(stream, "write", None)):
            raise TypeError(f"a shard is written to a path, a URL or a binary stream, not to {stream!r}")
        self.url = url
        self._stream = stream
        self._close = close

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
        if self._close:
            self._stream.close()

    def discard(self) -> None:
        """Leave in the stream what is there."""
        if self._close:
            with contextlib.suppress(Exception):
                self._stream.close()


def standard_output(url: str) -> StreamSink:
    """Return the target of the URL ``-``."""
    stream = getattr(sys.stdout, "buffer", None)
    if stream is None:
        raise ShardWriteError(f"The shard {url!r} is standard output, and this process has none that takes bytes")
    return StreamSink(stream, url)
