"""Open shards: those that a process keeps open for reading by index, and their copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO, TypeVar

from wds_datapipes.counters import Counters
from wds_datapipes.errors import CacheError
from wds_datapipes.index.format.options import AccessOptions
from wds_datapipes.index.format.origin import origin_of
from wds_datapipes.index.format.shard_facts import ShardFacts
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.index.read.fetch import ShardRanges
from wds_datapipes.io.daemon_threads import DaemonThreads, close_result, set_result
from wds_datapipes.io.openers import local_path
from wds_datapipes.io.process_lock import ProcessLock
from wds_datapipes.io.remote.in_flight import abort_request
from wds_datapipes.io.remote.remote_file import FileFacts
from wds_datapipes.io.request_threads import RequestThreads
from wds_datapipes.shard_cache.download import CacheFullError, DownloadRequest, UncachedError
from wds_datapipes.shard_cache.entry import Entry, stamp
from wds_datapipes.shard_cache.eviction import LeastRecentlyUsed, Priority
from wds_datapipes.shard_cache.store import CacheFolder

T = TypeVar("T")

#: The maximum number of shards that are opened at the same time.
OPENED_AT_ONCE = 16


class OpenShards:
    """A bounded number of open shards of a dataset; the least recently used one is closed for another.

    Args:
        urls: the shards.
        read_index: returns the index of a shard.
        access: how shards are opened, and whether they are copied.
        priority: the order in which copies are evicted.
        counters: the counters of the pipeline.

    Attributes:
        is_local: whether all shards are local.
        cache: the copies of remote shards, if they are copied.
        is_closed: whether it was closed.
    """

    def __init__(
        self,
        urls: Sequence[str],
        read_index: Callable[[int], ShardIndex],
        access: AccessOptions,
        *,
        priority: Priority = Entry.last_use,
        counters: Counters | None = None,
    ) -> None:
        self._urls, self._read_index, self._access = urls, read_index, access
        self.counters = counters or Counters()
        self.is_local = all(local_path(url) is not None for url in urls)
        self._opened = LeastRecentlyUsed[int, Future[ShardRanges]](access.open_shards, _close)
        self.cache = (
            None if access.cache_dir is None else CacheFolder(access.cache_dir, access.cache_bytes, priority=priority)
        )
        self._is_ahead = False
        self._close_next: Callable[[], object] | None = None
        #: Held until the shards of the next epoch are closed, so that all threads wait for it.
        self._next_lock = ProcessLock()  # garbage collection may close these shards in a thread that holds it
        self.is_closed = False
        self._threads = DaemonThreads(OPENED_AT_ONCE, "wds-open")
        #: What reads ranges ahead.
        self.request_threads = None if self.is_local else RequestThreads("wds-read-ahead")

    def __getitem__(self, shard: int) -> ShardRanges:
        """Return a shard, which is opened if needed.

        Raises:
            ShardError: it cannot be opened.
            SidecarError: its index cannot be read.
        """
        self.open_soon([shard])
        opened = self._opened.pop(shard)
        ranges = opened.result()
        self._opened[shard] = opened
        return ranges

    def open_soon(self, shards: Iterable[int]) -> None:
        """Begin to open shards and read their indexes; close the least recently used shards."""
        wanted = [shard for shard in shards if shard >= 0]
        for shard in wanted:
            if shard in self._opened:
                self._opened.use(shard)  # first, so that none of them is closed for another
        for shard in wanted:
            if shard not in self._opened:
                self._opened.make_space()  # before another one is opened
                self._opened.add(shard, self.start(partial(self._open, shard)))

    def keep_only(self, shards: Iterable[int]) -> None:
        """Close all other shards if the space for copies is limited, because an open shard pins its copy."""
        if self._access.cache_bytes is not None:
            self._close_shards(self._opened.keys() - shards)

    def start(self, function: Callable[[], T]) -> Future[T]:
        """Call a function in a thread if there are remote shards, otherwise now."""
        if self.is_local:
            done = Future[T]()
            set_result(done, function)
            return done
        return self._threads.submit(function)

    def open_next(self, following: OpenShards, shards: Iterable[int], close_all: Callable[[], object]) -> None:
        """Let the open shards of the next epoch begin to open some shards and to download their copies.

        A shard that cannot be opened now is opened when it is due.

        Args:
            following: the open shards of the next epoch.
            shards: the shards.
            close_all: closes all shards of the next epoch, also those of joined datasets; called if this epoch needs
                the space of their copies.
        """
        following._is_ahead = True
        with self._next_lock:
            self._close_next = close_all
            following.open_soon(shards)

    def begin(self, counters: Counters) -> None:
        """Begin an epoch, and record the use of the copies of shards that were opened ahead."""
        self.counters, self._is_ahead = counters, False
        for shard, opened in [*self._opened.items()]:
            if opened.done() and (opened.cancelled() or opened.exception() is not None):
                del self._opened[shard]
            elif self.cache is not None:
                with suppress(OSError):  # there is no copy of a local shard
                    stamp(self.cache.path, self.cache.entry(self._urls[shard]).facts_path)

    def close(self) -> None:
        """Close all shards and abort the requests that read ahead."""
        self.is_closed = True
        with self._next_lock:  # from now on, no thread closes the shards of the next epoch
            self._close_next = None
        pools = [self._threads] if self.request_threads is None else [self._threads, self.request_threads]
        for pool in pools:
            pool.stop()
        self._close_shards([*self._opened])
        for pool in pools:
            pool.close(abort_request)

    def _close_shards(self, shards: Iterable[int]) -> None:
        for shard in shards:
            if (opened := self._opened.pop(shard, None)) is not None:  # another thread may be closing them, too
                _close(shard, opened)

    def _open(self, shard: int) -> ShardRanges:
        url, index, access = self._urls[shard], self._read_index(shard), self._access
        options: dict[str, Any] = {"counters": self.counters}
        if self.cache is not None and local_path(url) is None:
            known = index.facts.at(origin_of(url, access.storage_options))
            options["copy"] = self._open_copy(self.cache, url, known)
            options["copy_path"] = str(self.cache.path_of(url))
        ranges = ShardRanges(url, index, access.storage_options, **options)
        if ranges.path is None:
            ranges.keep_open()
        return ranges

    def _open_copy(self, cache: CacheFolder, url: str, facts: ShardFacts, *, is_last: bool = False) -> BinaryIO | None:
        """Return the copy of a shard, downloading it if needed; None if there is no space for it."""
        options = {"storage_options": self._access.storage_options, "counters": self.counters}
        request = DownloadRequest(url, FileFacts(facts.bytes, None, facts.etag), facts.sha256, options)
        is_ahead = self._is_ahead  # read now, because the epoch may begin during the download
        try:
            return cache.open(request, should_continue=lambda: not self.is_closed)
        except CacheFullError as error:
            if is_ahead:
                raise CacheError(f"The cache has no space for {request.name} yet") from None
            with self._next_lock:
                if (close_next := self._close_next) is not None:
                    close_next()
            if self.is_closed:
                raise
            if close_next is not None and not is_last:
                return self._open_copy(cache, url, facts, is_last=True)
            cache.warn_uncached(request, error)
        except UncachedError as error:
            cache.warn_uncached(request, error)
        return None


def _close(_shard: int, opened: Future[ShardRanges]) -> None:
    opened.add_done_callback(close_result)
