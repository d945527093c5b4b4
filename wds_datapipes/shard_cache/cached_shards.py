"""Cached shards of a stage: opens local copies, and prefetches the next ones."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from wds_datapipes.errors import ShardError, WdsError
from wds_datapipes.interrupts import defer_interrupts
from wds_datapipes.io.openers import open_url, redact
from wds_datapipes.io.url_safety import check_url
from wds_datapipes.io.urls import OpeningURL
from wds_datapipes.redaction import short_repr
from wds_datapipes.shard_cache.download import CacheFullError, DownloadRequest, DownloadStopped
from wds_datapipes.shard_cache.store import CacheFolder

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CachedShard", "KnownShards", "cache_wds_shards"]

#: How long the end of a pass waits for a download to stop, in seconds; afterwards it stops in the background.
GRACE_S = 2.0
#: Standard input cannot be read twice, so it is never cached.
STANDARD_INPUT = "-"

KnownShards = Mapping[str, tuple[int | None, str | None]]
"""URL -> the size of the shard in bytes, and its SHA-256, or None for what is unknown."""


class CachedShard(OpeningURL):
    """The URL of a shard that opens its local copy, and downloads it first if needed.

    A shard that is skipped, for example after a state is loaded, is not downloaded.
    """

    _folder: CacheFolder
    _size: int | None
    _sha256: str | None
    _following: Sequence[CachedShard]
    _prefetcher: CopyPrefetch | None

    def __new__(cls, url: str, folder: CacheFolder, size: int | None = None, sha256: str | None = None) -> Self:
        """Make a URL that opens its copy in ``folder``."""
        self = super().__new__(cls, url)
        self.local_path = str(folder.entry(url).path)
        self._folder, self._size, self._sha256 = folder, size, sha256
        self._following, self._prefetcher = (), None
        return self

    def __reduce__(self) -> tuple[type[CachedShard], tuple[Any, ...]]:
        return CachedShard, (str(self), self._folder, self._size, self._sha256)

    def prefetch_after(self, following: Sequence[CachedShard], prefetcher: CopyPrefetch) -> Self:
        """Set the shards to prefetch once this one is open."""
        self._following, self._prefetcher = following, prefetcher
        return self

    def opened(self, **options: Any) -> BinaryIO:
        """Open the copy, or the source if the cache is full."""
        try:
            copy = self._folder.open(self._request(options))
        except CacheFullError:
            self._folder.warn_cache_full(redact(self))
            copy = None
        if self._prefetcher is not None:
            self._prefetcher.fetch(self._following, options)
        return open_url(str(self), **options) if copy is None else copy

    def disown(self, error: ShardError) -> None:
        """Remove the copy."""
        self._folder.discard(str(self), error)

    def fetch(self, options: Mapping[str, Any], stop: threading.Event) -> None:
        """Download the copy, unless another process is downloading it or the cache is full."""
        copy = self._folder.open(self._request(options), wait=False, should_continue=lambda: not stop.is_set())
        if copy is not None:
            copy.close()

    def _request(self, options: Mapping[str, Any]) -> DownloadRequest:
        """Return the request to download the shard.

        Raises:
            UnsafeInputError: the options allow only files on a network, and the shard is not one.
        """
        # Before its size is requested.
        check_url(str(self), allow_local_files=options.get("allow_local_files", True))
        return DownloadRequest(str(self), self._size, self._sha256, options)


class CopyPrefetch:
    """Downloads copies in a thread that is started on demand."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[CachedShard, Mapping[str, Any]]] = deque()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        # Also at interpreter exit, so that no partial download remains.
        self._end = weakref.finalize(self, _end, self._wake, self._stop)

    def fetch(self, shards: Iterable[CachedShard], options: Mapping[str, Any]) -> None:
        """Download these shards in order, instead of those requested before."""
        self._waiting.clear()
        self._waiting.extend((shard, options) for shard in shards)
        if not self._waiting or self._stop.is_set():
            return
        if self._thread is None:
            thread = threading.Thread(
                target=_fetch, args=(self._waiting, self._wake, self._stop), name="wds-cache", daemon=True
            )
            with defer_interrupts():  # otherwise `close` could wait for a thread that was not started
                thread.start()
                self._thread = thread
        self._wake.set()

    def close(self) -> None:
        """Stop downloading, and remove incomplete files."""
        self._end()
        if self._thread is not None:
            self._thread.join(GRACE_S)


def _end(wake: threading.Event, stop: threading.Event) -> None:
    stop.set()
    wake.set()


def _fetch(waiting: deque[tuple[CachedShard, Mapping[str, Any]]], wake: threading.Event, stop: threading.Event) -> None:
    while wake.wait() and not stop.is_set():
        wake.clear()
        while waiting and not stop.is_set():
            try:
                shard, options = waiting.popleft()
            except IndexError:  # cleared by another thread
                break
            try:
                shard.fetch(options, stop)
            except (CacheFullError, DownloadStopped, WdsError):  # opening the shard raises it too
                continue


def cache_wds_shards(
    source: Iterable[str | os.PathLike[str]], folder: CacheFolder, *, prefetch: int, known: KnownShards
) -> Generator[str, None, None]:
    """Yield each shard of ``source`` as a `CachedShard`, and prefetch the next ones while it is read."""
    prefetcher = CopyPrefetch()
    waiting: deque[CachedShard] = deque()
    try:
        for item in source:
            if not isinstance(item, str | os.PathLike):
                raise TypeError(
                    f"cache_wds_shards copies shards by their URL, so its source must yield str, not "
                    f"{type(item).__name__}: {short_repr(item)}"
                )
            url = os.fspath(item)
            if url == STANDARD_INPUT:
                while waiting:
                    first = waiting.popleft()
                    yield first.prefetch_after(tuple(waiting), prefetcher)
                yield url
                continue
            waiting.append(CachedShard(url, folder, *known.get(url, (None, None))))
            if len(waiting) > prefetch:
                first = waiting.popleft()
                yield first.prefetch_after(tuple(waiting), prefetcher)
        while waiting:
            first = waiting.popleft()
            yield first.prefetch_after(tuple(waiting), prefetcher)
    finally:
        prefetcher.close()
