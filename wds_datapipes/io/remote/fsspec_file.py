"""Files of fsspec, read in blocks with a time-out each, all from the same version of the file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from wds_datapipes.io.remote.resuming_stream import OpenedSource, etag_of, is_strong_etag, version_of
from wds_datapipes.io.remote.throughput import Attempt, ThroughputMonitor
from wds_datapipes.io.remote.timeouts import silent_after

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["BLOCK_BYTES", "BLOCK_TIMEOUTS", "FsspecSource"]

#: Bytes per range request.
BLOCK_BYTES = 8 << 20
#: The time-out of a block, as a multiple of the time-out of a byte.
BLOCK_TIMEOUTS = 10

#: The names by which fsspec's file systems report the version of a file.
VERSION_FACTS = (
    *("ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "generation", "version_id"),
    *("blob_id", "created", "modified"),
)
#: Those of them that no two versions have in common, besides a strong ETag.
NUMBERS_OF_VERSIONS = ("generation", "version_id")
#: Schemes whose file systems request ranges by name alone, so that a range may belong to another version of the file.
UNGUARDED = frozenset({"abfs", "abfss", "az", "gcs", "gs", "hf"})


class FileExpired(OSError):
    """The file was replaced while it was read. Named as the equivalent error of s3fs."""


class FsspecSource:
    """A file of fsspec, opened at any offset.

    Args:
        filesystem: the file system.
        path: the path in the file system.
        scheme: the scheme of the URL.
        monitor: measures the throughput.
    """

    def __init__(self, filesystem: Any, path: str, scheme: str, monitor: ThroughputMonitor) -> None:
        self._filesystem, self._path, self._monitor = filesystem, path, monitor
        self._is_guarded = scheme not in UNGUARDED

    def open_at(self, start: int) -> OpenedSource:
        """Open the file at an offset, or at its beginning if it cannot seek."""
        if start:
            self._invalidate_cache()
        file = Attempt(self._open_file).result(silent_after(self._monitor.timeout_s))
        details = getattr(file, "details", None)
        details = details if isinstance(details, Mapping) else {}
        version = version_of(*(details.get(name) for name in VERSION_FACTS))
        if start:
            try:
                file.seek(start)
            except (AttributeError, OSError, ValueError):  # includes io.UnsupportedOperation
                start = 0
        self._monitor.begin()
        needs_check = bool(version) and not self._is_guarded
        blocks = BlockFile(file, self._monitor, (lambda: self._version() == version) if needs_check else None)
        etag = etag_of(details)
        is_strong = is_strong_etag(etag) or any(details.get(name) is not None for name in NUMBERS_OF_VERSIONS)
        return OpenedSource(blocks, start, details.get("size"), version, etag, is_strong)

    def _open_file(self) -> Any:
        file = self._filesystem.open(self._path, "rb", block_size=BLOCK_BYTES, cache_type="none")
        _ = getattr(file, "details", None)  # some file systems send a request for it
        return file

    def _version(self) -> tuple[str, ...]:
        self._invalidate_cache()
        details = self._filesystem.info(self._path)
        return version_of(*(details.get(name) for name in VERSION_FACTS))

    def _invalidate_cache(self) -> None:
        """Drop the file system's cached listing."""
        if callable(forget := getattr(self._filesystem, "invalidate_cache", None)):
            forget()


class BlockFile:
    """Reads a file of fsspec forward, block by block.

    Each block is fetched in a thread, since its library may block for any time and any number of requests.

    Args:
        file: the file, at its next byte.
        monitor: measures the throughput of the shard.
        is_same: returns whether the file is still the one that was opened; None if the store checks this itself.
    """

    def __init__(self, file: Any, monitor: ThroughputMonitor, is_same: Callable[[], bool] | None) -> None:
        self._file, self._monitor, self._is_same = file, monitor, is_same
        self._block, self._block_count = memoryview(b""), 0
        self._attempt: Attempt[bytes] | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def readinto(self, buffer: Buffer, /) -> int:
        """Read at most ``len(buffer)`` bytes; 0 at the end.

        Raises:
            FileExpired: the file was replaced since it was opened.
            TooSlowError: fetching a block takes too long.
        """
        if not self._block:
            self._block = memoryview(self._fetch())
        view = memoryview(buffer).cast("B")
        count = min(len(view), len(self._block))
        view[:count] = self._block[:count]
        self._block = self._block[count:]
        return count

    def close(self) -> None:
        """Close the file; if a thread is still fetching a block, that thread closes it."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            attempt = self._attempt
        if attempt is None:
            self._file.close()
        else:
            attempt.abandon()

    def _fetch(self) -> bytes:
        monitor, begin = self._monitor, self._monitor.clock()
        with self._lock:
            if self._is_closed:
                raise ValueError("the file is closed")
            self._attempt = Attempt(self._next)
        data = self._attempt.result(
            BLOCK_TIMEOUTS * monitor.timeout_s, monitor.timeout_s, lambda: monitor.log_slow(0, monitor.timeout_s)
        )
        monitor.record(len(data), monitor.clock() - begin)
        return data

    def _next(self) -> bytes:
        """Return the next block; runs in another thread."""
        try:
            data: bytes = self._file.read(BLOCK_BYTES)
            self._block_count += 1
            if data and self._block_count > 1 and self._is_same is not None and not self._is_same():
                raise FileExpired("the file was replaced while it was read")
            return data
        finally:
            with self._lock:
                self._attempt = None
                is_abandoned = self._is_closed
            if is_abandoned:
                self._file.close()
