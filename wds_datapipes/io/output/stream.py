"""Stream sink: writes to an open stream, such as standard output."""

from __future__ import annotations

import contextlib
from typing import Any


class StreamSink:
    """Writes to an open stream. The bytes of a discarded archive remain in the stream, without an end marker.

    Args:
        stream: an object with a method ``write`` that accepts bytes.
        url: its name in errors.
        close: close the stream at the end; otherwise, its owner closes it.
    """

    def __init__(self, stream: Any, url: str = "", *, close: bool = False) -> None:
        if not callable(getattr(stream, "write", None)):
            raise TypeError(f"a shard is written to a path, a URL or a binary stream, not to {stream!r}")
        self.url = url
        self._stream = stream
        self._close = close
        self._written = 0

    def write(self, *chunks: bytes) -> None:
        """Write all chunks; an unbuffered stream may need several writes for one."""
        for chunk in filter(None, chunks):
            written = self._stream.write(chunk)
            while isinstance(written, int) and written < len(chunk):
                self._written += written
                chunk = chunk[written:]
                written = self._stream.write(chunk)
            self._written += len(chunk)

    def finish(self) -> None:
        """Flush the stream."""
        if callable(flush := getattr(self._stream, "flush", None)):
            flush()
        if self._close:
            self._stream.close()

    def discard(self) -> None:
        """Close the stream if the sink owns it; its content remains."""
        if self._close:
            with contextlib.suppress(Exception):
                self._stream.close()
