"""Remote file: can be opened repeatedly and at any offset; all streams and ranges read the same version."""

from __future__ import annotations

import io
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol, TypeAlias, cast

from wds_datapipes.errors import ChangedShardError, ShardError, ShardOpenError, ShardReadError, plural
from wds_datapipes.io.file_systems import TIMES
from wds_datapipes.io.openers import local_path, open_local, open_parts
from wds_datapipes.io.remote.filesystem import RemotePath
from wds_datapipes.io.remote.fsspec_file import FsspecStore
from wds_datapipes.io.remote.known_stores import known_store
from wds_datapipes.io.remote.resuming_stream import ResumingStream, fill
from wds_datapipes.io.remote.retry import status_of
from wds_datapipes.io.remote.source import SHOWN, OpenedSource, SentRequest, UnexpectedResponseError, etag_of
from wds_datapipes.io.streams import RawStream, move_bytes
from wds_datapipes.io.urls import known_schemes, split_scheme
from wds_datapipes.redaction import redact
from wds_datapipes.redaction.storage_options import raise_alone

if TYPE_CHECKING:
    from typing_extensions import Buffer


Check: TypeAlias = Callable[[int | None, str | None], None]
"""Compares the size and the ETag of a file with the expected ones."""

#: Bytes read from the start of a shard to detect its format: one tar header.
HEAD_BYTES = 512


class Store(Protocol):
    """A file on a store, opened by a request or by the store's library."""

    def open_first(self, count: int) -> OpenedSource:
        """Open the first ``count`` bytes if their version has a strong ETag, otherwise the whole file.

        Raises:
            Exception: any error of the store's library.
        """

    def open(self, start: int, end: int | None = None) -> OpenedSource:
        """Open the file from an offset up to ``end``, or from its beginning if the store only sends whole files.

        Raises:
            Exception: any error of the store's library.
        """

    def send(self, start: int, end: int) -> SentRequest | None:
        """Request a part without waiting for the answer; None if the store's library always waits.

        Raises:
            Exception: any error of the store's library.
        """

    def close(self) -> None:
        """Close the file that is kept open for the next range."""


