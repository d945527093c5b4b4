"""Download of a copy: writes a temporary file, hashes and syncs it, and renames it when it is complete."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from wds_datapipes.errors import (
    CacheError,
    CorruptShardError,
    MissingDependencyError,
    ReadLimitError,
    ShardError,
    ShardReadError,
    TruncatedShardError,
    UnsupportedMemberError,
)
from wds_datapipes.io.openers import open_url, redact
from wds_datapipes.io.remote.range_reader import file_facts
from wds_datapipes.shard_cache.entry import CopyFacts, Entry, stamp
from wds_datapipes.shard_cache.eviction import evict_oldest, reserve_space
from wds_datapipes.tar.scanner import ShardScan

#: The options that also apply to requests for the size.
FACTS_OPTIONS = ("storage_options", "timeout_s", "retries")
#: How much is read from the source at once, in bytes.
BLOCK_BYTES = 1 << 20
#: The step in which space is reserved if the size of a shard is unknown, in bytes.
STEP_BYTES = 64 << 20


class CacheFullError(Exception):
    """The cache is full: all copies are in use, or the shard is larger than the limit."""


class DownloadStopped(Exception):
    """The download was cancelled."""


class DownloadRequest:
    """A request to download a shard.

    Args:
        url: the shard.
        size: its size in bytes, if known.
        sha256: its digest, if known.
        options: the options to open it with.
    """

    def __init__(self, url: str, size: int | None, sha256: str | None, options: Mapping[str, Any]) -> None:
        self.url, self.size, self.sha256, self.options = url, size, sha256, options
        self.name = redact(url)

    def find_size(self) -> int | None:
        """Return the known size, or the one that the store reports.

        Raises:
            ShardOpenError: there is no such file, or access is denied.
        """
        if self.size is not None:
            return self.size
        options = {name: value for name, value in self.options.items() if name in FACTS_OPTIONS}
        return file_facts(self.url, **options).bytes


def fetch_copy(
    folder: Path,
    entry: Entry,
    request: DownloadRequest,
    max_bytes: int | None,
    should_continue: Callable[[], bool],
    *,
    is_last: bool = False,
) -> BinaryIO:
    """Download a copy whose lock is held, and return it open and pinned.

    If the size of the shard is unknown, the download must be a complete archive, except in the last attempt: the reader
    may have been configured to accept archives without an end marker.

    Raises:
        CacheFullError: there is no space for the copy.
        DownloadStopped: ``should_continue`` returned False.
        CacheError: the folder cannot be written.
        ShardError: the shard cannot be read, or does not have the expected size or digest.
    """
    size = request.find_size()
    try:
        entry.part.unlink(missing_ok=True)  # left by a killed process
        copy = io.FileIO(entry.part, "x+")
    except OSError as error:
        raise _unwritable(entry.part, error) from error
    try:
        fcntl.flock(copy, fcntl.LOCK_SH)  # the pin, held until the file is closed
        reservation = _Reservation(folder, entry.part, max_bytes)
        reservation.extend(size or 0)
        digest = _copy_source(request, copy, reservation, size, should_continue)
        if size is None and not is_last:
            _check_complete(request, copy, reservation.written)
        _finish(folder, entry, copy, request, digest, reservation.written)
    except BaseException:
        entry.part.unlink(missing_ok=True)
        copy.close()
        raise
    return copy


class _Reservation:
    """The disk space reserved for one download, which grows if the size is unknown."""

    def __init__(self, folder: Path, part: Path, max_bytes: int | None) -> None:
        self._folder, self._part, self._max_bytes = folder, part, max_bytes
        self._reserved = 0
        self.written = 0

    def extend(self, need: int) -> None:
        if self._max_bytes is None or need <= self._reserved:
            return
        if not reserve_space(self._folder, self._part, need, self._max_bytes):
            raise CacheFullError
        self._reserved = need

    def write(self, copy: io.FileIO, data: memoryview) -> None:
        """Write data, and evict copies if the disk is full."""
        if self.written + len(data) > self._reserved:
            self.extend(self.written + max(len(data), STEP_BYTES) if self._reserved or self.written else len(data))
        while data:
            try:
                count = copy.write(data)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not evict_oldest(self._folder):
                    raise _unwritable(self._part, error) from error
                continue
            data = data[count:]
            self.written += count


def _copy_source(
    request: DownloadRequest,
    copy: io.FileIO,
    reservation: _Reservation,
    size: int | None,
    should_continue: Callable[[], bool],
) -> str:
    """Write the source to the copy, and return its digest."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BLOCK_BYTES))
    try:
        with open_url(request.url, **request.options) as source:
            while count := source.readinto(buffer):  # type: ignore[attr-defined]  # the streams of open_url have it
                if not should_continue():
                    raise DownloadStopped
                digest.update(buffer[:count])
                reservation.write(copy, buffer[:count])
    except (ShardError, CacheError):
        raise
    except OSError as error:
        raise ShardReadError(f"{request.name} could not be read to its end: {type(error).__name__}: {error}") from error
    if size is not None and reservation.written != size:
        raise TruncatedShardError(
            f"{request.name} should have {size} bytes, but {reservation.written} were received. The transfer was cut "
            f"off, or the shard has changed meanwhile"
        )
    found = digest.hexdigest()
    if request.sha256 is not None and found != request.sha256:
        raise CorruptShardError(
            f"{request.name} was downloaded, but its SHA-256 is {found}, not {request.sha256}. It was replaced or "
            f"damaged: download or write the shard again, or rebuild the manifest"
        )
    return found


def _check_complete(request: DownloadRequest, copy: io.FileIO, size: int) -> None:
    """Raise if a download is a truncated archive, as after a broken connection."""
    copy.truncate(size)
    with suppress(
        CorruptShardError, UnsupportedMemberError, ReadLimitError, MissingDependencyError
    ):  # reported by the reader
        try:
            ShardScan(f"/proc/self/fd/{copy.fileno()}", ignore_zeros=True).finish()
        except TruncatedShardError:
            raise TruncatedShardError(
                f"The {size} bytes received of {request.name} are not a complete archive, and its store does not "
                "report its size. It may have been truncated in transfer"
            ) from None


def _finish(folder: Path, entry: Entry, copy: io.FileIO, request: DownloadRequest, digest: str, size: int) -> None:
    """Sync a complete copy, then rename it, so that a power failure cannot leave a truncated copy under its name."""
    try:
        copy.truncate(size)
        os.fsync(copy.fileno())
        entry.write_facts(CopyFacts(request.name, size, digest, os.fstat(copy.fileno()).st_mtime_ns))
        stamp(folder, entry.facts_path)
        entry.part.replace(entry.path)
        copy.seek(0)
    except OSError as error:
        raise _unwritable(entry.part, error) from error


def _unwritable(path: Path, error: OSError) -> CacheError:
    advice = "Check the folder and its permissions"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "All copies not in use were evicted already. Free space, use another folder, or pass max_bytes"
    return CacheError(f"The copy {path} cannot be written: {error.strerror or error}. {advice}")
