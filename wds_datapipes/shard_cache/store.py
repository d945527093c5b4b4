"""Cache store: finds or downloads the copies of a folder, and pins them while they are read."""

from __future__ import annotations

import fcntl
import hashlib
import io
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal

from wds_datapipes.errors import CacheError, CorruptShardError, ShardError, TruncatedShardError
from wds_datapipes.shard_cache.download import WantedShard, fetch_copy
from wds_datapipes.shard_cache.entry import CopyFacts, Entry, lock_file, stamp
from wds_datapipes.shard_cache.eviction import evict
from wds_datapipes.shard_cache.foreign_copies import adopt
from wds_datapipes.user_warnings import warn_user

__all__ = ["CacheFolder", "Check", "damage"]

LOGGER = logging.getLogger("wds_datapipes")

Check = Literal["size", "digest"]
"""How a copy is held against what is known of it each time that it is opened: by its size and the time of its last
change, which costs nothing, or by its digest, which reads all of it."""


class CacheFolder:
    """A folder with complete copies of shards, shared by any number of processes, also on several hosts.

    A copy is locked while it is fetched and pinned while it is read, by locks of the file system, which end with their
    owner however it ends. So one shard is fetched once, however many ask for it.

    Args:
        folder: the folder; it is made if need be.
        max_bytes: how much all copies may have together; None is as much as the disk has.
        check: see `Check`.
        verbose: log each fetch as a warning, which shows where nothing sets up logging.

    Raises:
        CacheError: the folder cannot be made.
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

    def warn_of_no_room(self, name: str) -> None:
        """Warn once that shards are read from their source, as the cache is full."""
        if not self._warned:
            self._warned = True
            warn_user(
                f"The cache {self.path} has no room for {name}: it may have {self.max_bytes} bytes, and what is read "
                f"or fetched right now does not leave. This shard is read from its source, and so are others that find "
                f"no room. Pass a larger max_bytes"
            )

    def open(
        self, wanted: WantedShard, *, wait: bool = True, is_wanted: Callable[[], bool] = lambda: True
    ) -> BinaryIO | None:
        """Return the copy of a shard, open and pinned until it is closed; download it if needed.

        Args:
            wanted: the shard.
            wait: wait for another process that fetches it; otherwise return None.
            is_wanted: asked from time to time while it is fetched.

        Raises:
            CacheFullError: there is none, and none can be made.
            Stopped: it is no longer wanted.
            CacheError: the folder cannot be used.
            ShardError: the shard cannot be read, or is not what it should be.
        """
        entry = self.entry(wanted.url)
        try:
            if (copy := self._pinned(entry)) is not None:
                return copy
            self.path.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.W_OK) and (copy := adopt(self.path, entry, wanted)):
                return copy
            with lock_file(entry.lock, wait=wait) as mine:
                if mine is None:
                    return None
                # Another process may have fetched it while this one waited.
                copy = self._pinned(entry, mine=True) or adopt(self.path, entry, wanted)
                return self._fetched(entry, wanted, is_wanted) if copy is None else copy
        except ShardError:
            raise
        except OSError as error:
            raise CacheError(
                f"The cache {self.path} cannot be used: {error.strerror or error}. Its file system has to have locks, "
                f"and this user the right to write there"
            ) from error

    def fault(self, entry: Entry, *, remove: bool) -> str | None:
        """Return what is wrong with a copy, or None; with ``remove``, remove a bad copy."""
        with lock_file(entry.lock):
            try:
                copy = io.FileIO(entry.path, "r")
            except FileNotFoundError:
                return None
            with copy:
                wrong = damage(copy, entry.facts(), self.check)
            if wrong is not None and remove:
                entry.remove()
            return wrong

    def entry(self, url: str) -> Entry:
        """Return the entry of a shard."""
        return Entry.of(self.path, url)

    def discard(self, url: str, error: ShardError) -> None:
        """Remove a damaged copy, so that the shard is downloaded again."""
        entry = self.entry(url)
        with suppress(OSError):  # the folder may be gone, or only be read
            if evict(entry):
                LOGGER.warning(
                    "The copy %s is removed, as it cannot be read to its end (%s). Its shard is fetched when it is "
                    "read next",
                    *(entry.path, type(error).__name__),
                )

    def _fetched(self, entry: Entry, wanted: WantedShard, is_wanted: Callable[[], bool]) -> BinaryIO:
        LOGGER.debug("Fetching %s into %s", wanted.name, entry.path)
        begin = time.monotonic()
        try:
            copy = fetch_copy(self.path, entry, wanted, self.max_bytes, is_wanted)
        except (CorruptShardError, TruncatedShardError) as error:
            LOGGER.warning("%s. It is fetched once more", error)
            copy = fetch_copy(self.path, entry, wanted, self.max_bytes, is_wanted, is_last=True)
        LOGGER.log(
            logging.WARNING if self.verbose else logging.INFO,
            "Fetched %s: %d bytes in %.1f s, into %s",
            *(wanted.name, os.fstat(copy.fileno()).st_size, time.monotonic() - begin, entry.path),
        )
        return copy

    def _pinned(self, entry: Entry, *, mine: bool = False) -> BinaryIO | None:
        """Return the copy, pinned, if it exists and is valid.

        Args:
            entry: which copy.
            mine: whether its lock is held, so that a damaged copy may be removed.
        """
        while True:
            try:
                copy = io.FileIO(entry.path, "r")
            except FileNotFoundError:
                return None
            try:
                fcntl.flock(copy, fcntl.LOCK_SH)  # waits for as long as another process needs to remove it
                if not os.fstat(copy.fileno()).st_nlink:
                    copy.close()
                    continue
                facts = entry.facts()
                wrong = damage(copy, facts, self.check)
                if wrong is None:
                    copy.seek(0)
                    stamp(self.path, entry.facts_path)
                    return copy
            except BaseException:
                copy.close()
                raise
            copy.close()
            if mine:
                LOGGER.warning("The copy %s is damaged, as %s. The shard is fetched again", entry.path, wrong)
                entry.remove()
            return None


def damage(copy: io.FileIO, facts: CopyFacts | None, check: Check) -> str | None:
    """Return what is wrong with a copy, or None."""
    if facts is None:
        return "nothing is known of it"
    status = os.fstat(copy.fileno())
    if status.st_size != facts.bytes:
        return f"it has {status.st_size} bytes, not {facts.bytes}"
    if check == "size" and status.st_mtime_ns == facts.mtime_ns:
        return None
    found = _digest(copy)
    return None if found == facts.sha256 else f"its SHA-256 is {found}, not {facts.sha256}"


def _digest(copy: io.FileIO) -> str:
    copy.seek(0)
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    while count := copy.readinto(buffer):
        digest.update(buffer[:count])
    return digest.hexdigest()
