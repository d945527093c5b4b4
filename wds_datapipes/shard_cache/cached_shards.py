"""Cached shards: open local copies of shards, and download others in the background."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from wds_datapipes.errors import ShardError
from wds_datapipes.io.daemon_threads import DaemonThreads, close_result
from wds_datapipes.io.openers import open_url, redact
from wds_datapipes.io.read_ahead import ReadAhead
from wds_datapipes.io.remote.remote_file import FileFacts
from wds_datapipes.io.urls import OpeningURL, check_url
from wds_datapipes.redaction import short_repr
from wds_datapipes.redaction.signatures import without_signature
from wds_datapipes.shard_cache.download import CacheFullError, DownloadRequest, UncachedError
from wds_datapipes.shard_cache.store import CacheFolder
from wds_datapipes.types import ShardInfo

if TYPE_CHECKING:
    from typing_extensions import Self

#: Standard input cannot be read twice, so it is never cached.
STANDARD_INPUT = "-"

KnownShards = Mapping[str, tuple[int | None, str | None]]
"""Maps URLs, without their signatures, to the size of the shard in bytes and its SHA-256; None if unknown."""


class CachedShard(OpeningURL):
    """The URL of a shard that opens its local copy, downloading it first if needed.

    A shard that is skipped, for example after a state is loaded, is not downloaded.
    """

    _folder: CacheFolder
    _size: int | None
    _sha256: str | None
    _following: Sequence[CachedShard] = ()
    _prefetcher: CopyPrefetch | None = None
    _prefetched: Future[BinaryIO | None] | None = None

    def __new__(cls, url: str, folder: CacheFolder, size: int | None = None, sha256: str | None = None) -> Self:
        """Make a URL that opens its copy in ``folder``."""
        self = super().__new__(cls, url)
        self.local_path = str(folder.path_of(url))
        self._folder, self._size, self._sha256 = folder, size, sha256
        return self

    def __reduce__(self) -> tuple[type[CachedShard], tuple[Any, ...]]:
        return CachedShard, (str(self), self._folder, self._size, self._sha256)

    def prefetch_after(self, following: Sequence[CachedShard], prefetcher: CopyPrefetch) -> Self:
        """Set the shards to prefetch once this shard is open."""
        self._following, self._prefetcher = following, prefetcher
        return self

    def opened(self, **options: Any) -> BinaryIO:
        """Open the copy, or the source if the cache is full."""
        request = self._request(options)
        copy = self._take()
        try:
            copy = copy or self._folder.open(request)
        except UncachedError as error:
            self._folder.warn_uncached(request, error)
        if self._prefetcher is not None:
            self._prefetcher.fetch(self._following, options)
        return open_url(str(self), **options) if copy is None else copy

    def _take(self) -> BinaryIO | None:
        """Return the prefetched copy, or None; if prefetching failed, opening the copy raises the error again."""
        prefetched, self._prefetched = self._prefetched, None
        with suppress(Exception):
            if prefetched is not None and not prefetched.cancel():
                return prefetched.result()
        return None

    def disown(self, error: ShardError) -> None:
        """Remove the copy."""
        self._folder.discard(str(self), error)

    def prefetch(self, options: Mapping[str, Any], threads: DaemonThreads) -> None:
        """Download the copy in a thread, unless another process is downloading it or the cache is full."""
        if self._prefetched is None:
            fetch = partial(self._fetch, options, threads.is_closed)
            self._prefetched = threads.submit(fetch)

    def _fetch(self, options: Mapping[str, Any], stop: threading.Event) -> BinaryIO | None:
        return self._folder.open(self._request(options), wait=False, should_continue=lambda: not stop.is_set())

    def release(self) -> None:
        """Close the prefetched copy, if any."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and not prefetched.cancel():
            prefetched.add_done_callback(close_result)

    def _request(self, options: Mapping[str, Any]) -> DownloadRequest:
        """Return the request to download the shard.

        Raises:
            UnsafeInputError: the options allow only files on a network, but the shard is not one.
        """
        # Check before requesting the size.
        check_url(str(self), allow_local_files=options.get("allow_local_files", True))
        return DownloadRequest(str(self), FileFacts(self._size), self._sha256, options)


