"""Fetching: reads ranges of a shard, from a file, a copy or a store, and holds those that a plan needs again."""

from __future__ import annotations

import io
import os
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from stat import S_ISREG
from typing import Any, BinaryIO

from wds_datapipes.counters import Counters
from wds_datapipes.errors import ChangedShardError, ShardOpenError, ShardReadError
from wds_datapipes.index.format.origin import origin_of
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.index.read.plan import ReadPlan
from wds_datapipes.io.openers import local_path, open_local, open_parts, redact
from wds_datapipes.io.remote.known_stores import known_store
from wds_datapipes.io.remote.remote_file import FileFacts, RemoteFile
from wds_datapipes.io.remote.resuming_stream import ResumingStream, fill
from wds_datapipes.io.remote.source import SentRequest
from wds_datapipes.io.request_threads import RequestThreads, SentCall
from wds_datapipes.io.urls import store_of
from wds_datapipes.system import read_at
from wds_datapipes.tar.buffer import ReadBuffer
from wds_datapipes.tar.scanner import open_archive_ranges

#: At most this many bytes are allocated before they arrive, because an index may claim any size.
STEP_BYTES = 8 << 20


class ShardRanges:
    """Reads ranges of a shard, concurrently if it is remote; it is thread-safe.

    When the shard is opened, it must be as the index records it, see `ShardIndex.describe_change`.

    Args:
        url: the shard.
        index: its index.
        storage_options: passed to a remote file system.
        copy: an open local copy of the shard to read instead; it is closed with this object.
        copy_path: its path.
        counters: count the bytes read from a store.

    Attributes:
        url: the shard.
        name: the shard, without credentials.
        index: its index.
        path: the path of a local shard, or of the copy.
        store: the scheme and the host or bucket of the URL.
    """

    def __init__(
        self,
        url: str,
        index: ShardIndex,
        storage_options: Mapping[str, Any] | None = None,
        *,
        copy: BinaryIO | None = None,
        copy_path: str | None = None,
        counters: Counters | None = None,
    ) -> None:
        self._counters = counters
        self.path = local_path(url) if copy is None else copy_path
        self.url, self.name, self.index, self._storage_options = url, redact(url), index, storage_options
        self._file, self._is_copy, self._is_open = copy, copy is not None, False
        self._origin = origin_of(url, storage_options)
        self.store = store_of(self.name)
        self._lock = threading.Lock()
        self._remote: RemoteFile | None = None
        self._streams: set[ResumingStream] = set()  # ranges that are being read
        self._is_closed = threading.Event()

    def keep_open(self) -> None:
        """Keep the shard open until `close`. A remote shard is requested with its first range.

        Raises:
            ShardOpenError: it cannot be opened.
            ChangedShardError: it has changed since it was indexed.
        """
        if self._is_open:
            return
        with self._lock:
            if self.path is None:
                self._check_open()
                options: dict[str, Any] = {
                    "check": self._check_remote,
                    "pause": self._pause,
                    "counters": self._counters,
                }
                self._remote = open_parts(self.url, storage_options=self._storage_options, **options)
                if self._remote is None:
                    raise ShardOpenError(f"{self.name} can only be read sequentially")
            else:
                if self._file is None:
                    self._file = open_local(self.path, name=self.url)
                    weakref.finalize(self, self._file.close)
                self._check_local(self._file)
            self._is_open = True

    def send(self, start: int, end: int) -> SentCall[bytes]:
        """Request the bytes from ``start`` up to ``end`` of a remote shard.

        Raises:
            ShardError: the shard cannot be opened.
        """
        self.keep_open()
        remote = self._remote
        sent = None if remote is None or start >= end else remote.send(start, end)
        return SentCall(partial(self.read, start, end, sent), bool if sent is None else sent.close)

    def read(self, start: int, end: int, sent: SentRequest | None = None) -> bytes:
        """Return the bytes from ``start`` up to ``end``.

        Args:
            start: the offset of the first byte.
            end: the offset after the last byte.
            sent: the request for them, if it was sent.

        Raises:
            ShardError: they cannot be read.
        """
        if self._file is not None:
            data = read_at(self._file.fileno(), end - start, start)
            if len(data) == end - start:
                return data
        if self.path is None:
            return self._read_remote(start, end, sent)
        with open_local(self.path, name=self.url) as file:  # also for the rest of an interrupted read
            file.seek(start)
            data = ReadBuffer(file, self.name, start).take(end - start)
        if len(data) != end - start:
            raise self.changed_error(f"it ends before byte {end}")
        return data

    def _read_remote(self, start: int, end: int, sent: SentRequest | None) -> bytes:
        """Return the bytes from ``start`` up to ``end`` of a shard that is then kept open."""
        self.keep_open()
        if (remote := self._remote) is None:  # another thread has closed it
            if sent is not None:
                sent.close()
            raise self._closed_error()
        if start >= end:
            return b""  # an empty range cannot be requested
        with remote.part(start, end, sent) as stream:
            self._streams.add(stream)  # first, because `close` may be called now
            try:
                self._check_open()
                data = _read_all(stream, end - start)
            finally:
                self._streams.discard(stream)
        if len(data) != end - start:
            raise self.changed_error(f"it ends before byte {end}")
        return data

    def close(self) -> None:
        """Close the shard and abort reads in other threads."""
        self._is_closed.set()
        with self._lock:
            remote, self._remote = self._remote, None
            streams = list(self._streams)
            file, self._file, self._is_open = self._file, None, False
        for stream in streams:
            stream.abandon()
        if remote is not None:
            remote.close()
        if file is not None:
            file.close()

    def _check_local(self, file: BinaryIO) -> None:
        """Compare a local file with the index.

        Raises:
            ChangedShardError: it has changed since it was indexed.
        """
        status = os.fstat(file.fileno())
        size = status.st_size if S_ISREG(status.st_mode) else None
        self._check(FileFacts(size, None if self._is_copy else status.st_mtime_ns))

    def _check_remote(self, size: int | None, etag: str | None) -> None:
        self._check(FileFacts(size, None, etag))

    def _check(self, now: FileFacts) -> None:
        if change := self.index.describe_change(self._origin, now):
            raise self.changed_error(change)

    def changed_error(self, found: str) -> ChangedShardError:
        """Return the error for a shard that has changed."""
        name, advice = self.name, "Build"
        if self._is_copy:
            name = f"{self.name}, or its copy {self.path},"
            advice = "Delete the copy, if it is older than the index. Otherwise: Build"
        return ChangedShardError(
            f"{name} has changed since it was indexed: {found}. {advice} its index again, with build_indexes(..., "
            "rebuild=True) or wds-datapipes index --rebuild, and write the manifest again, if there is one"
        )

    def _check_open(self) -> None:
        if self._is_closed.is_set():
            raise self._closed_error()

    def _closed_error(self) -> ShardReadError:
        return ShardReadError(f"{self.name} was closed while it was read")

    def _pause(self, seconds: float) -> None:
        """Wait before a retry."""
        self._is_closed.wait(seconds)
        self._check_open()


