"""Prefetching of remote shards: threads read ahead in the current shard and in the next ones."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from wds_datapipes.io.openers import open_url
from wds_datapipes.io.remote.resuming_stream import ResumingStream
from wds_datapipes.io.urls import OpeningURL, is_remote, split_scheme

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["READ_AHEAD_BYTES", "ShardPrefetcher"]

T = TypeVar("T")

#: How much is read ahead by default, of all shards together.
READ_AHEAD_BYTES = 32 << 20
#: Shards are read in blocks of at most this many bytes.
BLOCK_BYTES = 1 << 20
#: With less room than this, threads would wait for each other more than for a store.
LEAST_BYTES = 128 << 10
#: No more shards than this are read at a time, however small they are.
MOST_SHARDS = 8
#: At most this many URLs are taken from the source to find the next shard to prefetch.
MOST_ADDRESSES = 1000
#: How long the end of a pass waits for a response that is no longer needed, in seconds.
GRACE_S = 2.0


class ShardPrefetcher(Iterable[T]):
    """Yields the URLs of shards, and opens the shards; threads prefetch the remote ones.

    One address more than the present one is taken from the source only while all of these are remote shards: who yields
    the path of a local file may wait until it was read. Errors of the source, and those of a shard, are raised where
    they would be if nothing were read ahead.

    Args:
        source: yields the addresses.
        most_bytes: the most bytes to prefetch into memory, of all shards together: 128 KiB or more; 0
            is nothing.
        options: what the shards are opened with, as for `open_url`.
        is_wanted: whether all of a shard will be read, by its number in the source.
    """

    def __init__(
        self, source: Iterable[T], most_bytes: int, options: Mapping[str, Any], is_wanted: Callable[[int], bool]
    ) -> None:
        self._source: Iterator[tuple[int, T]] | None = enumerate(source)
        self._most = max(most_bytes, LEAST_BYTES) if most_bytes else 0
        self._options, self._is_wanted = options, is_wanted
        #: What came from the source, and was not yielded yet.
        self._waiting: deque[tuple[int, T]] = deque()
        self._failure: Exception | None = None
        #: The shards that are read, by their numbers; the first may be the one that was yielded last.
        self._fetches: dict[int, PrefetchThread] = {}
        self._now = -1
        self._goes_on = True

    def __iter__(self) -> Iterator[T]:
        try:
            while self._waiting or self._take():
                if (last := self._fetches.pop(self._now, None)) is not None:
                    last.close()
                self._now, address = self._waiting.popleft()
                self._goes_on = True
                yield address
            if self._failure is not None:
                raise self._failure
        finally:  # also if iteration is abandoned
            while self._fetches:
                _, fetch = self._fetches.popitem()
                fetch.close()

    def open(self, path: str, /, **options: Any) -> BinaryIO:
        """Open the shard that was yielded last, as `open_url` does."""
        if not self._is_fetched(path):
            return open_url(path, **options)
        if self._now not in self._fetches:
            self._fetches[self._now] = PrefetchThread(path, options, self._most // 2)
        self._extend()
        return cast(BinaryIO, PrefetchedStream(self._fetches[self._now], self._extend))

    def _is_fetched(self, address: object) -> bool:
        if not self._most or not isinstance(address, str) or isinstance(address, OpeningURL):
            return False
        return is_remote(split_scheme(address)[0])

    def _extend(self) -> None:
        """Start to prefetch the next shards, as far as the limit allows."""
        while self._goes_on and len(self._fetches) < MOST_SHARDS and len(self._waiting) < MOST_ADDRESSES:
            held = sum(fetch.claim for fetch in self._fetches.values())
            if held + self._most // 2 > self._most or not self._take():
                return
            number, address = self._waiting[-1]
            self._goes_on = self._is_fetched(address)
            if self._goes_on and self._is_wanted(number):
                self._fetches[number] = PrefetchThread(str(address), self._options, self._most // 2)

    def _take(self) -> bool:
        """Take a URL from the source; return whether there was one."""
        if self._source is None:
            return False
        try:
            self._waiting.append(next(self._source))
        except StopIteration:
            self._source = None
        except Exception as error:  # noqa: BLE001  it is raised once the shards before it were read
            self._source, self._failure = None, error
        return self._source is not None


class PrefetchThread:
    """A thread that prefetches a remote shard, up to a limit.

    Args:
        url: the shard.
        options: for `open_url`.
        most_bytes: how much it may hold.
    """

    def __init__(self, url: str, options: Mapping[str, Any], most_bytes: int) -> None:
        self._url, self._options, self._most = url, options, most_bytes
        self._blocks: deque[bytes] = deque()
        self._held = self._taken = 0
        self._size: int | None = None
        self._error: BaseException | None = None
        self._has_ended = False
        self._changed, self._stop = threading.Condition(), threading.Event()
        self._stream: BinaryIO | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="wds-read-ahead", daemon=True)
        self._thread.start()

    @property
    def claim(self) -> int:
        """The most bytes that it may hold."""
        if self._has_ended:
            return self._held
        left = sys.maxsize if self._size is None else self._size - self._taken
        return min(left, self._most)

    def take(self) -> bytes:
        """Wait for the next bytes and return them, none at the end.

        Raises:
            Exception: what reading them has raised.
        """
        with self._changed:
            while not self._blocks and not self._has_ended:
                self._changed.wait()
            if self._blocks:
                block = self._blocks.popleft()
                self._held -= len(block)
                self._taken += len(block)
                self._changed.notify_all()
                return block
        if self._error is not None:
            raise self._error
        return b""

    def close(self) -> None:
        """Stop reading."""
        if os.getpid() != self._process:  # it was forked meanwhile, and the thread is the parent's
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
                    raise TypeError(f"{type(stream).__name__} is no stream of a store")
                self._stream, self._size = stream, stream.size
                block = min(BLOCK_BYTES, self._most)
                while not self._stop.is_set() and (data := stream.read_once(block)):
                    self._put(data)
        except BaseException as error:  # noqa: BLE001  it is raised where the shard is read
            self._error = error
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _put(self, data: bytes) -> None:
        with self._changed:
            self._blocks.append(data)
            self._held += len(data)
            self._changed.notify_all()
            while self._held >= self._most and not self._stop.is_set():
                self._changed.wait()

    def _pause(self, seconds: float) -> None:
        """Wait before the store is asked again."""
        if self._stop.wait(seconds):
            raise AbandonedError


class AbandonedError(Exception):
    """The shard is no longer needed."""


class PrefetchedStream(io.RawIOBase):
    """A stream of prefetched bytes.

    Args:
        fetch: the shard; it is closed with this.
        extend: is called when there is room for more.
    """

    def __init__(self, fetch: PrefetchThread, extend: Callable[[], None]) -> None:
        self._fetch, self._extend = fetch, extend
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
            self._fetch.close()
            super().close()
