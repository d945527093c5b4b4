"""Resuming stream: reads a remote shard sequentially and reconnects when the connection breaks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from wds_datapipes.errors import ChangedShardError, ShardError, ShardReadError
from wds_datapipes.io.daemon_threads import TooSlowError
from wds_datapipes.io.remote.retry import concerns_all, was_replaced
from wds_datapipes.io.remote.source import STALLED_BYTES_PER_S, OpenedSource, RawReader
from wds_datapipes.io.streams import RawStream
from wds_datapipes.redaction.storage_options import raise_alone

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from wds_datapipes.io.remote.filesystem import RemotePath


#: The maximum number of bytes skipped at once when a store sends a file again.
SKIP_BYTES = 256 << 10


class ResumingStream(RawStream):
    """Reads a remote file sequentially and reconnects after transient errors; all bytes are from the same version.

    Reading resumes at the next byte if the store identifies the version of the file by a strong ETag. Otherwise, the
    file is read again from its start, and must begin with the same bytes.

    Args:
        remote: the path of the file, with the retry policy.
        open_at: opens the file at an offset, or at its beginning, any number of times; it may raise any error.
        start: the offset of the first byte in the file.

    Attributes:
        start: the same.
    """

    def __init__(self, remote: RemotePath, open_at: Callable[[int], OpenedSource], start: int = 0) -> None:
        self._remote, self._open_at, self.start = remote, open_at, start
        self._name, self._retry = remote.name, remote.retry
        self._position = 0
        self._file: RawReader | None = None
        #: Of the parts in which the store sends the file: the bytes, and the time spent waiting for them.
        self._part_bytes, self._part_s = 0, 0.0
        self._is_abandoned = False

    def open(self) -> ResumingStream:
        """Open the file and return the stream.

        Raises:
            ShardOpenError: it cannot be opened.
        """
        since = self._retry.clock()
        with self._remote.replace_errors(
            lambda error: self._remote.open_error(error, f" at byte {self.start}" if self.start else "")
        ):
            while self._file is None:
                try:
                    self._begin(self._open_at(0))
                except Exception as error:  # noqa: PERF203  the loop is for retries
                    if not self._retry.wait(error, f"{self._name} cannot be opened", since):
                        raise
        return self

    def readinto(self, buffer: Buffer, /) -> int:
        """Read the available bytes, at most ``len(buffer)``; 0 at the end."""
        view = memoryview(buffer).cast("B")
        self._heard_at, is_next_part = self._retry.clock(), False
        while True:
            try:
                file = self._file or self._reopen()
                count = file.readinto(view)
                if not count and self._opened_at < self._position == self._stop and self._position != self.size:
                    self._release()  # the store sends the file in parts
                    is_next_part = True
                    continue
                if not count and self.size is not None and self._position < self.size:
                    raise EOFError(f"received {self._position} of {self.size} bytes")
                if self.size is not None and self._position + count > self.size:
                    raise ShardReadError(
                        f"Reading {self._name} failed {self._place}: the store sends more than the "
                        f"{self.size} bytes that it reported as the size"
                    )
                break
            except ShardError:
                raise
            except Exception as error:  # noqa: BLE001  every network library has its own errors
                self._release()
                self._wait_or_raise(error)
        self._position += count
        if self._digest is not None:
            self._digest.update(view[:count])
        if is_next_part:
            self._check_rate(count)
        return count

    def _check_rate(self, count: int) -> None:
        """Let a store that sends tiny parts count as a stalled connection does, although each part is a new request."""
        self._part_bytes += count
        self._part_s += self._retry.clock() - self._heard_at
        if self._part_s < self._remote.timeouts.stalled_s:
            return
        found, found_s, self._part_bytes, self._part_s = self._part_bytes, self._part_s, 0, 0.0
        if found < STALLED_BYTES_PER_S * found_s:
            self._release()
            self._wait_or_raise(TooSlowError(f"received only {found} bytes in {found_s:.1f} s, in parts"))

    def abandon(self) -> None:
        """Abort a read in another thread, which may still wait for a response until its library times out."""
        self._is_abandoned = True
        if (file := self._file) is not None:
            with suppress(Exception):
                file.abort()

    def _begin(self, opened: OpenedSource) -> None:
        """Start with a version of the file."""
        self._file, self._opened_at, self._stop = opened.file, 0, opened.stop
        self.size, self._version, self.etag = opened.size, opened.version, opened.etag
        self._digest = None if opened.is_strong else hashlib.blake2b()

    def _reopen(self) -> RawReader:
        """Return the file, opened at the next byte."""
        opened = self._open_at(self._position if self._digest is None else 0)
        if not self._position:  # nothing was read yet, so any version is acceptable
            self._begin(opened)
            return opened.file
        self._file, self._opened_at, self._stop = opened.file, self._position, opened.stop
        self.size = opened.size if self.size is None else self.size
        if opened.version != self._version or opened.size not in (None, self.size):
            raise self._changed()
        if opened.start > self._position:
            raise ShardReadError(
                f"Reading {self._name} failed {self._place}: the store sent the bytes from "
                f"{opened.start} on instead of the next ones"
            )
        self._skip_bytes(opened.file, self._position - opened.start)
        return opened.file

    def _skip_bytes(self, file: RawReader, count: int) -> None:
        """Skip bytes already read and compare them unless the version proves that they are the same."""
        scratch = memoryview(bytearray(min(count, SKIP_BYTES)))
        digest = hashlib.blake2b()
        while count > 0:
            skipped = file.readinto(scratch[:count])
            if not skipped:
                raise EOFError("the file ended before the next byte")
            if self._digest is not None:
                digest.update(scratch[:skipped])
            count -= skipped
            self._heard_at = self._retry.clock()
        if self._digest is not None and digest.digest() != self._digest.digest():
            raise self._changed()

    def _wait_or_raise(self, error: Exception) -> None:
        """Wait before the next attempt, or raise the error if there is none."""
        if was_replaced(error):
            raise_alone(self._changed())
        # The end of an abandoned stream is no failure of the store.
        if not self._is_abandoned and self._retry.wait(
            error, f"Reading {self._name} was interrupted {self._place}", self._heard_at
        ):
            return
        failed = ShardReadError(
            f"Reading {self._name} failed {self._place}: ", self._remote.reason(error), self._retry.attempts_text()
        )
        failed.concerns_all = concerns_all(error)
        try:
            raise_alone(failed)
        finally:
            del failed  # breaks the reference cycle between the error and this frame

    @property
    def offset(self) -> int:
        """The offset of the next byte in the file."""
        return self.start + self._position

    @property
    def _place(self) -> str:
        """Where the next byte is in the file."""
        return f"at byte {self.offset}" if self.start else f"after {self._position} bytes"

    def _changed(self) -> ChangedShardError:
        return ChangedShardError(
            f"{self._name} was replaced while it was read: {self._place} its ETag, date, size or "
            f"content changed. The samples so far are from the previous version. Read the shard again from its start"
        )

    def _release(self) -> None:
        """Close the remote file."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(Exception):  # the connection may be broken
                file.close()


def fill(file: RawReader | ResumingStream, view: memoryview) -> int:
    """Read into a buffer until it is full or the file ends; return the number of bytes."""
    filled = 0
    while filled < len(view) and (count := file.readinto(view[filled:])):
        filled += count
    return filled