def _read_all(stream: ResumingStream, count: int) -> bytes:
    """Return the next ``count`` bytes, or fewer at the end of the stream."""
    pieces = []
    while count:
        size = min(count, STEP_BYTES)
        piece = io.BytesIO(bytes(size))
        with piece.getbuffer() as view:
            filled = fill(stream, view)
        pieces.append(piece.getvalue() if filled == size else piece.getvalue()[:filled])  # not copied if it is full
        count = count - filled if filled == size else 0
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class PlannedRanges:
    """The ranges of a plan, read on demand or ahead.

    Ranges that are close together are read by one request, and held until the last of them or the next group is due.

    Args:
        ranges: reads the shard.
        plan: the ranges and requests.
        threads: read ahead; None to read when a range is due.
        is_ascending: whether the samples are in the order of the shard.

    Attributes:
        held: the ranges that are held, by number.
        is_held: for each range, whether it is read by `hold`; otherwise, it is read alone, as no other range needs it.
    """

    def __init__(
        self, ranges: ShardRanges, plan: ReadPlan, threads: RequestThreads | None, *, is_ascending: bool
    ) -> None:
        self._ranges, self._plan, self._threads, self._is_ascending = ranges, plan, threads, is_ascending
        self._requests: dict[int, Future[list[bytes]]] = {}
        # The requests in the order of the samples that need them first.
        self._due = [] if threads is None else [*dict.fromkeys(map(plan.requests.__getitem__, plan.ranges))]
        self.held: dict[int, bytes] = {}
        self.is_held = plan.is_held if threads is None else [True] * len(plan.starts)
        self._group = -1

    def request(self, group: int) -> Iterator[None]:
        """Begin to read the ranges of a group, one request at each step and in the order of the samples.

        Nothing is read if no threads read ahead.
        """
        if self._threads is not None:
            groups = self._plan.groups
            for request in self._due[bisect_left(groups, group) : bisect_right(groups, group)]:
                self._requests[request] = self._threads.request(partial(self._send, *self._span(request), request))
                yield

    def hold(self, number: int) -> bytes:
        """Return the data of a range, and hold it and the other ranges of its request.

        Raises:
            ShardError: it cannot be read.
        """
        plan, held = self._plan, self.held
        request = plan.requests[number]
        if self._is_ascending or plan.groups[request] != self._group:
            self._group = plan.groups[request]
            held.clear()
        held.update(enumerate(self._take(request), plan.firsts[request]))
        return held[number]

    def _take(self, request: int) -> list[bytes]:
        """Return the ranges of a request, which is read now if it is not read ahead."""
        threads = self._threads
        answer = self._requests.pop(request, None)
        if threads is not None and answer is not None and not answer.done():
            store = known_store(self._ranges.store)
            threads.await_answer(answer, lambda: store.is_near, store.limit.allow)
        return self._cut(request, self._ranges.read(*self._span(request))) if answer is None else answer.result()

    def _send(self, start: int, end: int, request: int) -> SentCall[list[bytes]]:
        """Send a request; its thread cuts the answer, so that no gap between ranges is held."""
        sent = self._ranges.send(start, end)
        return SentCall(lambda: self._cut(request, sent.receive()), sent.drop)

    def _cut(self, request: int, data: bytes) -> list[bytes]:
        """Return the ranges of a request."""
        plan = self._plan
        first, end = plan.firsts[request : request + 2]
        if end - first == 1:
            return [data]
        view, start = memoryview(data), plan.starts[first]
        spans = zip(plan.starts[first:end], plan.stops[first:end], strict=True)
        return [bytes(view[begin - start : stop - start]) for begin, stop in spans]

    def _span(self, request: int) -> tuple[int, int]:
        """Return where the bytes of a request begin and end."""
        plan = self._plan
        return plan.starts[plan.firsts[request]], plan.stops[plan.firsts[request + 1] - 1]


def has_random_access(url: str, *, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Whether samples of a shard can be read by offset, which excludes compressed shards, pipes and the like.

    Raises:
        ShardOpenError: there is no such shard, or it is not readable.
    """
    stream = open_archive_ranges(url, storage_options=storage_options)
    if stream is not None:
        stream.close()
    return stream is not None
