"""Seekable reader of remote files by range requests, and the facts a file system knows of a file."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from wds_datapipes.errors import ShardOpenError, ShardReadError
from wds_datapipes.io.local import local_path, open_local
from wds_datapipes.io.redaction import raise_alone, redact
from wds_datapipes.io.remote.filesystem import reason, redactor_of, remote_filesystem
from wds_datapipes.io.remote.range_sources import RangeSource, open_remote_parts
from wds_datapipes.io.remote.retry import concerns_all
from wds_datapipes.io.remote.throughput import Attempt
from wds_datapipes.io.remote.timeouts import StoreTimeouts, silent_after
from wds_datapipes.io.urls import known_schemes, split_scheme

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["FileFacts", "file_facts", "open_ranges"]

#: Bytes of the first read after a seek; doubled with each sequential read.
FIRST_BYTES, MOST_BYTES = 16 << 10, 8 << 20
#: What is skipped is read where it is less than this, in bytes, since a request takes its time too.
JUMP_FROM = 256 << 10


class FileFacts(NamedTuple):
    """The facts that a file system reports of a file; ``None`` if unknown."""

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
    """Return the size of a file, and what identifies its version.

    Args:
        url: the file.
        storage_options: passed to the file system.
        timeout_s: see `StoreTimeouts`.
        retries: see `StoreTimeouts`.

    Raises:
        ShardOpenError: there is no such file, or it may not be read.
    """
    path = local_path(url)
    if path is not None:
        try:
            status = Path(path).stat()
        except (OSError, ValueError):
            open_local(path, asked=url).close()  # which tells in words what is wrong
            raise
        return FileFacts(status.st_size, status.st_mtime_ns) if S_ISREG(status.st_mode) else FileFacts()
    scheme, _ = split_scheme(url)
    if scheme in known_schemes():
        return FileFacts()
    options, waiting = StoreTimeouts.split(storage_options, timeout_s, retries)
    hide, retry = redactor_of(options), waiting.retry_policy()
    filesystem, place = remote_filesystem(url, options, waiting.timeout_s, retry)

    def ask() -> Any:
        with contextlib.suppress(AttributeError, NotImplementedError):
            filesystem.invalidate_cache()  # or it would tell what it was told before
        # Libraries wait for each byte of an answer alone, and a server may send one now and then.
        return Attempt(partial(filesystem.info, place)).result(silent_after(waiting.seconds))

    try:
        found = retry.call(ask, f"{hide(url)} cannot be opened")
    except Exception as error:  # noqa: BLE001  every file system has errors of its own
        told = f"{reason(error, scheme, hide)}{retry.attempts_text()}"
        refused = ShardOpenError(f"{hide(url)} cannot be opened: {told}")
        refused.concerns_all = concerns_all(error)
        raise_alone(refused)
    size = found.get("size")
    etag = found.get("ETag") or found.get("etag") or found.get("blob_id")
    return FileFacts(size, None, str(etag).strip('"') if etag else None)


def open_ranges(url: str, *, storage_options: Mapping[str, Any] | None = None) -> BinaryIO | None:
    """Open a file for random access, or return ``None`` if it can only be read whole.

    Of a remote file, only the requested bytes are fetched, and some that follow them.

    Raises:
        ShardOpenError: there is no such file, or it may not be read.
    """
    path = local_path(url)
    if path is not None:
        return open_local(path, asked=url) if Path(path).is_file() else None
    size = file_facts(url, storage_options=storage_options).bytes
    if size is None:
        return None
    parts = open_remote_parts(url, storage_options=storage_options)
    return None if parts is None else cast(BinaryIO, RangeReader(parts, url, size))


class RangeReader(io.RawIOBase):
    """A seekable remote file: small range requests after a seek, larger ones in sequential reads."""

    def __init__(self, parts: RangeSource, url: str, size: int) -> None:
        self._parts, self._url, self._size = parts, url, size
        self._at = 0
        #: What was fetched last, and where it begins.
        self._window, self._begin = memoryview(b""), 0
        self._next_bytes = FIRST_BYTES

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Where the next byte is read."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Set the position; the request follows with the next read."""
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: Buffer, /) -> int:
        """Read up to ``len(buffer)`` bytes; 0 at the end."""
        view = memoryview(buffer).cast("B")
        if not len(view) or self._at >= self._size:
            return 0
        if not self._begin <= self._at < self._begin + len(self._window):
            self._fetch(len(view))
        at = self._at - self._begin
        size = min(len(view), len(self._window) - at)
        view[:size] = self._window[at : at + size]
        self._at += size
        return size

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._parts.close()
            super().close()

    def _fetch(self, count: int) -> None:
        reached = self._begin + len(self._window)
        goes_on = bool(self._window) and 0 <= self._at - reached < JUMP_FROM
        begin = reached if goes_on else self._at
        self._next_bytes = min(self._next_bytes * 2, MOST_BYTES) if goes_on else FIRST_BYTES
        end = min(max(begin + self._next_bytes, self._at + count), self._size)
        with self._parts.part(begin, end) as stream:
            pieces = list(iter(lambda: stream.read(end - begin), b""))
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if len(data) != end - begin:
            raise ShardReadError(
                f"{redact(self._url)} was asked for its bytes {begin} to {end}, and gave {len(data)} bytes. It may "
                f"have changed meanwhile"
            )
        self._window, self._begin = memoryview(data), begin
