"""Prefetching of remote shards: threads read ahead in the current shard and in the next ones."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from wds_datapipes.io.openers import open_url
from wds_datapipes.io.remote.resuming_stream import ResumingStream
from wds_datapipes.io.urls import OpeningURL, is_remote, split_scheme

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["READ_AHEAD_BYTES", "ShardPrefetcher"]

T = TypeVar("T")

#: Default limit of prefetched bytes, for all shards together.
READ_AHEAD_BYTES = 32 << 20
#: Shards are read in blocks of at most this many bytes.
BLOCK_BYTES = 1 << 20
#: With a smaller buffer per shard than this, threads would wait for each other more than for the store.
MIN_SHARD_BYTES = 64 << 10
#: At most this many shards are prefetched before they are requested, however small they are.
MAX_NEXT_SHARDS = 7
#: At most this many URLs are taken from the source to find the next shard to prefetch.
MAX_PENDING = 1000
#: Seconds for which closing waits for a response that is no longer needed.
GRACE_S = 2.0


class ShardPrefetcher(Iterable[T]):
    """Yields the URLs of shards, and opens the shards; threads prefetch the remote ones.

    URLs are taken from the source in advance only while all of them are remote shards: a source that yields a local
    file may wait until the file was read. Errors of the source and of the shards are raised at the same point as
    without prefetching.

    Args:
        source: yields the URLs.
        max_bytes: the most bytes to prefetch into memory, for all shards together, raised to at least 64 KiB for each
            that is open and for the next one; 0 disables prefetching.
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
        #: URLs that were taken from the source and not yielded yet.
        self._pending: deque[tuple[int, T]] = deque()
        self._failure: Exception | None = None
        #: The shards that are being read, by index; the first ones may have been yielded.
        self._fetches: dict[int, PrefetchThread] = {}
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
                    self._fetch(self._current, str(url))  # its turn may come later
                yield url
            if self._failure is not None:
                raise self._failure
        finally:
            if self._open_shards == 1:
                self.close()

    def close(self) -> None:
        """Stop to prefetch all shards."""
        while self._fetches:
            _, fetch = self._fetches.popitem()
            fetch.close()

    def open(self, index: int, path: str, /, **options: Any) -> BinaryIO:
        """Open a shard that was yielded, by its index in the source, as `open_url` does."""
        if not self._is_prefetchable(path):
            return open_url(path, **options)
        self._fetch(index, path)
        self._extend()
        return cast(BinaryIO, PrefetchedStream(self._fetches[index], self._extend, partial(self._release, index)))

    def _fetch(self, index: int, url: str) -> None:
        """Start to prefetch a shard, unless it is being prefetched."""
        if index not in self._fetches:
            self._fetches[index] = PrefetchThread(url, self._options, self._shard_bytes)

    def _release(self, index: int) -> None:
        """Stop to prefetch a shard."""
        if (fetch := self._fetches.pop(index, None)) is not None:
            fetch.close()

    def _is_prefetchable(self, url: object) -> bool:
        if not self._max_bytes or not isinstance(url, str) or isinstance(url, OpeningURL):
            return False
        return is_remote(split_scheme(url)[0])

    def _extend(self) -> None:
        """Start to prefetch the next shards, as far as the limit allows."""
        most = self._open_shards + MAX_NEXT_SHARDS
        while self._can_extend and len(self._fetches) < most and len(self._pending) < MAX_PENDING:
            reserved = sum(fetch.reserved_bytes for fetch in self._fetches.values())
            if reserved + self._shard_bytes > self._max_bytes or not self._take():
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


class PrefetchThread:
    """A thread that prefetches a remote shard, up to a limit.

    Args:
        url: the shard.
        options: passed to `open_url`.
        max_bytes: the most bytes to buffer.
    """

    def __init__(self, url: str, options: Mapping[str, Any], max_bytes: int) -> None:
        self._url, self._options, self._max_bytes = url, options, max_bytes
        self._blocks: deque[bytes] = deque()
        self._buffered = self._consumed = 0
        self._size: int | None = None
        self._error: BaseException | None = None
        self._has_ended = False
        self._changed, self._stop = threading.Condition(), threading.Event()
        self._stream: BinaryIO | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="wds-read-ahead", daemon=True)
        self._thread.start()

    @property
    def reserved_bytes(self) -> int:
        """The most bytes that the thread may still buffer."""
        if self._has_ended:
            return self._buffered
        remaining = sys.maxsize if self._size is None else self._size - self._consumed
        return min(remaining, self._max_bytes)

    def take(self) -> bytes:
        """Wait for the next bytes and return them; ``b""`` at the end.

        Raises:
            Exception: the error that reading raised in the thread.
        """
        with self._changed:
            while not self._blocks and not self._has_ended:
                self._changed.wait()
            if self._blocks:
                block = self._blocks.popleft()
                self._buffered -= len(block)
                self._consumed += len(block)
                self._changed.notify_all()
                return block
        if self._error is not None:
            raise self._error
        return b""

    def close(self) -> None:
        """Stop reading."""
        if os.getpid() != self._process:  # in a forked process: the thread runs in the parent
            return
        with self._changed:
            self._stop.set()
            self._blocks.clear()
            self._changed.notify_all()
        if isinstance(self._stream, ResumingStream):
            self._stream.abandon()
        self._thread.join(GRACE_S)

    def _run(self) -> None:
        try:
            with open_url(self._url, **self._options, pause=self._pause) as stream:
                if not isinstance(stream, ResumingStream):
                    raise TypeError(f"expected a ResumingStream, got {type(stream).__name__}")
                self._stream, self._size = stream, stream.size
                block = min(BLOCK_BYTES, self._max_bytes)
                while not self._stop.is_set() and (data := stream.read_once(block)):
                    self._put(data)
        except BaseException as error:  # noqa: BLE001  `take` raises it
            self._error = error
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _put(self, data: bytes) -> None:
        with self._changed:
            self._blocks.append(data)
            self._buffered += len(data)
            self._changed.notify_all()
            while self._buffered >= self._max_bytes and not self._stop.is_set():
                self._changed.wait()

    def _pause(self, seconds: float) -> None:
        """Wait before a retry."""
        if self._stop.wait(seconds):
            raise AbandonedError


class AbandonedError(Exception):
    """The shard is no longer needed."""


class PrefetchedStream(io.RawIOBase):
    """A stream of prefetched bytes.

    Args:
        fetch: the thread that reads the shard.
        extend: called when buffered bytes were consumed.
        release: called when the stream is closed.
    """

    def __init__(self, fetch: PrefetchThread, extend: Callable[[], None], release: Callable[[], None]) -> None:
        self._fetch, self._extend, self._release = fetch, extend, release
        self._block = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        """Read up to ``len(buffer)`` bytes; 0 at the end."""
        if not self._block:
            self._block = memoryview(self._fetch.take())
            self._extend()
        view = memoryview(buffer).cast("B")
        size = min(len(view), len(self._block))
        view[:size] = self._block[:size]
        self._block = self._block[size:]
        return size

    def close(self) -> None:
        """Stop reading."""
        if not self.closed:
            self._release()
            super().close()