class RemoteFile:
    """A remote file with random access; it is thread-safe. The first range determines its version.

    Args:
        remote: the path of the file.
        check: raises an error if the file does not have the expected size and ETag, which are None if the store does
            not report them.

    Attributes:
        head: its first bytes, if they were read.
        size: its size, if the store reports it.
        has_parts: whether the store sends parts of it and identifies its version, so that they can be read at once.
        version: identifies the version of the file, as far as the store reports it; None before the first range.
    """

    def __init__(self, remote: RemotePath, check: Check | None = None) -> None:
        self._remote, self._check = remote, check
        self._store = _store_of(remote, keep_open=True)
        self._lock = threading.Lock()
        self.head = b""
        self.size: int | None = None
        self.has_parts = False
        self.version: tuple[str, ...] | None = None

    @classmethod
    def open(cls, url: str, /, check: Check | None = None, **options: Any) -> RemoteFile | None:
        """Open a file and read its first bytes; return None if it can only be read as a whole.

        Args:
            url: ``scheme://...``.
            check: see `RemoteFile`; with it, no bytes are read yet.
            options: see `RemotePath`.

        Raises:
            ShardOpenError: there is no such file, or access is denied.
        """
        remote = RemotePath(url, **options)
        file = cls(remote, check)
        with remote.replace_errors(remote.open_error):
            return file if check is not None or remote.call(file._probe) else None

    def begin(self, count: int) -> ResumingStream:
        """Return a stream of the first ``count`` bytes if the file has parts, otherwise of all its bytes.

        Raises:
            ShardOpenError: it cannot be opened.
        """

        def open_at(offset: int) -> OpenedSource:
            if self.has_parts and self.size is not None:
                return self._open_within(0, min(count, self.size), [], offset)
            opened = self._store.open(offset) if offset else self._store.open_first(count)
            if offset or opened.size is None or opened.stop in (None, opened.size):
                return opened
            self.size, self.version, self.has_parts = opened.size, opened.version, True
            return opened._replace(size=min(count, opened.size))

        return ResumingStream(self._remote.of_part(), open_at).open()

    def send(self, start: int, end: int) -> SentRequest | None:
        """Request the bytes from ``start`` up to ``end`` for `part`, so that several answers arrive at the same time.

        It returns None if that is impossible, also if it fails: then `part` sends the request.
        """
        with suppress(Exception):  # every network library has its own errors
            return self._store.send(start, end)
        return None

    def part(self, start: int, end: int, sent: SentRequest | None = None) -> ResumingStream:
        """Return a stream of the bytes from ``start`` up to ``end``, or to the end of the file if that is -1.

        Args:
            start: the offset of the first byte.
            end: the offset after the last byte.
            sent: the request for it, if it was sent.

        Raises:
            ChangedShardError: the file has changed since it was opened or ends before ``start``.
            ShardOpenError: it cannot be opened.
        """
        stop, requests = self.size if end < 0 else end, [] if sent is None else [sent]
        return ResumingStream(self._remote.of_part(), partial(self._open_within, start, stop, requests), start).open()

    def _open_within(self, start: int, stop: int | None, sent: list[SentRequest], offset: int) -> OpenedSource:
        """Open a part at an offset in it, or receive the answer to the request that was sent."""
        opened = self._open_at(start + offset, stop, sent.pop() if sent else None)
        # If the store does not report the size of the file, the range may be shorter.
        size = None if stop is None or opened.size is None else stop - start
        return opened._replace(start=offset, size=size, stop=None if opened.stop is None else opened.stop - start)

    def _open_at(self, start: int, end: int | None, sent: SentRequest | None = None) -> OpenedSource:
        """Open the version of the file that was opened first, at an offset.

        Raises:
            ChangedShardError: it has been replaced since then or ends before ``start``.
            Exception: any error of the store's library.
        """
        if end is not None and start >= end:
            raise self._shorter_error(start)
        begin = time.perf_counter() if sent is None else sent.since
        try:
            opened = self._store.open(start, end) if sent is None else sent.open()
            known_store(self._remote.store).note_answer(time.perf_counter() - begin)
            with ExitStack() as stack:
                stack.callback(opened.file.close)
                self._compare(opened, start, end)
                stack.pop_all()
        except UnexpectedResponseError as error:
            raise_alone(self._unexpected_error(start, str(error)))
        except Exception as error:
            if status_of(error) == 416:
                raise_alone(self._shorter_error(start))
            raise
        return opened

    def _compare(self, opened: OpenedSource, start: int, end: int | None) -> None:
        """Compare a range with the version of the file, which the first range determines."""
        with self._lock:
            if self.version is None:
                if opened.start != start or not opened.can_seek:
                    raise UnexpectedResponseError("the store does not send ranges of it")
                if self._check is not None:
                    self._check(opened.size, opened.etag)
                self.size, self.version = opened.size, opened.version
                self.has_parts = opened.is_strong and None not in (opened.stop, opened.size)
        if opened.start != start:
            raise UnexpectedResponseError(f"the store sent a different range, which begins at byte {opened.start}")
        if not opened.can_seek and end not in (None, opened.size):
            raise UnexpectedResponseError("the store sent the whole file instead of a range")
        if (opened.size, opened.version) != (self.size, self.version):
            found, wanted = _version_text(opened.size, opened.version), _version_text(self.size, self.version)
            raise UnexpectedResponseError(f"its ETag, date or size differs: {found} instead of {wanted}")

    def close(self) -> None:
        """Close the file, but not its streams."""
        self._store.close()

    def _probe(self) -> bool:
        """Read the first bytes; return whether the store sends ranges of the file."""
        try:
            opened = self._open_at(0, HEAD_BYTES)
        except (ShardOpenError, ChangedShardError):  # it can only be read as a whole, or is empty
            return False
        with closing(opened.file):
            head = bytearray(HEAD_BYTES)
            self.head = bytes(head[: fill(opened.file, memoryview(head))])
        return True

    def _unexpected_error(self, start: int, found: str) -> ShardError:
        if self.version is None:
            return ShardOpenError(f"{self._remote.name} can only be read sequentially: {found}")
        return ChangedShardError(
            f"{self._remote.name} was replaced while it was read: at byte {start}, {found}. Restore the previous "
            "version, and then resume from the state or read the shard again"
        )

    def _shorter_error(self, begin: int) -> ChangedShardError:
        return ChangedShardError(
            f"{self._remote.name} ends before byte {begin}, where reading should continue. A state can only be loaded "
            "with the shards it was saved with, and an index belongs to the shard it was built from"
        )


def _version_text(size: int | None, version: tuple[str, ...]) -> str:
    """Return the version of a file for an error message."""
    facts = [fact[:SHOWN] for fact in version] or ["no ETag or date"]
    return ", ".join([*facts, "an unknown size" if size is None else plural(size, "byte")])


def open_remote(url: str, /, **options: Any) -> BinaryIO:
    """Open a remote file for sequential reading.

    Args:
        url: ``scheme://...``.
        options: see `RemotePath`.

    Raises:
        ShardOpenError: the file cannot be opened.
    """
    remote = RemotePath(url, **options)
    return cast(BinaryIO, ResumingStream(remote, _store_of(remote).open).open())


