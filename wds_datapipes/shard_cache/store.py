"""Cache store: find or download copies of shards, and pin them while they are read."""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, ClassVar

from wds_datapipes.errors import CorruptShardError, ShardError, ShardOpenError, TruncatedShardError, WdsError
from wds_datapipes.io.file_lock import READ_ONLY, lock_file
from wds_datapipes.io.remote.remote_file import FileFacts
from wds_datapipes.io.urls import create_folder, is_file
from wds_datapipes.redaction.signatures import without_signature
from wds_datapipes.shard_cache.download import DownloadRequest, UncachedError, cache_error, fetch_copy
from wds_datapipes.shard_cache.entry import UNKNOWN, CopyFacts, Entry, UrlToName, digest_of, stamp
from wds_datapipes.shard_cache.eviction import Priority, evict, reserve_space
from wds_datapipes.shard_cache.prefilled import PrefilledShards, own_names
from wds_datapipes.system import lock_descriptor
from wds_datapipes.user_warnings import warn_user

LOGGER = logging.getLogger("wds_datapipes")

#: What is wrong with a file that was put into the cache before the shard was replaced, and what to do.
STALE = "is outdated. Delete it or replace it"


class CacheFolder:
    """A folder with complete copies of shards, shared by any number of processes on any number of hosts.

    A copy is locked during its download and pinned while it is read, by file locks that the operating system releases
    when a process ends. Each shard is therefore downloaded once, even if many processes request it. When an object of
    this class, or a run, first opens a copy, it asks the store, if necessary, whether the shard has changed.

    Args:
        folder: the folder, which is created if needed.
        max_bytes: the maximum total size of all copies; None means that only the disk limits it.
        verbose: log each download as a warning, which is shown even if logging is not configured.
        priority: the order of eviction; by default, the least recently used copy is evicted first.
        url_to_name: returns what identifies a shard; by default, its URL without the signature of a presigned one.
        run: identifies processes that use the same version of each shard. One of them asks the store for the version,
            and raises an error if the store does not answer. By default, each process asks; if a store does not
            answer, the process warns, uses the copy and asks no store again.

    Raises:
        CacheError: the folder cannot be created.
    """

    #: The folders and limits to which this process has kept them.
    _limited: ClassVar[set[tuple[str, int | None]]] = set()

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int | None = None,
        *,
        verbose: bool = False,
        priority: Priority = Entry.last_use,
        url_to_name: UrlToName = without_signature,
        run: str = "",
    ) -> None:
        self.path = Path(folder)
        self._url_to_name, self._prefilled = url_to_name, PrefilledShards()
        self.run, self._is_offline, self._compared = run, False, set[str]()
        self.verbose, self.priority = verbose, priority
        self.max_bytes = max_bytes
        self._warned = False

    def warn_uncached(self, request: DownloadRequest, error: UncachedError) -> None:
        """Count a miss; warn that a shard is read from its source, but only once that the cache is full."""
        request.count("cache_misses")
        if str(error):
            warn_user(f"{request.name} is read from its source: {error}")
        elif not self._warned:
            self._warned = True
            warn_user(
                f"The cache {self.path} has no space for {request.name}: it is limited to {self.max_bytes} bytes, and "
                "copies in use cannot be evicted. Shards that do not fit are read from their source. Raise the "
                "limit: max_bytes, or cache_bytes of AccessOptions"
            )

    def open(
        self, request: DownloadRequest, *, wait: bool = True, should_continue: Callable[[], bool] = lambda: True
    ) -> BinaryIO | None:
        """Return the copy of a shard, opened and pinned until it is closed; download it if needed.

        Args:
            request: the shard.
            wait: wait if another process is downloading it; otherwise, return None.
            should_continue: called periodically during the download; False stops it.

        Raises:
            UncachedError: there is no space for the copy, or an outdated file has been put into the folder for it.
            DownloadStopped: ``should_continue`` returned False.
            CacheError: the folder cannot be used.
            ShardError: the shard cannot be read, or does not have the expected size or digest.
        """
        entry = self.entry(request.url)
        try:
            self._keep_limit()
            if (copy := self._open_pinned(entry, request)) is not None:
                return request.count("cache_hits", copy)
            create_folder(self.path)
            with lock_file(entry.lock, wait=wait) as descriptor:
                if descriptor is None:
                    return None
                # Another process may have downloaded it meanwhile.
                copy = self._open_pinned(entry, request, is_locked=True)
                copy = copy or self._adopt(entry, request)
                if copy is not None:
                    return request.count("cache_hits", copy)
                return request.count("cache_misses", self._fetch(entry, request, should_continue))
        except ShardError:
            raise
        except OSError as error:
            is_new = error.errno in READ_ONLY and not entry.path.exists()
            if is_new and (copy := self._adopt(entry, request)) is not None:
                return request.count("cache_hits", copy)
            raise cache_error(self.path, error) from error

    def entry(self, url: str) -> Entry:
        """Return the entry of a shard."""
        return Entry.of(self.path, url, self._url_to_name)

    def path_of(self, url: str) -> Path:
        """Return the path of the copy of a shard, which may not exist yet."""
        path = self.entry(url).path
        if path.exists() or os.access(self.path, os.W_OK):
            return path
        return next((file for name in own_names(url) if is_file(file := self.path / name)), path)

    def discard(self, url: str, error: WdsError) -> None:
        """Remove a damaged copy, so that the shard will be downloaded again."""
        entry = self.entry(url)
        with suppress(OSError):  # the folder may be gone or read-only
            if evict(entry):
                LOGGER.warning(
                    "Removed the copy %s, which cannot be read to its end (%s). The shard is downloaded again when it "
                    "is needed",
                    *(entry.path, type(error).__name__),
                )

    def _fetch(self, entry: Entry, request: DownloadRequest, should_continue: Callable[[], bool]) -> BinaryIO:
        LOGGER.debug("Downloading %s to %s", request.name, entry.path)
        begin = time.monotonic()
        try:
            copy = fetch_copy(self, entry, request, should_continue)
        except (CorruptShardError, TruncatedShardError) as error:
            LOGGER.warning("%s. Trying again", error)
            copy = fetch_copy(self, entry, request, should_continue, is_last=True)
        LOGGER.log(
            logging.WARNING if self.verbose else logging.INFO,
            "Downloaded %s: %d bytes in %.1f s, to %s",
            *(request.name, os.fstat(copy.fileno()).st_size, time.monotonic() - begin, entry.path),
        )
        self._compared.add(entry.digest)
        return copy

    def _keep_limit(self) -> None:
        """Evict the copies beyond the limit, once in each process, as another one may have had a higher limit."""
        limit = os.path.abspath(self.path), self.max_bytes  # noqa: PTH100  of a path that may not exist
        if self.max_bytes is None or limit in CacheFolder._limited or not self.path.is_dir():
            return
        CacheFolder._limited.add(limit)
        try:
            reserve_space(self.path, None, 0, self.max_bytes, self.priority)
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise

    def _adopt(self, entry: Entry, request: DownloadRequest) -> BinaryIO | None:
        """Return the file that has been put into the folder for a shard.

        Indexes of a run have none. An untrusted URL cannot choose a local file by its name.
        """
        is_excluded = self.run or request.options.get("allow_local_files") is False
        return None if is_excluded else self._prefilled.adopt(entry, request, self._ask)

    def _ask(self, request: DownloadRequest) -> FileFacts:
        """Return what the store says about a shard, or nothing once a store has not answered."""
        if self._is_offline:
            return UNKNOWN
        try:
            return request.ask(**{} if self.run else {"retries": 0})
        except ShardOpenError as error:
            if self.run:
                raise
            self._is_offline = True
            LOGGER.warning("Using copies without asking their store whether the shards have changed: %s", error)
            return UNKNOWN

    def _open_pinned(self, entry: Entry, request: DownloadRequest, *, is_locked: bool = False) -> BinaryIO | None:
        """Return the pinned copy if it exists and is valid.

        Args:
            entry: the copy.
            request: the request for the shard, whose size and digest may be known.
            is_locked: whether the caller holds the lock, so that a damaged copy may be removed.
        """
        while True:
            try:
                copy = io.FileIO(entry.path, "r")
            except FileNotFoundError:
                return None
            try:
                lock_descriptor(copy.fileno(), is_shared=True)  # waits if another process is removing it
                if not os.fstat(copy.fileno()).st_nlink:
                    copy.close()
                    continue
                facts = entry.facts()
                damage = _describe_damage(copy, facts)
                if damage is None and facts is not None:
                    damage = self._describe_difference(facts, request, entry, is_locked=is_locked)
                    if damage is not None and is_locked and entry.is_link:
                        # Its size may be that of the new version, so it must not be taken for a copy of that one.
                        raise UncachedError(f"{entry.path.resolve()}, which was put into the cache, {STALE}: {damage}")
                if damage is None:
                    copy.seek(0)
                    stamp(self.path, entry.facts_path)
                    return copy
            except BaseException:
                copy.close()
                raise
            copy.close()
            if is_locked:
                LOGGER.warning("The copy %s is not used: %s. Downloading it again", entry.path, damage)
                entry.remove()
            return None

    def _describe_difference(
        self, facts: CopyFacts, request: DownloadRequest, entry: Entry, *, is_locked: bool
    ) -> str | None:
        """Return how a copy differs from the version that an index, a manifest or the store describes, or None."""
        found = _describe_version(facts, request.known, request.sha256)
        if found is not None or not request.asks or self._is_offline or entry.digest in self._compared:
            return found
        if self.run and facts.run == self.run:
            return None
        if self.run and not is_locked and os.access(self.path, os.W_OK):
            return "no process of this run has asked for the version, or another process is asking"
        found = _describe_version(facts, self._ask(request))
        if found is None:
            self._compared.add(entry.digest)
            if self.run and is_locked:
                entry.write_facts(replace(facts, run=self.run))
        return found


def _describe_damage(copy: io.FileIO, facts: CopyFacts | None) -> str | None:
    """Describe the damage of a copy, or return None; if its modification time has changed, its digest must match."""
    if facts is None:
        return "nothing is recorded about it"
    status = os.fstat(copy.fileno())
    if status.st_size != facts.bytes:
        return f"it has {status.st_size} bytes, not {facts.bytes}"
    if status.st_mtime_ns == facts.mtime_ns:
        return None
    found = digest_of(copy)
    return None if found == facts.sha256 else f"its SHA-256 is {found}, not {facts.sha256}"


def _describe_version(facts: CopyFacts, known: FileFacts, sha256: str | None = None) -> str | None:
    """Describe how a copy differs from the known facts about its shard, or return None."""
    now, then = (facts.bytes, *facts.source[1:], facts.sha256), (*known, sha256)
    for own, other, what in zip(now, then, ("size in bytes", "modification time", "ETag", "SHA-256"), strict=True):
        if None not in (own, other) and own != other:
            return f"it is a copy of another version of the shard: its {what} is {own}, not {other}"
    return None
