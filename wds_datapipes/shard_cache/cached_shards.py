"""Cached shards of a stage: opens the local copies, and prefetches the next ones."""

from __future__ import annotations

import os
import reprlib
import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from wds_datapipes.errors import ShardError, WdsError
from wds_datapipes.io.openers import open_url, redact
from wds_datapipes.io.url_safety import refuse_unsafe
from wds_datapipes.io.urls import OpeningURL
from wds_datapipes.shard_cache.download import CacheFullError, DownloadStopped, WantedShard
from wds_datapipes.shard_cache.store import CacheFolder

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CachedShard", "Known", "cache_wds_shards"]

#: How long the end of a pass waits for the end of a download, in seconds; after that it ends by itself.
GRACE_S = 2.0
#: What cannot be read twice.
STANDARD_INPUT = "-"

Known = Mapping[str, tuple[int, str | None]]
"""URL -> the size of the shard in bytes, and its SHA-256 where that is known."""


class CachedShard(OpeningURL):
    """The URL of a shard that opens its local copy, and downloads it first if needed.

    Nothing is downloaded for a shard that is skipped, as when a state after it is loaded.
    """

    _folder: CacheFolder
    _size: int | None
    _sha256: str | None
    _following: Sequence[CachedShard]
    _ahead: CopyPrefetch | None

    def __new__(cls, url: str, folder: CacheFolder, size: int | None = None, sha256: str | None = None) -> Self:
        """Make a URL that opens its copy in ``folder``."""
        self = super().__new__(cls, url)
        self.local_path = str(folder.entry(url).path)
        self._folder, self._size, self._sha256 = folder, size, sha256
        self._following, self._ahead = (), None
        return self

    def __reduce__(self) -> tuple[type[CachedShard], tuple[Any, ...]]:
        return CachedShard, (str(self), self._folder, self._size, self._sha256)

    def precede(self, following: Sequence[CachedShard], ahead: CopyPrefetch) -> Self:
        """Set the shards to prefetch once this one is open."""
        self._following, self._ahead = following, ahead
        return self

    def opened(self, **options: Any) -> BinaryIO:
        """Open the copy, or the source if the cache is full."""
        try:
            copy = self._folder.open(self.wanted(options))
        except CacheFullError:
            self._folder.warn_of_no_room(redact(self))
            copy = None
        if self._ahead is not None:
            self._ahead.fetch(self._following, options)
        return open_url(str(self), **options) if copy is None else copy

    def disown(self, error: ShardError) -> None:
        """Remove the copy."""
        self._folder.discard(str(self), error)

    def fetch(self, options: Mapping[str, Any], stop: threading.Event) -> None:
        """Download the copy, unless another process does or the cache is full."""
        copy = self._folder.open(self.wanted(options), wait=False, is_wanted=lambda: not stop.is_set())
        if copy is not None:
            copy.close()

    def wanted(self, options: Mapping[str, Any]) -> WantedShard:
        """Return the shard to download.

        Raises:
            RefusedURLError: the options say that nothing is opened but files on a network, and it is something else.
        """
        if options.get("safe"):
            refuse_unsafe(str(self))  # before its size is asked for
        return WantedShard(str(self), self._size, self._sha256, options)


class CopyPrefetch:
    """Downloads copies in a thread, which is started when needed."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[CachedShard, Mapping[str, Any]]] = deque()
        self._stirred, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        # Also at the end of the interpreter, so that no part is left of what is being fetched.
        self._end = weakref.finalize(self, _end, self._stirred, self._stop)

    def fetch(self, shards: Iterable[CachedShard], options: Mapping[str, Any]) -> None:
        """Download these shards in order, in place of those requested before."""
        self._waiting.clear()
        self._waiting.extend((shard, options) for shard in shards)
        if not self._waiting or self._stop.is_set():
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=_fetch, args=(self._waiting, self._stirred, self._stop), name="wds-cache", daemon=True
            )
            self._thread.start()
        self._stirred.set()

    def close(self) -> None:
        """Stop downloading, and remove incomplete files."""
        self._end()
        if self._thread is not None:
            self._thread.join(GRACE_S)


def _end(stirred: threading.Event, stop: threading.Event) -> None:
    stop.set()
    stirred.set()


def _fetch(
    waiting: deque[tuple[CachedShard, Mapping[str, Any]]], stirred: threading.Event, stop: threading.Event
) -> None:
    while stirred.wait() and not stop.is_set():
        stirred.clear()
        while waiting and not stop.is_set():
            try:
                shard, options = waiting.popleft()
            except IndexError:  # it was cleared meanwhile
                break
            try:
                shard.fetch(options, stop)
            except (CacheFullError, DownloadStopped, WdsError):  # opening the shard raises it, too
                continue


def cache_wds_shards(
    source: Iterable[str | os.PathLike[str]], folder: CacheFolder, *, prefetch: int, known: Known
) -> Generator[str, None, None]:
    """Yield each shard of ``source`` as a `CachedShard`, and prefetch the next ones while it is read."""
    ahead = CopyPrefetch()
    waiting: deque[CachedShard] = deque()
    try:
        for address in source:
            if not isinstance(address, str | os.PathLike):
                raise TypeError(
                    f"cache_wds_shards copies shards by their URL, so its source has to yield str, not "
                    f"{type(address).__name__}: {reprlib.repr(address)}"
                )
            url = os.fspath(address)
            if url == STANDARD_INPUT:
                while waiting:
                    first = waiting.popleft()
                    yield first.precede(tuple(waiting), ahead)
                yield url
                continue
            waiting.append(CachedShard(url, folder, *known.get(url, (None, None))))
            if len(waiting) > prefetch:
                first = waiting.popleft()
                yield first.precede(tuple(waiting), ahead)
        while waiting:
            first = waiting.popleft()
            yield first.precede(tuple(waiting), ahead)
    finally:
        ahead.close()