def _store_of(remote: RemotePath, *, keep_open: bool = False) -> Store:
    from wds_datapipes.io.remote.http import HttpStore  # imports urllib3
    from wds_datapipes.io.remote.signing import signer_of  # the same

    if remote.file_system.is_web:
        return HttpStore(remote)
    signer = signer_of(remote)
    return FsspecStore(remote, keep_open=keep_open) if signer is None else HttpStore(remote, signer)


#: The number of bytes of the first read after a seek, which doubles with each sequential read, and its maximum.
FIRST_BYTES, MAX_BYTES = 16 << 10, 8 << 20
#: A forward seek over fewer bytes than this reads these bytes instead of sending a new request.
JUMP_FROM = 256 << 10


class FileFacts(NamedTuple):
    """The metadata that a file system reports about a file; ``None`` if unknown. With an ETag, no time is needed."""

    bytes: int | None = None
    mtime_ns: int | None = None
    etag: str | None = None


def file_facts(url: str, **options: Any) -> FileFacts:
    """Return the size of a file and its modification time or ETag.

    Args:
        url: the file.
        options: see `RemotePath`.

    Raises:
        ShardOpenError: there is no such file, or access is denied.
    """
    path = local_path(url)
    if path is not None:
        try:
            status = Path(path).stat()
        except (OSError, ValueError):
            open_local(path, name=url).close()  # raises a ShardOpenError with the reason
            raise
        return FileFacts(status.st_size, status.st_mtime_ns) if S_ISREG(status.st_mode) else FileFacts()
    if split_scheme(url)[0] in known_schemes():
        return FileFacts()
    remote = RemotePath(url, **options)
    with remote.replace_errors(remote.open_error):
        info = remote.info()
    etag = etag_of(info)
    return FileFacts(info.get("size"), _modified_ns(info) if etag is None else None, etag)


def _modified_ns(info: Mapping[str, Any]) -> int | None:
    """Return the time of the last modification in nanoseconds since 1970, if a file system reports one."""
    found = next((info[name] for name in TIMES if info.get(name) is not None), None)
    seconds = found.timestamp() if isinstance(found, datetime) else found
    return int(seconds * 10**9) if isinstance(seconds, int | float) and math.isfinite(seconds) else None


def open_ranges(url: str, *, storage_options: Mapping[str, Any] | None = None) -> BinaryIO | None:
    """Open a file for random access, or return ``None`` if it can only be read as a whole.

    Reading a remote file fetches the requested bytes; sequential reads also fetch some of the following ones.

    Raises:
        ShardOpenError: there is no such file, or access is denied.
    """
    path = local_path(url)
    if path is not None:
        # Not with Path, which raises an error for a long name here rather than where the file is opened.
        return open_local(path, name=url) if os.path.isfile(path) or not os.path.exists(path) else None  # noqa: PTH110, PTH113
    file = open_parts(url, storage_options=storage_options)
    if file is None:
        return None
    size = file_facts(url, storage_options=storage_options).bytes if file.size is None else file.size
    return None if size is None else cast(BinaryIO, RangeReader(file, url, size))


class RangeReader(RawStream):
    """A seekable remote file: small range requests after a seek, larger ones in sequential reads."""

    def __init__(self, file: RemoteFile, url: str, size: int) -> None:
        self._file, self._url, self._size = file, url, size
        self._position = 0
        #: The most recently fetched bytes, and their offset.
        self._window, self._begin = memoryview(b""), 0
        self._next_bytes = FIRST_BYTES

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Set the position; the next read sends the request."""
        self._position = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence])
        return self._position

    def readinto(self, buffer: Buffer, /) -> int:
        """Read up to ``len(buffer)`` bytes; return 0 at the end."""
        wanted = memoryview(buffer).nbytes
        if not wanted or self._position >= self._size:
            return 0
        if not self._begin <= self._position < self._begin + len(self._window):
            self._fetch(wanted)
        count, _ = move_bytes(self._window[self._position - self._begin :], buffer)
        self._position += count
        return count

    def _release(self) -> None:
        self._file.close()

    def _fetch(self, count: int) -> None:
        window_end = self._begin + len(self._window)
        is_sequential = bool(self._window) and 0 <= self._position - window_end < JUMP_FROM
        begin = window_end if is_sequential else self._position
        self._next_bytes = min(self._next_bytes * 2, MAX_BYTES) if is_sequential else FIRST_BYTES
        end = min(max(begin + self._next_bytes, self._position + count), self._size)
        data = memoryview(bytearray(end - begin))
        with self._file.part(begin, end) as stream:
            count = fill(stream, data)
        if count != end - begin:
            raise ShardReadError(
                f"The store sent {count} of the requested bytes {begin} to {end} of {redact(self._url)}. The file may "
                "have changed while it was read"
            )
        self._window, self._begin = data, begin
