"""Prefetching of remote shards: threads read ahead in the current shard and in the next ones, unless they are near."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, BinaryIO, TypeVar, cast

from wds_datapipes.interrupts import defer_interrupts
from wds_datapipes.io.openers import open_url
from wds_datapipes.io.remote.resuming_stream import ResumingStream
from wds_datapipes.io.urls import OpeningURL, is_remote, split_scheme, store_of

T = TypeVar("T")

#: Default limit of prefetched bytes, for all shards together.
READ_AHEAD_BYTES = 32 << 20
#: Shards are read in blocks of at most this many bytes.
BLOCK_BYTES = 1 << 20
#: A store is near if it has sent the first bytes of a shard after at most the first number of seconds, and reading
#: without a thread has taken at most the second number of seconds longer than if the store sent the third number of
#: bytes per second. Threads would take more time than they save.
NEAR_S, MAX_DELAY_S, NEAR_BYTES_PER_S = 0.005, 0.03, 400e6
#: With a smaller buffer per shard, threads would wait for each other more than for the store.
MIN_SHARD_BYTES = 64 << 10
#: At most this many shards are prefetched before they are requested, however small they are.
MAX_NEXT_SHARDS = 7
#: At most this many URLs are taken from the source to find the next shard to prefetch.
MAX_PENDING = 1000
#: The stores that have once sent the first bytes of a shard within `NEAR_S`.
_near_stores: set[str] = set()
#: How long closing waits for a response that is no longer needed, in seconds.
GRACE_S = 2.0


class ShardPrefetcher(Iterable[T]):
    """Yields the URLs of shards and opens the shards; threads prefetch the remote ones, unless their store is near.

    URLs are taken from the source in advance only while all of them are remote shards, since a source that yields a
    local file may wait until the file has been read. Errors of the source and of the shards are raised at the same
    point as without prefetching.

    Args:
        source: yields the URLs.
        max_bytes: the maximum number of bytes to prefetch into memory for all shards together, raised to at least 64
            KiB for the next shard and each open one; 0 disables prefetching.
        options: passed to `open_url`.
        is_requested: whether all of a shard will be read, by its index in the source.
        open_shards: the number of shards that are read at the same time. With 1, a shard is closed when the next one is
            requested, or iteration ends; otherwise with its stream, or by `close`.
    """

    def __init__(
        self,
        source: Iterable[T],
        max_bytes: int,
        options: Mapping[str, Any],
        is_requested: Callable[[int], bool],
        open_shards: int = 1,
    ) -> None:
        self._source: Iterator[tuple[int, T]] | None = enumerate(source)
        self._open_shards = open_shards
        self._max_bytes = max(max_bytes, MIN_SHARD_BYTES * (open_shards + 1)) if max_bytes else 0
        self._shard_bytes = self._max_bytes // (open_shards + 1)
        self._options, self._is_requested = options, is_requested
        #: URLs taken from the source but not yielded yet.
        self._pending: deque[tuple[int, T]] = deque()
        self._failure: Exception | None = None
        #: The shards that are being read, by index; the first ones may have been yielded.
        self._fetches: dict[int, PrefetchThread] = {}
        #: The bytes to reserve for a shard whose size is not known yet.
        self._expected_bytes = self._shard_bytes
        self._unused: list[bytearray] = []
        self._current = -1
        self._can_extend = True

    def __iter__(self) -> Iterator[T]:
        try:
            while self._pending or self._take():
                if self._open_shards == 1:
                    self._release(self._current)
                self._current, url = self._pending.popleft()
                self._can_extend = True
                if self._open_shards > 1 and self._is_prefetchable(url) and self._is_requested(self._current):
                    self._fetch(self._current, str(url))  # it may be opened later
                yield url
            if self._failure is not None:
                raise self._failure
        finally:
            if self._open_shards == 1:
                self.close()

    def close(self) -> None:
        """Stop prefetching all shards."""
        while self._fetches:
            self._fetches.popitem()[1].close()

    def open(self, index: int, path: str, /, **options: Any) -> BinaryIO:
        """Open a shard that was yielded, by its index in the source, as `open_url` does."""
        if index not in self._fetches and not self._is_prefetchable(path):
            return open_url(path, **options)
        self._fetch(index, path)
        self._extend(index)
        fetch, extend, release = self._fetches[index], partial(self._extend, index), partial(self._release, index)
        return cast(BinaryIO, PrefetchedStream(fetch, extend, release))

    def _fetch(self, index: int, url: str) -> None:
        """Start prefetching a shard, unless it is already being prefetched."""
        if index not in self._fetches:
            with defer_interrupts():  # otherwise a started thread could be unknown and never stopped
                self._fetches[index] = PrefetchThread(url, self._options, self._expected_bytes, self._unused)

    def _release(self, index: int) -> None:
        """Stop prefetching a shard."""
        if (fetch := self._fetches.pop(index, None)) is not None:
            self._expect([fetch])
            fetch.close()

    def _expect(self, fetches: Iterable[PrefetchThread]) -> None:
        """Expect the next shards to be as large as the largest of these."""
        if sizes := [fetch.size for fetch in fetches if fetch.size is not None]:
            self._expected_bytes = min(max(*sizes, MIN_SHARD_BYTES), self._shard_bytes)

    def _is_prefetchable(self, url: object) -> bool:
        if not isinstance(url, str) or isinstance(url, OpeningURL) or not is_remote(split_scheme(url)[0]):
            return False
        of_thread, store = self._options["counters"].of_thread, store_of(url)
        allowed_s = MAX_DELAY_S + of_thread(f"fetched_bytes/{store}") / NEAR_BYTES_PER_S
        return self._max_bytes > 0 and (store not in _near_stores or of_thread(f"fetching_s/{store}") > allowed_s)

    def _extend(self, current: int) -> None:
        """Prefetch more of the current shard and start prefetching the next ones, within the limit."""
        fetches = self._fetches.values()
        self._expect(fetches)
        reading = self._fetches[current]
        others = sum(fetch.reserved_bytes for fetch in fetches if fetch is not reading)
        reading.allow(min(self._shard_bytes, self._max_bytes - others))
        most = self._open_shards + MAX_NEXT_SHARDS
        while self._can_extend and len(self._fetches) < most and len(self._pending) < MAX_PENDING:
            reserved = sum(fetch.reserved_bytes for fetch in fetches)
            if reserved + self._expected_bytes > self._max_bytes or not self._take():
                return
            index, url = self._pending[-1]
            self._can_extend = self._is_prefetchable(url)
            if self._can_extend and self._is_requested(index):
                self._fetch(index, str(url))

    def _take(self) -> bool:
        """Take a URL from the source; return False at its end."""
        if self._source is None:
            return False
        try:
            self._pending.append(next(self._source))
        except StopIteration:
            self._source = None
        except Exception as error:  # noqa: BLE001  raised after the pending shards were read
            self._source, self._failure = None, error
        return self._source is not None


class Block:
    """A block of memory that is partly filled with prefetched bytes."""

    __slots__ = ("data", "end", "start")

    def __init__(self, data: bytearray) -> None:
        self.data, self.start, self.end = data, 0, 0


class PrefetchThread:
    """A thread that prefetches a remote shard, up to a limit.

    Args:
        url: the shard.
        options: passed to `open_url`.
        max_bytes: the maximum number of bytes to buffer.
        unused: the memory of blocks that were read, for reuse by any of the threads.

    Attributes:
        block_bytes: the size of a block.
        size: the size of the shard in bytes; None if it is unknown or not known yet.
    """

    def __init__(self, url: str, options: Mapping[str, Any], max_bytes: int, unused: list[bytearray]) -> None:
        self._url, self._options, self._max_bytes, self._unused = url, options, max_bytes, unused
        self.block_bytes = min(BLOCK_BYTES, max_bytes)
        #: The blocks to read; the thread appends to the last one.
        self._blocks: deque[Block] = deque()
        self._buffered = self._consumed = 0
        #: The number of buffered bytes that the reader waits for.
        self._awaited = 0
        self.size: int | None = None
        self._error: BaseException | None = None
        self._has_ended = False
        self._changed, self._stop = threading.Condition(), threading.Event()
        self._stream: BinaryIO | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="wds-read-ahead", daemon=True)
        self._thread.start()

    @property
    def reserved_bytes(self) -> int:
        """The number of bytes that the thread may still buffer."""
        if self._has_ended:
            return self._buffered
        remaining = sys.maxsize if self.size is None else self.size - self._consumed
        return min(remaining, self._max_bytes)

    def allow(self, max_bytes: int) -> None:
        """Raise the limit."""
        with self._changed:
            if max_bytes > self._max_bytes:
                self._max_bytes = max_bytes
                self._changed.notify_all()

    def peek(self, size: int) -> bytes:
        """Wait for the next bytes; return at most ``size`` of them without consuming them, or none at the end."""
        with self._changed:
            self._wait_for(1)
            if not self._buffered:
                return b""
            block = self._blocks[0]
            return bytes(block.data[block.start : min(block.start + size, block.end)])

    def take(self, size: int, least: int) -> bytes:
        """Wait for ``least`` bytes or as many as can be buffered; return at most ``size``, or none at the end.

        Raises:
            Exception: the error that reading raised in the thread.
        """
        views: list[memoryview] = []
        used: list[bytearray] = []
        with self._changed:
            self._wait_for(min(least, self._max_bytes))
            left = min(size, self._buffered)
            if self._buffered >= self._max_bytes:
                self._changed.notify_all()
            self._buffered -= left
            self._consumed += left
            while left:
                block = self._blocks[0]
                view = memoryview(block.data)[block.start : min(block.start + left, block.end)]
                views.append(view)
                left -= len(view)
                block.start += len(view)
                if block.start == len(block.data):
                    used.append(self._blocks.popleft().data)
            data = b"".join(views)
        self._unused.extend(used)
        return data

    def close(self) -> None:
        """Stop reading."""
        if os.getpid() != self._process:  # in a forked process: the thread runs in the parent
            return
        with self._changed:
            self._stop.set()
            self._changed.notify_all()
        if isinstance(self._stream, ResumingStream):
            self._stream.abandon()
        if self._thread is not threading.current_thread():  # the thread may collect its own reader as garbage
            self._thread.join(GRACE_S)
        if not self._thread.is_alive():
            self._unused.extend(block.data for block in self._blocks)
        self._blocks.clear()
        self._buffered = 0

    def _run(self) -> None:
        begin = time.perf_counter()
        try:
            with open_url(self._url, **self._options, pause=self._pause) as stream:
                if not isinstance(stream, ResumingStream):
                    raise TypeError(f"expected a ResumingStream, got {type(stream).__name__}")
                self._stream, self.size = stream, stream.size
                while not self._stop.is_set():
                    block = self._next_block()
                    count = stream.readinto(memoryview(block.data)[block.end :])
                    if not count:
                        break
                    if time.perf_counter() - begin <= NEAR_S:
                        _near_stores.add(store_of(self._url))
                    self._append(block, count)
        except BaseException as error:  # noqa: BLE001  `peek` raises it
            self._error = error
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _wait_for(self, count: int) -> None:
        """Wait until this many bytes or all remaining bytes are buffered."""
        self._awaited = count
        while self._buffered < count and not self._has_ended:
            self._changed.wait()
        self._awaited = 0
        if not self._buffered and self._error is not None:
            raise self._error

    def _next_block(self) -> Block:
        """Return a block with space at its end."""
        with self._changed:
            block = self._blocks[-1] if self._blocks else None
            if block is not None and block.start == block.end:
                block.start = block.end = 0
            if block is None or block.end == len(block.data):
                block = Block(self._unused.pop() if self._unused else bytearray(self.block_bytes))
                self._blocks.append(block)
            return block

    def _append(self, block: Block, count: int) -> None:
        with self._changed:
            block.end += count
            self._buffered += count
            if 0 < self._awaited <= self._buffered:
                self._changed.notify_all()
            while self._buffered >= self._max_bytes and not self._stop.is_set():
                self._changed.wait()

    def _pause(self, seconds: float) -> None:
        """Wait before a retry."""
        if self._stop.wait(seconds):
            raise AbandonedError


class AbandonedError(Exception):
    """The shard is no longer needed."""


class PrefetchedStream(io.BufferedIOBase):
    """A stream of prefetched bytes, which are copied once.

    Args:
        fetch: the thread that reads the shard.
        extend: called when buffered bytes were consumed.
        release: called when the stream is closed.
    """

    def __init__(self, fetch: PrefetchThread, extend: Callable[[], None], release: Callable[[], None]) -> None:
        self._fetch, self._extend, self._release = fetch, extend, release
        self._until_extend = fetch.block_bytes

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next ``size`` bytes, or fewer at the end of the shard."""
        size = sys.maxsize if size is None or size < 0 else size
        pieces = []  # more than one if it is larger than the limit of prefetched bytes
        while size and (data := self._take(size, size)):
            pieces.append(data)
            size -= len(data)
        return b"".join(pieces)

    def read1(self, size: int = -1, /) -> bytes:
        """Return the available bytes, at most ``size``."""
        return self._take(sys.maxsize if size < 0 else size, 1)

    def peek(self, size: int = 0, /) -> bytes:
        """Return the available bytes, at most ``size``, without consuming them."""
        return self._fetch.peek(max(size, 1))

    def _take(self, size: int, least: int) -> bytes:
        data = self._fetch.take(size, least)
        self._until_extend -= len(data)
        if self._until_extend <= 0:
            self._until_extend = self._fetch.block_bytes
            self._extend()
        return data

    def close(self) -> None:
        """Stop reading."""
        if not self.closed:
            self._release()
            super().close()
