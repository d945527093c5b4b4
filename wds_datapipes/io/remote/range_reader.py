"""Seekable reader of remote files by range requests, and the metadata of files."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from wds_datapipes.errors import ShardReadError
from wds_datapipes.io.local import local_path, open_local
from wds_datapipes.io.openers import open_parts
from wds_datapipes.io.remote.filesystem import RemotePath
from wds_datapipes.io.remote.remote_file import RemoteFile
from wds_datapipes.io.remote.resuming_stream import etag_of
from wds_datapipes.io.urls import known_schemes, split_scheme
from wds_datapipes.redaction import redact

if TYPE_CHECKING:
    from typing_extensions import Buffer


#: Bytes of the first read after a seek; doubled with each sequential read.
FIRST_BYTES, MAX_BYTES = 16 << 10, 8 << 20
#: A forward seek over fewer bytes than this reads them instead of sending a new request.
JUMP_FROM = 256 << 10


#: The names by which fsspec's file systems report the time of the last modification.
TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


class FileFacts(NamedTuple):
    """The metadata that a file system reports of a file; ``None`` if unknown. With an ETag, no time is needed."""

    bytes: int | None = None
    mtime_ns: int | None = None
    etag: str | None = None


def file_facts(
    url: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    retries: int | None = None,
) -> FileFacts:
    """Return the size of a file, and its modification time or ETag.

    Args:
        url: the file.
        storage_options: passed to the file system.
        timeout_s: see `split_timeouts`.
        retries: see `split_timeouts`.

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
    remote = RemotePath(url, storage_options, timeout_s, retries)
    try:
        info = remote.info()
    except Exception as error:  # noqa: BLE001  every file system has errors of its own
        remote.raise_open_error(error)
    etag = etag_of(info)
    return FileFacts(info.get("size"), _modified_ns(info) if etag is None else None, etag)


def _modified_ns(info: Mapping[str, Any]) -> int | None:
    """Return the time of the last modification in nanoseconds since 1970, if a file system reports one."""
    found = next((info[name] for name in TIMES if info.get(name) is not None), None)
    seconds = found.timestamp() if isinstance(found, datetime) else found
    return int(seconds * 10**9) if isinstance(seconds, int | float) and math.isfinite(seconds) else None


def open_ranges(url: str, *, storage_options: Mapping[str, Any] | None = None) -> BinaryIO | None:
    """Open a file for random access, or return ``None`` if it can only be read as a whole.

    Reads of a remote file fetch the requested bytes, and a few more in sequential reads.

    Raises:
        ShardOpenError: there is no such file, or access is denied.
    """
    path = local_path(url)
    if path is not None:
        # Not with Path, for which a name that is too long is an error here, and not where the file is opened.
        return open_local(path, name=url) if os.path.isfile(path) or not os.path.exists(path) else None  # noqa: PTH110, PTH113
    file = open_parts(url, storage_options=storage_options)
    if file is None:
        return None
    size = file_facts(url, storage_options=storage_options).bytes if file.size is None else file.size
    return None if size is None else cast(BinaryIO, RangeReader(file, url, size))


class RangeReader(io.RawIOBase):
    """A seekable remote file: small range requests after a seek, larger ones in sequential reads."""

    def __init__(self, file: RemoteFile, url: str, size: int) -> None:
        self._file, self._url, self._size = file, url, size
        self._position = 0
        #: The bytes that were fetched last, and their offset.
        self._window, self._begin = memoryview(b""), 0
        self._next_bytes = FIRST_BYTES

    def readable(self) -> bool:
        """Return True."""
        return True

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
        """Read up to ``len(buffer)`` bytes; 0 at the end."""
        view = memoryview(buffer).cast("B")
        if not len(view) or self._position >= self._size:
            return 0
        if not self._begin <= self._position < self._begin + len(self._window):
            self._fetch(len(view))
        start = self._position - self._begin
        size = min(len(view), len(self._window) - start)
        view[:size] = self._window[start : start + size]
        self._position += size
        return size

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._file.close()
            super().close()

    def _fetch(self, count: int) -> None:
        window_end = self._begin + len(self._window)
        is_sequential = bool(self._window) and 0 <= self._position - window_end < JUMP_FROM
        begin = window_end if is_sequential else self._position
        self._next_bytes = min(self._next_bytes * 2, MAX_BYTES) if is_sequential else FIRST_BYTES
        end = min(max(begin + self._next_bytes, self._position + count), self._size)
        with self._file.part(begin, end) as stream:
            pieces = list(iter(lambda: stream.read(end - begin), b""))
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if len(data) != end - begin:
            raise ShardReadError(
                f"{redact(self._url)} returned {len(data)} bytes for a request of bytes {begin} to {end}. It may have "
                f"changed while it was read"
            )
        self._window, self._begin = memoryview(data), begin
