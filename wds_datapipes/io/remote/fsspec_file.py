"""Files of fsspec, read block by block with a time-out for each, and always the same version of the file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from wds_datapipes.io.remote.resuming_stream import OpenedSource, version_of
from wds_datapipes.io.remote.throughput import Attempt, ThroughputMonitor
from wds_datapipes.io.remote.timeouts import silent_after

__all__ = ["BLOCK_BYTES", "BLOCK_TIMEOUTS", "FsspecSource"]

#: Bytes per request, if a store is read by ranges.
BLOCK_BYTES = 8 << 20
#: A block has to arrive within this many time-outs of a byte.
BLOCK_TIMEOUTS = 10

#: What fsspec's file systems tell of the version of a file, each in its words.
VERSION_FACTS = (
    *("ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "generation", "version_id"),
    *("blob_id", "created", "modified"),
)
#: Schemes whose file systems ask for each part of a file by its name alone, so that it may be one of another version.
UNGUARDED = frozenset({"abfs", "abfss", "az", "gcs", "gs", "hf"})


class FileExpired(OSError):
    """A file is another one by now. s3fs raises `FileExpired` for the same."""


class FsspecSource:
    """A file of fsspec, opened at any offset.

    Args:
        filesystem: its file system.
        path: where it is there.
        scheme: of its URL.
        monitor: at which it is read.
    """

    def __init__(self, filesystem: Any, path: str, scheme: str, monitor: ThroughputMonitor) -> None:
        self._filesystem, self._path, self._monitor = filesystem, path, monitor
        self._is_guarded = scheme not in UNGUARDED

    def open_at(self, start: int) -> OpenedSource:
        """Open the file at an offset, or at its beginning if it cannot seek."""
        if start:
            self._forget()
        file = Attempt(self._opened).result(silent_after(self._monitor.timeout_s))
        details = getattr(file, "details", None)
        details = details if isinstance(details, Mapping) else {}
        version = version_of(*(details.get(name) for name in VERSION_FACTS))
        if start:
            try:
                file.seek(start)
            except (AttributeError, OSError, ValueError):  # that of io.UnsupportedOperation, too
                start = 0
        self._monitor.begin()
        is_looked_after = self._is_guarded or not version
        blocks = BlockFile(file, self._monitor, None if is_looked_after else lambda: self._version() == version)
        return OpenedSource(blocks, start, details.get("size"), version)

    def _opened(self) -> Any:
        file = self._filesystem.open(self._path, "rb", block_size=BLOCK_BYTES, cache_type="none")
        _ = getattr(file, "details", None)  # which some ask for only now
        return file

    def _version(self) -> tuple[str, ...]:
        self._forget()
        details = self._filesystem.info(self._path)
        return version_of(*(details.get(name) for name in VERSION_FACTS))

    def _forget(self) -> None:
        """Drop the file system's cached listing."""
        if callable(forget := getattr(self._filesystem, "invalidate_cache", None)):
            forget()


class BlockFile:
    """Reads a file of fsspec forward, block by block.

    Its library waits for a whole block, by as many requests and for as long as it likes. So it does that in a thread.

    Args:
        file: the file, at its next byte.
        monitor: of the shard.
        is_same: whether the file is still the one that was opened, where the store would not notice by itself.
    """

    def __init__(self, file: Any, monitor: ThroughputMonitor, is_same: Callable[[], bool] | None) -> None:
        self._file, self._monitor, self._is_same = file, monitor, is_same
        self._block, self._count = memoryview(b""), 0
        self._attempt: Attempt[bytes] | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes, and none at the end.

        Raises:
            FileExpired: the file was replaced meanwhile.
            TooSlowError: the block takes too long.
        """
        if not self._block:
            self._block = memoryview(self._fetch())
        data, self._block = bytes(self._block[:size]), self._block[size:]
        return data

    def close(self) -> None:
        """Close the file, or let the thread do that which still waits for it."""
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
        """Return the next block; this is another thread."""
        try:
            data: bytes = self._file.read(BLOCK_BYTES)
            self._count += 1
            if data and self._count > 1 and self._is_same is not None and not self._is_same():
                raise FileExpired("another version of the file is there by now")
            return data
        finally:
            with self._lock:
                self._attempt = None
                is_left = self._is_closed
            if is_left:
                self._file.close()
