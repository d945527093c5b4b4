"""A read buffer over a stream, from which small members are sliced."""

from __future__ import annotations

import io
from typing import BinaryIO

from wds_datapipes.errors import ShardError, ShardReadError

#: The read-ahead of local archives: how many bytes are read at once where members are small. Reading by index, which
#: needs no header to know what follows, reads up to four times as many.
READ_AHEAD_BYTES = 64 << 10
#: The size of the pieces in which unwanted bytes are skipped; more bytes are skipped by seeking.
PIECE = 128 * 1024


class ReadBuffer:
    """A window over a forward stream; the tar reader slices small members out of it without any call."""

    __slots__ = ("archive", "at", "position", "stream", "window")

    def __init__(self, stream: BinaryIO, archive: str, position: int = 0) -> None:
        self.stream = stream
        #: The name of the archive in errors.
        self.archive = archive
        #: The last bytes read.
        self.window = b""
        #: The number of bytes of the window that are consumed.
        self.at = 0
        #: The offset of the window's end in the archive.
        self.position = position

    @property
    def offset(self) -> int:
        """The offset of the next byte in the archive."""
        return self.position - len(self.window) + self.at

    @property
    def left(self) -> int:
        """The number of unconsumed bytes in the window."""
        return len(self.window) - self.at

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes, or fewer at the end of the stream."""
        at, window = self.at, self.window
        end = at + count
        if end <= len(window):
            self.at = end
            return window[at:end]
        self.window, self.at = b"", 0
        return window[at:] + self._read(end - len(window))

    def fill(self, count: int) -> None:
        """Move the unconsumed bytes to the start of the window, and fill it up to ``count`` bytes."""
        rest = self.window[self.at :]
        self.window, self.at = b"", 0
        self.window = rest + self._read(max(count - len(rest), 0))

    def fill_until_error(self, count: int) -> ShardError | None:
        """Like `fill`, but keep the bytes read before an error, and return the error."""
        parts = [self.window[self.at :]]
        left = count - len(parts[0])
        # Unlike read(), read1() of a buffered stream loses nothing when it fails.
        read = getattr(self.stream, "read1", self.stream.read)
        error = None
        try:
            while left > 0 and (piece := read(left)):
                parts.append(piece)
                left -= len(piece)
                self.position += len(piece)
        except ShardError as found:
            error = found
        except OSError as found:
            error = self._failed(found)
            error.__cause__ = found
        self.window, self.at = b"".join(parts), 0
        return error

    def skip(self, count: int, *, least: int, seek_from: int = PIECE) -> bool:
        """Skip up to ``count`` bytes, by seeking if possible; return whether there were at least ``least`` bytes."""
        left = count - (len(self.window) - self.at)
        if left <= 0:
            self.at += count
            return True
        self.window, self.at = b"", 0
        least -= count - left
        if left > seek_from and self.stream.seekable():
            try:
                here = self.stream.tell()
                there = self.stream.seek(0, io.SEEK_END) - here
                self.stream.seek(here + min(left, there))
            except OSError as error:
                raise self._failed(error) from error
            self.position += min(left, there)
            return there >= least
        there = left
        while left and (piece := self._read(min(left, PIECE))):
            left -= len(piece)
        return there - left >= least

    def _read(self, count: int) -> bytes:
        try:
            data = self.stream.read(count)
            while len(data) < count and (more := self.stream.read(count - len(data))):
                data += more  # an unbuffered file may return less than requested
        except ShardError:
            raise
        except OSError as error:
            raise self._failed(error) from error
        self.position += len(data)
        return data

    def _failed(self, error: OSError) -> ShardReadError:
        return ShardReadError(
            f"{self.archive} could not be read to its end: {type(error).__name__}: {error} "
            f"(after {self.position} bytes)"
        )