class CopyPrefetch:
    """Downloads copies in a thread and pins them until they are opened."""

    def __init__(self) -> None:
        self._threads = DaemonThreads(1, "wds-cache")
        self._waiting: Sequence[CachedShard] = ()

    def fetch(self, shards: Sequence[CachedShard], options: Mapping[str, Any]) -> None:
        """Download these shards, in order, instead of earlier ones; an error is raised when its shard is opened."""
        for shard in self._waiting:
            if all(shard is not each for each in shards):  # equal URLs may have several copies
                shard.release()
        self._waiting = shards
        for shard in shards:
            shard.prefetch(options, self._threads)

    def close(self) -> None:
        """Stop the downloads and release the copies."""
        self._threads.close()
        for shard in self._waiting:
            shard.release()


def known_shards(listed: Iterable[ShardInfo]) -> KnownShards:
    """Return the sizes and digests of the shards in a manifest."""
    return {without_signature(each.url): (each.bytes or None, each.sha256 or None) for each in listed}


def cache_wds_shards(
    source: Iterable[str | os.PathLike[str]], folder: CacheFolder, *, prefetch: int, known: KnownShards
) -> Generator[str, None, None]:
    """Yield each shard of ``source`` as a `CachedShard`; prefetch the next ones while it is read."""
    prefetcher = CopyPrefetch()
    waiting = ReadAhead[CachedShard](1 + prefetch)

    def take() -> str:
        return waiting.take().prefetch_after(tuple(waiting), prefetcher)

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
                    yield take()
                yield url
            else:
                waiting.add(CachedShard(url, folder, *known.get(without_signature(url), (None, None))))
                if not waiting.has_room():
                    yield take()
        while waiting:
            yield take()
    finally:
        prefetcher.close()


class WarmedShard(NamedTuple):
    """The result of a download."""

    url: str
    #: The size of the copy.
    bytes: int = 0
    #: Whether the copy existed before.
    was_cached: bool = False
    #: The reason why there is no copy, or "".
    error: str = ""


def warm_cache(
    copies: CacheFolder, urls: Sequence[str], *, known: KnownShards, options: Mapping[str, Any], at_once: int
) -> Iterator[WarmedShard]:
    """Download shards in parallel and yield the result of each.

    Args:
        copies: the folder.
        urls: the shards.
        known: their expected sizes and digests.
        options: the options to open them with.
        at_once: the number of concurrent downloads.

    Raises:
        CacheError: the folder cannot be written.
    """

    def fetch(url: str) -> WarmedShard | None:
        """Download a shard; return None if there is no space for it."""
        was_cached = copies.entry(url).path.exists()
        size, sha256 = known.get(without_signature(url), (None, None))
        try:
            copy = copies.open(
                DownloadRequest(url, FileFacts(size), sha256, options),
                should_continue=lambda: not threads.is_closed.is_set(),
            )
        except CacheFullError:
            return None
        except (ShardError, UncachedError) as error:
            return WarmedShard(url, error=str(error))
        with cast(BinaryIO, copy):  # it waits for other processes
            size = os.fstat(cast(BinaryIO, copy).fileno()).st_size
            return WarmedShard(url, size, was_cached or copies.entry(url).is_link)

    threads, postponed = DaemonThreads(at_once, "wds-cache"), []
    try:
        for url, future in [(url, threads.submit(partial(fetch, url))) for url in urls]:
            found = future.result()
            if found is None:  # concurrent downloads cannot be evicted yet
                postponed.append(url)
            else:
                yield found
        for url in postponed:
            error = f"{redact(url)} is larger than the cache, or the cache is full of copies in use"
            yield fetch(url) or WarmedShard(url, error=error)
    finally:
        threads.close()
