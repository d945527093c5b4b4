"""Ranges of a shard: bytes at offsets, of a local file or of a store, for several threads at the same time."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from stat import S_ISREG
from typing import Any, BinaryIO, cast

from wds_datapipes.errors import ChangedShardError, ShardOpenError, ShardReadError
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.io.openers import local_path, open_local, open_parts, redact
from wds_datapipes.io.remote.remote_file import RemoteFile
from wds_datapipes.io.remote.resuming_stream import RawReader, ResumingStream, fill
from wds_datapipes.tar.buffer import ReadBuffer

#: Memory for at most this many bytes is allocated before they arrive: an index may claim any size.
STEP_BYTES = 8 << 20


class ShardRanges:
    """Reads ranges of a shard. It is thread-safe; several ranges of a remote shard are requested at the same time.

    When the shard is opened, it must be the one that was indexed, by its size and ETag. A copy of a shard has another
    modification time, which matters only if the headers of the samples cannot show that the index is valid.

    Args:
        url: the shard.
        index: its index.
        storage_options: passed to a remote file system.
        copy: an open local copy of the shard, which is read instead, and closed.
        copy_path: its path.

    Attributes:
        path: the path of a local shard, or of the copy.
        bytes_read: how many bytes were read.
    """

    def __init__(
        self,
        url: str,
        index: ShardIndex,
        storage_options: Mapping[str, Any] | None = None,
        *,
        copy: BinaryIO | None = None,
        copy_path: str | None = None,
    ) -> None:
        self.path = local_path(url) if copy is None else copy_path
        self.bytes_read = 0
        self._url, self._name, self._storage_options = url, redact(url), storage_options
        self._index = index
        self._file, self._is_copy, self._is_checked = copy, copy is not None, False
        self._lock = threading.Lock()
        self._remote: RemoteFile | None = None
        self._streams: set[BinaryIO] = set()  # those that are being read
        self._is_closed = threading.Event()

    def keep_open(self) -> None:
        """Keep a local shard open until `close`.

        Raises:
            ShardOpenError: it cannot be opened.
            ChangedShardError: it has changed since it was indexed.
        """
        with self._lock:
            if self.path is None or self._is_checked:
                return
            if self._file is None:
                self._file = open_local(self.path, name=self._url)
                weakref.finalize(self, self._file.close)
            self._check_local(self._file)
            self._is_checked = True

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` up to ``end``.

        Raises:
            ShardError: they cannot be read.
        """
        if self._file is not None:
            data = os.pread(self._file.fileno(), end - start, start)
            if len(data) == end - start:
                self.bytes_read += len(data)
                return data
        if self.path is not None:  # also for the rest of a read that was interrupted
            with open_local(self.path, name=self._url) as file:
                file.seek(start)
                data = ReadBuffer(file, self._name, start).take(end - start)
        elif start < end:
            with self._open_range(start, end) as stream:
                data = _read_all(cast(RawReader, stream), end - start)
        else:
            return b""  # an empty range cannot be requested
        if len(data) != end - start:
            raise self.changed_error(f"it ends before byte {end}")
        with self._lock:
            self.bytes_read += len(data)
        return data

    def close(self) -> None:
        """Close the shard, and abort reads in other threads."""
        self._is_closed.set()
        with self._lock:
            remote, self._remote = self._remote, None
            streams = list(self._streams)
            file, self._file, self._is_checked = self._file, None, False
        for stream in streams:
            if isinstance(stream, ResumingStream):
                stream.abandon()
        if remote is not None:
            remote.close()
        if file is not None:
            file.close()

    @contextmanager
    def _open_range(self, start: int, end: int) -> Iterator[BinaryIO]:
        """Open a range of a remote shard; `close` aborts reading it."""
        with self._lock:
            self._check_open()
            remote = self._remote = self._remote or self._open()
        with remote.part(start, end) as stream:
            with self._lock:
                self._check_open()
                self._streams.add(stream)
            try:
                yield stream
            finally:
                with self._lock:
                    self._streams.discard(stream)

    def _open(self) -> RemoteFile:
        file = open_parts(self._url, storage_options=self._storage_options, pause=self._pause)
        if file is None:
            raise ShardOpenError(f"{self._name} can only be read sequentially")
        try:
            self._check_facts(file.size, file.etag)
        except ChangedShardError:
            file.close()
            raise
        return file

    def _check_local(self, file: BinaryIO) -> None:
        """Compare a local file with the index.

        Raises:
            ChangedShardError: it has changed since it was indexed.
        """
        status, index = os.fstat(file.fileno()), self._index
        self._check_facts(status.st_size if S_ISREG(status.st_mode) else None)
        needs_time = (index.columns_by is not None or index.key_rule is None) and not self._is_copy
        if needs_time and index.facts.mtime_ns not in (None, status.st_mtime_ns):
            what = "columns" if index.columns_by is not None else f"key rule {index.facts.key_rule}"
            raise self.changed_error(
                f"it was modified at another time than its index says, which has {what}, so that the headers do not "
                "show whether it is still the same. A copy has the same time if it is made with cp -p"
            )

    def _check_facts(self, size: int | None, etag: str | None = None) -> None:
        facts = self._index.facts
        if None not in (size, facts.bytes) and size != facts.bytes:
            raise self.changed_error(f"it has {size} bytes instead of {facts.bytes}")
        if None not in (etag, facts.etag) and etag != facts.etag:
            raise self.changed_error(f"its ETag is {etag!r} instead of {facts.etag!r}")

    def changed_error(self, found: str) -> ChangedShardError:
        """Return the error of a shard that has changed."""
        name = f"{self._name}, or its copy {self.path}," if self._is_copy else self._name
        return ChangedShardError(f"{name} has changed since it was indexed: {found}. {self._advice()}")

    def _advice(self) -> str:
        advice = (
            "Build its index again, with build_indexes(..., rebuild=True) or wds-datapipes index --rebuild, and write "
            "the manifest again, if there is one"
        )
        return f"Delete the copy, if it is older than the index. Otherwise: {advice}" if self._is_copy else advice

    def _check_open(self) -> None:
        if self._is_closed.is_set():
            raise ShardReadError(f"{self._name} was closed while it was read")

    def _pause(self, seconds: float) -> None:
        """Wait before a retry."""
        self._is_closed.wait(seconds)
        self._check_open()


def _read_all(stream: RawReader, count: int) -> bytes:
    """Return the next ``count`` bytes, or fewer at the end of the stream."""
    pieces = []
    while count:
        view = memoryview(bytearray(min(count, STEP_BYTES)))
        piece = bytes(view[: fill(stream, view)])
        pieces.append(piece)
        count = count - len(piece) if len(piece) == len(view) else 0
    return b"".join(pieces)
