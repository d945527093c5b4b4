"""Cache store: finds or downloads the copies of a folder, and pins them while they are read."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal

from wds_datapipes.errors import CacheError, CorruptShardError, ShardError, TruncatedShardError
from wds_datapipes.io.file_lock import lock_file
from wds_datapipes.shard_cache.download import DownloadRequest, fetch_copy
from wds_datapipes.shard_cache.entry import CopyFacts, Entry, digest_of, stamp
from wds_datapipes.shard_cache.eviction import evict
from wds_datapipes.user_warnings import warn_user

LOGGER = logging.getLogger("wds_datapipes")

Check = Literal["size", "digest"]
"""How a copy is verified each time that it is opened: by its size and modification time, which is free, or by its
digest, which reads all of it."""


class CacheFolder:
    """A folder with complete copies of shards, shared by any number of processes on any number of hosts.

    A copy is locked during its download and pinned while it is read, by file locks that the operating system releases
    when a process ends. So each shard is downloaded once, no matter how many processes request it.

    Args:
        folder: the folder, which is created if needed.
        max_bytes: the maximum total size of all copies; None for no limit but the disk.
        check: see `Check`.
        verbose: log each download as a warning, which is shown even if logging is not configured.

    Raises:
        CacheError: the folder cannot be created.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int | None = None,
        check: Check = "size",
        *,
        verbose: bool = False,
    ) -> None:
        self.path = Path(folder)
        self.verbose = verbose
        self.max_bytes = max_bytes
        self.check = check
        self._warned = False

    def warn_cache_full(self, name: str) -> None:
        """Warn once that shards are read from their source because the cache is full."""
        if not self._warned:
            self._warned = True
            warn_user(
                f"The cache {self.path} has no space for {name}: it is limited to {self.max_bytes} bytes, and copies "
                f"in use cannot be evicted. This shard, and others that do not fit, are read from their source. Pass a "
                f"larger max_bytes"
            )

    def open(
        self, request: DownloadRequest, *, wait: bool = True, should_continue: Callable[[], bool] = lambda: True
    ) -> BinaryIO | None:
        """Return the copy of a shard, open and pinned until it is closed; download it if needed.

        Args:
            request: the shard.
            wait: wait for another process that is downloading it; otherwise return None.
            should_continue: called periodically during the download; False stops it.

        Raises:
            CacheFullError: there is no space for the copy.
            DownloadStopped: ``should_continue`` returned False.
            CacheError: the folder cannot be used.
            ShardError: the shard cannot be read, or does not have the expected size or digest.
        """
        entry = self.entry(request.url)
        try:
            if (copy := self._open_pinned(entry, request)) is not None:
                return copy
            self.path.mkdir(parents=True, exist_ok=True)
            with lock_file(entry.lock, wait=wait) as descriptor:
                if descriptor is None:
                    return None
                # Another process may have downloaded it meanwhile.
                copy = self._open_pinned(entry, request, is_locked=True)
                return self._fetch(entry, request, should_continue) if copy is None else copy
        except ShardError:
            raise
        except OSError as error:
            raise CacheError(
                f"The cache {self.path} cannot be used: {error.strerror or error}. Its file system must support locks, "
                f"and the folder must be writable"
            ) from error

    def find_damage(self, entry: Entry, *, remove: bool) -> str | None:
        """Return what is wrong with a copy, or None; with ``remove``, remove a bad copy."""
        with lock_file(entry.lock):
            try:
                copy = io.FileIO(entry.path, "r")
            except FileNotFoundError:
                return None
            with copy:
                damage = describe_damage(copy, entry.facts(), self.check)
            if damage is not None and remove:
                entry.remove()
            return damage

    def entry(self, url: str) -> Entry:
        """Return the entry of a shard."""
        return Entry.of(self.path, url)

    def discard(self, url: str, error: ShardError) -> None:
        """Remove a damaged copy, so that the shard is downloaded again."""
        entry = self.entry(url)
        with suppress(OSError):  # the folder may be gone or read-only
            if evict(entry):
                LOGGER.warning(
                    "Removed the copy %s, which cannot be read to its end (%s). Its shard is downloaded again when it "
                    "is needed",
                    *(entry.path, type(error).__name__),
                )

    def _fetch(self, entry: Entry, request: DownloadRequest, should_continue: Callable[[], bool]) -> BinaryIO:
        LOGGER.debug("Downloading %s to %s", request.name, entry.path)
        begin = time.monotonic()
        try:
            copy = fetch_copy(self.path, entry, request, self.max_bytes, should_continue)
        except (CorruptShardError, TruncatedShardError) as error:
            LOGGER.warning("%s. Trying again", error)
            copy = fetch_copy(self.path, entry, request, self.max_bytes, should_continue, is_last=True)
        LOGGER.log(
            logging.WARNING if self.verbose else logging.INFO,
            "Downloaded %s: %d bytes in %.1f s, to %s",
            *(request.name, os.fstat(copy.fileno()).st_size, time.monotonic() - begin, entry.path),
        )
        return copy

    def _open_pinned(self, entry: Entry, request: DownloadRequest, *, is_locked: bool = False) -> BinaryIO | None:
        """Return the copy, pinned, if it exists and is valid.

        Args:
            entry: the copy.
            request: the shard, whose size and digest may be known.
            is_locked: whether its lock is held, so that a damaged copy may be removed.
        """
        while True:
            try:
                copy = io.FileIO(entry.path, "r")
            except FileNotFoundError:
                return None
            try:
                fcntl.flock(copy, fcntl.LOCK_SH)  # waits while another process removes it
                if not os.fstat(copy.fileno()).st_nlink:
                    copy.close()
                    continue
                facts = entry.facts()
                damage = describe_damage(copy, facts, self.check)
                if damage is None and facts is not None:
                    damage = _describe_difference(facts, request)
                if damage is None:
                    copy.seek(0)
                    stamp(self.path, entry.facts_path)
                    return copy
            except BaseException:
                copy.close()
                raise
            copy.close()
            if is_locked:
                LOGGER.warning("The copy %s is not used: %s. Downloading the shard again", entry.path, damage)
                entry.remove()
            return None


def describe_damage(copy: io.FileIO, facts: CopyFacts | None, check: Check) -> str | None:
    """Return what is wrong with a copy, or None."""
    if facts is None:
        return "nothing is recorded about it"
    status = os.fstat(copy.fileno())
    if status.st_size != facts.bytes:
        return f"it has {status.st_size} bytes, not {facts.bytes}"
    if check == "size" and status.st_mtime_ns == facts.mtime_ns:
        return None
    found = digest_of(copy)
    return None if found == facts.sha256 else f"its SHA-256 is {found}, not {facts.sha256}"


def _describe_difference(facts: CopyFacts, request: DownloadRequest) -> str | None:
    """Return why a copy is one of another version of the shard than the index or the manifest describes, or None."""
    for now, then, what in ((facts.bytes, request.size, "size in bytes"), (facts.sha256, request.sha256, "SHA-256")):
        if then not in (None, now):
            return f"it is a copy of another version of the shard: its {what} is {now}, not {then}"
    return None
