"""Resuming stream: reads a remote shard sequentially and reconnects when the connection breaks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from wds_datapipes.errors import ChangedShardError, ShardError, ShardReadError
from wds_datapipes.io.daemon_threads import TooSlowError
from wds_datapipes.io.file_systems import ETAGS
from wds_datapipes.io.remote.request_steps import Steps, run_steps
from wds_datapipes.io.remote.retry import concerns_all, was_replaced
from wds_datapipes.io.streams import RawStream
from wds_datapipes.redaction.storage_options import raise_alone

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from wds_datapipes.io.remote.filesystem import RemotePath


#: The maximum number of bytes skipped at once when a store sends a file again.
SKIP_BYTES = 256 << 10
#: A connection that delivers fewer bytes per second than this has stalled; a new one is opened in its place.
STALLED_BYTES_PER_S = 1 << 10


#: The form of a strong ETag; ``w/"1"``, ``1`` and ``""`` guarantee nothing.
STRONG_ETAG = re.compile(r'"[\x21\x23-\x7e\x80-\xff]+"')


class RawReader(Protocol):
    """An open remote file that reads into a buffer without an intermediate copy."""

    def read_steps(self, view: memoryview) -> Steps[int]:
        """Read the available bytes, at most ``len(view)``; 0 at the end."""

    def abort(self) -> None:
        """Abort a read in another thread, which then closes the file."""

    def close(self) -> object:
        """Close the file."""


class MonitoredFile:
    """A remote file that counts its bytes and drops a stalled connection.

    Only the time spent waiting for a store counts, not the time between requests.

    Args:
        file: the file.
        remote: its path, with the counters and the time after which a slow connection has stalled.
    """

    def __init__(self, file: RawReader, remote: RemotePath) -> None:
        self._file, self._remote = file, remote
        self._bytes, self._waited_s = 0, 0.0

    def read_steps(self, view: memoryview) -> Steps[int]:
        """Read the available bytes, at most ``len(view)``; 0 at the end.

        Raises:
            TooSlowError: the connection has stalled.
        """
        clock = self._remote.retry.clock
        begin = clock()
        count = yield from self._file.read_steps(view)
        waited_s = clock() - begin
        self._remote.counters.count(f"fetched_bytes/{self._remote.store}", count)
        self._remote.counters.count(f"fetching_s/{self._remote.store}", waited_s)
        self._bytes += count
        self._waited_s += waited_s
        if self._waited_s >= self._remote.timeouts.stalled_s:
            found, found_s = self._bytes, self._waited_s
            self._bytes, self._waited_s = 0, 0.0
            if found < STALLED_BYTES_PER_S * found_s and count:  # waiting for the end of the file does not count
                raise TooSlowError(f"received only {found} bytes in {found_s:.1f} s")
        return count

    def abort(self) -> None:
        """End a read in another thread."""
        self._file.abort()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class OpenedSource(NamedTuple):
    """A remote file that was opened at an offset."""

    file: RawReader
    #: The offset of its first byte; less than the requested offset if the store sends the whole file again.
    start: int
    #: The size of the whole file, if the store reports it.
    size: int | None
    #: Identifies this version of the file; empty if the store reports neither ETag nor date.
    version: tuple[str, ...]
    #: The ETag, as in the index of a shard.
    etag: str | None = None
    #: Whether two files with this version have the same bytes, unlike with a weak ETag or a date.
    is_strong: bool = False
    #: The offset at which the response ends, if the store sends only part of the requested range.
    stop: int | None = None
    #: Whether the store can open the file at any offset.
    can_seek: bool = False


class ResumingStream(RawStream):
    """Reads a remote file sequentially and reconnects after transient errors; all bytes are from the same version.

    Reading resumes at the next byte if the store identifies the version of the file by a strong ETag. Otherwise, the
    file is read again from its start, and must begin with the same bytes.

    Args:
        remote: the path of the file, with the retry policy.
        open_at: opens the file at an offset, or at its beginning, any number of times; it may raise any error.
        where: the place in the file, for the error if it cannot be opened.
    """

    def __init__(self, remote: RemotePath, open_at: Callable[[int], Steps[OpenedSource]], where: str = "") -> None:
        self._remote, self._open_at, self._where = remote, open_at, where
        self._name, self._retry = remote.name, remote.retry
        self._position = 0
        self._file: RawReader | None = None
        #: Of the parts in which the store sends the file: the bytes, and the time spent waiting for them.
        self._part_bytes, self._part_s = 0, 0.0

    def open_steps(self) -> Steps[ResumingStream]:
        """Open the file and return the stream.

        Raises:
            ShardOpenError: it cannot be opened.
        """
        since = self._retry.clock()
        with self._remote.replace_errors(lambda error: self._remote.open_error(error, self._where)):
            while self._file is None:
                try:
                    self._begin((yield from self._open_at(0)))
                except Exception as error:  # noqa: PERF203  the loop is for retries
                    yield None
                    if not self._retry.wait(error, f"{self._name} cannot be opened", since):
                        raise
        return self

    def readinto(self, buffer: Buffer, /) -> int:
        """Read the available bytes, at most ``len(buffer)``; 0 at the end."""
        return run_steps(self.read_steps(memoryview(buffer).cast("B")))

    def read_steps(self, view: memoryview) -> Steps[int]:
        """Read the available bytes, at most ``len(view)``; 0 at the end."""
        self._heard_at, is_next_part = self._retry.clock(), False
        while True:
            try:
                file = self._file or (yield from self._reopen())
                count = yield from file.read_steps(view)
                if not count and self._opened_at < self._position == self._stop and self._position != self.size:
                    self._release()  # the store sends the file in parts
                    is_next_part = True
                    continue
                if not count and self.size is not None and self._position < self.size:
                    raise EOFError(f"received {self._position} of {self.size} bytes")
                if self.size is not None and self._position + count > self.size:
                    raise ShardReadError(
                        f"Reading {self._name} failed after {self._position} bytes: the store sends more than the "
                        f"{self.size} bytes that it reported as the size"
                    )
                break
            except ShardError:
                raise
            except Exception as error:  # noqa: BLE001  every network library has its own errors
                self._release()
                yield None
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
        if (file := self._file) is not None:
            with suppress(Exception):
                file.abort()

    def _begin(self, opened: OpenedSource) -> None:
        """Start with a version of the file."""
        self._file, self._opened_at, self._stop = opened.file, 0, opened.stop
        self.size, self._version, self.etag = opened.size, opened.version, opened.etag
        self._digest = None if opened.is_strong else hashlib.blake2b()

    def _reopen(self) -> Steps[RawReader]:
        """Return the file, opened at the next byte."""
        opened = yield from self._open_at(self._position if self._digest is None else 0)
        if not self._position:  # nothing was read yet, so any version is acceptable
            self._begin(opened)
            return opened.file
        self._file, self._opened_at, self._stop = opened.file, self._position, opened.stop
        self.size = opened.size if self.size is None else self.size
        if opened.version != self._version or opened.size not in (None, self.size):
            raise self._changed()
        if opened.start > self._position:
            raise ShardReadError(
                f"Reading {self._name} failed after {self._position} bytes: the store sent the bytes from "
                f"{opened.start} on instead of the next ones"
            )
        yield from self._skip_bytes(opened.file, self._position - opened.start)
        return opened.file

    def _skip_bytes(self, file: RawReader, count: int) -> Steps[None]:
        """Skip bytes already read and compare them unless the version proves that they are the same."""
        scratch = memoryview(bytearray(min(count, SKIP_BYTES)))
        digest = hashlib.blake2b()
        while count > 0:
            skipped = yield from file.read_steps(scratch[:count])
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
        if self._retry.wait(
            error, f"Reading {self._name} was interrupted after {self._position} bytes", self._heard_at
        ):
            return
        failed = ShardReadError(
            f"Reading {self._name} failed after {self._position} bytes: ",
            self._remote.reason(error),
            self._retry.attempts_text(),
        )
        failed.concerns_all = concerns_all(error)
        try:
            raise_alone(failed)
        finally:
            del failed  # breaks the reference cycle between the error and this frame

    def _changed(self) -> ChangedShardError:
        return ChangedShardError(
            f"{self._name} was replaced while it was read: after {self._position} bytes its ETag, date, size or "
            f"content changed. The samples so far are from the previous version. Read the shard again from its start"
        )

    def _release(self) -> None:
        """Close the remote file."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(Exception):  # the connection may be broken
                file.close()


def fill(file: RawReader | ResumingStream, view: memoryview) -> Steps[int]:
    """Read into a buffer until it is full or the file ends; return the number of bytes."""
    filled = 0
    while filled < len(view) and (count := (yield from file.read_steps(view[filled:]))):
        filled += count
    return filled


def version_of(*facts: Any) -> tuple[str, ...]:
    """Return the facts that identify a version of a file."""
    return tuple(str(fact) for fact in facts if fact is not None)


def etag_of(facts: Mapping[str, Any]) -> str | None:
    """Return the ETag of a file, without quotes, from the metadata that an fsspec file system or a server reports."""
    etag = next((facts[name] for name in ETAGS if facts.get(name)), None)
    return str(etag).strip('"') or None if etag else None


def is_strong_etag(etag: str | None) -> bool:
    """Whether the ETag of a response guarantees that files have the same bytes (RFC 9110, section 8.8)."""
    return etag is not None and STRONG_ETAG.fullmatch(etag) is not None
