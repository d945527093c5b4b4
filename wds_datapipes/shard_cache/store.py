"""Cache store: find or download copies of shards, and pin them while they are read."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from wds_datapipes.errors import (
    CacheError,
    ChangedShardError,
    CorruptShardError,
    MissingDependencyError,
    ReadLimitError,
    ShardError,
    ShardOpenError,
    TruncatedShardError,
    UnsupportedMemberError,
    WdsError,
)
from wds_datapipes.io.file_lock import lock_file
from wds_datapipes.io.openers import open_url, redact
from wds_datapipes.io.raw_streams import name_read_errors
from wds_datapipes.io.remote.remote_file import FileFacts, file_facts
from wds_datapipes.shard_cache.entry import (
    FOLDER_LOCK,
    UNKNOWN,
    CopyFacts,
    Entry,
    Priority,
    digest_of,
    evict,
    evict_one,
    reserve_space,
    stamp,
)
from wds_datapipes.tar.scanner import ShardScan
from wds_datapipes.user_warnings import warn_user

LOGGER = logging.getLogger("wds_datapipes")


class CacheFolder:
    """A folder with complete copies of shards, shared by any number of processes on any number of hosts.

    A copy is locked during its download and pinned while it is read, by file locks that the operating system releases
    when a process ends. Each shard is therefore downloaded once, even if many processes request it. When an object of
    this class, or a run, first opens a copy, it may ask the store whether the shard is still the same.

    Args:
        folder: the folder, which is created if needed.
        max_bytes: the maximum total size of all copies; None means that only the disk limits it.
        verbose: log each download as a warning, which is shown even if logging is not configured.
        priority: the order of eviction; by default, the least recently used copy is evicted first.
        run: identifies processes that use the same version of each shard. One of them asks the store for the version,
            and raises an error if the store does not answer. By default, each process asks; if a store does not
            answer, the process warns, uses the copy and asks no store again.

    Raises:
        CacheError: the folder cannot be created.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int | None = None,
        *,
        verbose: bool = False,
        priority: Priority = Entry.last_use,
        run: str = "",
    ) -> None:
        self.path = Path(folder)
        self.run, self._is_offline, self._compared = run, False, set[str]()
        self.verbose, self.priority = verbose, priority
        self.max_bytes = max_bytes
        self._warned = False

    def warn_cache_full(self, request: DownloadRequest) -> None:
        """Count a miss; warn once that shards are read from their source because the cache is full."""
        request.count("cache_misses")
        if not self._warned:
            self._warned = True
            warn_user(
                f"The cache {self.path} has no space for {request.name}: it is limited to {self.max_bytes} bytes, and "
                "copies in use cannot be evicted. Shards that do not fit are read from their source. Pass a larger "
                "max_bytes"
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
            CacheFullError: there is no space for the copy.
            DownloadStopped: ``should_continue`` returned False.
            CacheError: the folder cannot be used.
            ShardError: the shard cannot be read, or does not have the expected size or digest.
        """
        entry = self.entry(request.url)
        try:
            if (copy := self._open_pinned(entry, request)) is not None:
                return request.count("cache_hits", copy)
            self.path.mkdir(parents=True, exist_ok=True)
            with lock_file(entry.lock, wait=wait) as descriptor:
                if descriptor is None:
                    return None
                # Another process may have downloaded it meanwhile.
                copy = self._open_pinned(entry, request, is_locked=True)
                if copy is not None:
                    return request.count("cache_hits", copy)
                return request.count("cache_misses", self._fetch(entry, request, should_continue))
        except ShardError:
            raise
        except OSError as error:
            raise _cache_error(self.path, error) from error

    def entry(self, url: str) -> Entry:
        """Return the entry of a shard."""
        return Entry.of(self.path, url)

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
                fcntl.flock(copy, fcntl.LOCK_SH)  # waits if another process is removing it
                if not os.fstat(copy.fileno()).st_nlink:
                    copy.close()
                    continue
                facts = entry.facts()
                damage = _describe_damage(copy, facts)
                if damage is None and facts is not None:
                    damage = self._describe_difference(facts, request, entry, is_locked=is_locked)
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
        try:
            found = _describe_version(facts, request.ask(**{} if self.run else {"retries": 0}))
        except ShardOpenError as error:
            if self.run:
                raise
            self._is_offline = True
            LOGGER.warning("Using copies without asking their store whether the shards have changed: %s", error)
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


#: The options that also apply to requests for the size.
FACTS_OPTIONS = ("storage_options", "timeout_s", "retries")
#: The number of bytes to read from the source at once.
BLOCK_BYTES = 1 << 20
#: The errors of a full disk.
FULL = {errno.ENOSPC, errno.EDQUOT}
#: If the size of a shard is unknown, space is reserved in steps of this size, in bytes.
STEP_BYTES = 64 << 20


class CacheFullError(Exception):
    """The cache is full: all copies are in use, or the shard is larger than the limit."""


class DownloadStopped(Exception):
    """The download was cancelled."""


class DownloadRequest:
    """A request to download a shard.

    Args:
        url: the shard.
        known: its size and its ETag, if an index or a manifest has them.
        sha256: its digest, if known.
        options: the options to open it with; its ``counters`` count hits and misses.

    Attributes:
        asks: whether only the store can tell if an existing copy is still up to date.
    """

    def __init__(self, url: str, known: FileFacts, sha256: str | None, options: Mapping[str, Any]) -> None:
        self.url, self.known, self.sha256, self.options = url, known, sha256, options
        self.name, self.asks = redact(url), sha256 is None and known.etag is None
        self._answer: FileFacts | None = None

    def count(self, figure: str, copy: BinaryIO | None = None) -> BinaryIO | None:
        """Count a hit or a miss (``"cache_hits"``, ``"cache_misses"``) and the bytes of the copy; return the copy."""
        counters = self.options.get("counters")
        if counters is not None:
            counters.count(figure)
            counters.count(f"{figure}_bytes", 0 if copy is None else os.fstat(copy.fileno()).st_size)
        return copy

    def ask(self, **more: Any) -> FileFacts:
        """Return the facts that the store reports about the shard; it is asked only once.

        Raises:
            ShardOpenError: there is no such file, or access is denied.
        """
        if self._answer is None:
            options = {name: value for name, value in self.options.items() if name in FACTS_OPTIONS}
            self._answer = file_facts(self.url, **{**options, **more})
        return self._answer


def fetch_copy(
    folder: CacheFolder,
    entry: Entry,
    request: DownloadRequest,
    should_continue: Callable[[], bool],
    *,
    is_last: bool = False,
) -> BinaryIO:
    """Download a copy, whose lock the caller holds, and return it opened and pinned.

    If the size of the shard is unknown, the download must be a complete archive, except in the last attempt, because
    the reader may be configured to accept archives without an end marker.

    Raises:
        CacheFullError: there is no space for the copy.
        DownloadStopped: ``should_continue`` returned False.
        CacheError: the folder cannot be written.
        ShardError: the shard cannot be read, or does not have the expected size, ETag or digest.
    """
    size, answer = request.known.bytes, UNKNOWN
    if size is None or request.asks:
        answer = request.ask()
        size = answer.bytes if size is None else size
    entry.part.unlink(missing_ok=True)  # left by a killed process
    copy = io.FileIO(entry.part, "x+")
    try:
        fcntl.flock(copy, fcntl.LOCK_SH)  # the pin, held until the file is closed
        reservation = _Reservation(folder, entry.part)
        reservation.extend(size or 0)
        digest, etag = _copy_source(request, copy, reservation, size, should_continue)
        if size is None and not is_last:
            _check_complete(request, copy, reservation.written)
        source = answer._replace(etag=etag or answer.etag)
        _finish(folder.path, entry, copy, CopyFacts(request.name, reservation.written, digest, 0, source, folder.run))
    except BaseException:
        entry.part.unlink(missing_ok=True)
        copy.close()
        raise
    return copy


class _Reservation:
    """The disk space reserved for a download, which grows if the size is unknown."""

    def __init__(self, folder: CacheFolder, part: Path) -> None:
        self._folder, self._part = folder, part
        self._reserved = 0
        self.written = 0

    def extend(self, need: int) -> None:
        most = self._folder.max_bytes
        if most is None or need <= self._reserved:
            return
        if not reserve_space(self._folder.path, self._part, need, most, self._folder.priority):
            raise CacheFullError
        self._reserved = need

    def write(self, copy: io.FileIO, data: memoryview) -> None:
        """Write data; evict copies if the disk is full."""
        if self.written + len(data) > self._reserved:
            self.extend(self.written + max(len(data), STEP_BYTES) if self._reserved or self.written else len(data))
        while data:
            try:
                count = copy.write(data)
            except OSError as error:
                is_full = error.errno in FULL
                if not (is_full and evict_one(self._folder.path, self._folder.priority)):
                    raise _cache_error(self._folder.path, error) from error
                continue
            data = data[count:]
            self.written += count


def _copy_source(
    request: DownloadRequest,
    copy: io.FileIO,
    reservation: _Reservation,
    size: int | None,
    should_continue: Callable[[], bool],
) -> tuple[str, str | None]:
    """Write the source to the copy; return its digest and, if known, its ETag."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with name_read_errors(request.name), open_url(request.url, **request.options) as source:
        etag, indexed = getattr(source, "etag", None), request.known.etag
        if None not in (etag, indexed) and etag != indexed:
            raise ChangedShardError(
                f"{request.name} has changed since it was indexed: its ETag is {etag!r} instead of {indexed!r}. "
                "Rebuild its index, and the manifest, if there is one"
            )
        while count := source.readinto(buffer):  # type: ignore[attr-defined]  # the streams of open_url have it
            if not should_continue():
                raise DownloadStopped
            digest.update(buffer[:count])
            reservation.write(copy, buffer[:count])
    if size is not None and reservation.written != size:
        raise TruncatedShardError(
            f"{request.name} should have {size} bytes, but {reservation.written} were received. The transfer was cut "
            f"off, or the shard has changed meanwhile"
        )
    found = digest.hexdigest()
    if request.sha256 is not None and found != request.sha256:
        raise CorruptShardError(
            f"{request.name} was downloaded, but its SHA-256 is {found}, not {request.sha256}. It was replaced or "
            f"damaged: download or write the shard again, or rebuild the manifest"
        )
    return found, etag


def _check_complete(request: DownloadRequest, copy: io.FileIO, size: int) -> None:
    """Raise an error if a download is a truncated archive, for example after a broken connection."""
    copy.truncate(size)
    with suppress(
        CorruptShardError, UnsupportedMemberError, ReadLimitError, MissingDependencyError
    ):  # the reader reports these
        try:
            deque(ShardScan(f"/proc/self/fd/{copy.fileno()}", ignore_zeros=True), maxlen=0)  # reads all headers
        except TruncatedShardError:
            raise TruncatedShardError(
                f"The {size} bytes received of {request.name} are not a complete archive, and its store does not "
                "report its size. It may have been truncated in transfer"
            ) from None


def _finish(folder: Path, entry: Entry, copy: io.FileIO, facts: CopyFacts) -> None:
    """Sync a complete copy before renaming it, so that a power failure cannot leave a truncated copy under its name."""
    copy.truncate(facts.bytes)
    os.fsync(copy.fileno())
    entry.write_facts(replace(facts, mtime_ns=os.fstat(copy.fileno()).st_mtime_ns))
    stamp(folder, entry.facts_path)
    with lock_file(folder / FOLDER_LOCK, keep_file=True):  # otherwise, `used_bytes` could count it under both names
        entry.part.replace(entry.path)
    copy.seek(0)


def _cache_error(folder: Path, error: OSError) -> CacheError:
    advice = "Its file system must support locks, and the folder must be writable"
    if error.errno in FULL:
        advice = "All unused copies have been evicted. Free space, use another folder, or pass max_bytes"
    return CacheError(f"The cache {folder} cannot be used: {error.strerror or error}. {advice}")
