"""Downloads of copies: what is requested, the space that is reserved for it, and what makes it complete."""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from wds_datapipes.errors import (
    CacheError,
    ChangedShardError,
    CorruptShardError,
    MissingDependencyError,
    ReadLimitError,
    TruncatedShardError,
    UnsupportedMemberError,
)
from wds_datapipes.io.after_fork import at_fork
from wds_datapipes.io.file_lock import lock_file
from wds_datapipes.io.openers import redact
from wds_datapipes.io.part_share import CommonParts, PartShare
from wds_datapipes.io.prefetch import open_ahead
from wds_datapipes.io.remote.remote_file import FileFacts, file_facts
from wds_datapipes.io.streams import name_read_errors
from wds_datapipes.shard_cache.entry import FOLDER_LOCK, UNKNOWN, CopyFacts, Entry, stamp
from wds_datapipes.shard_cache.eviction import evict_one, reserve_space
from wds_datapipes.system import lock_descriptor
from wds_datapipes.tar.scanner import ShardScan

if TYPE_CHECKING:
    from wds_datapipes.shard_cache.store import CacheFolder

#: The options that also apply to requests for the size.
FACTS_OPTIONS = ("storage_options", "timeout_s", "retries")
#: The number of bytes to read from the source at once.
BLOCK_BYTES = 1 << 20
#: The maximum number of bytes of a shard to hold in memory, in parts of 1 MiB that several connections fetch.
COPY_AHEAD_BYTES = 32 << 20
#: The number of parts that all downloads of a process hold together, besides one and a block for each.
COMMON_PARTS = 48
#: The errors of a full disk.
FULL = {errno.ENOSPC, errno.EDQUOT}
#: If the size of a shard is unknown, space is reserved in steps of this size, in bytes.
STEP_BYTES = 64 << 20


class UncachedError(Exception):
    """There is no copy of a shard, so it is read from its source."""


class CacheFullError(UncachedError):
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
        lock_descriptor(copy.fileno(), is_shared=True)  # the pin, held until the file is closed
        reservation = _Reservation(folder, entry.part)
        reservation.extend(size or 0)
        digest, etag = _copy_source(request, copy, reservation, size, should_continue)
        if size is None and not is_last:
            copy.truncate(reservation.written)
            _check_complete(request, entry.part)
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
                    raise cache_error(self._folder.path, error) from error
                continue
            data = data[count:]
            self.written += count


#: The parts of this process.
_common_parts = CommonParts(COMMON_PARTS)


def _renew_parts() -> None:
    """Forget the parts of the parent process, which are held by threads that this one does not have."""
    global _common_parts
    _common_parts = CommonParts(COMMON_PARTS)


at_fork("parts", after_in_child=_renew_parts)


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
    share = PartShare(_common_parts)
    with name_read_errors(request.name), open_ahead(request.url, COPY_AHEAD_BYTES, share, **request.options) as source:
        etag, indexed = getattr(source, "etag", None), request.known.etag
        if None not in (etag, indexed) and etag != indexed:
            raise ChangedShardError(
                f"{request.name} has changed since it was indexed: its ETag is {etag!r} instead of {indexed!r}. "
                "Rebuild its index, and the manifest, if there is one"
            )
        while count := source.readinto(buffer):  # type: ignore[attr-defined]  # the streams of open_ahead have it
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


def _check_complete(request: DownloadRequest, part: Path) -> None:
    """Raise an error if a download is a truncated archive, for example after a broken connection."""
    with suppress(
        CorruptShardError, UnsupportedMemberError, ReadLimitError, MissingDependencyError
    ):  # the reader reports these
        try:
            deque(ShardScan(str(part), ignore_zeros=True), maxlen=0)  # reads all headers
        except TruncatedShardError:
            raise TruncatedShardError(
                f"The {part.stat().st_size} bytes received of {request.name} are not a complete archive, and its store "
                "does not report its size. It may have been truncated in transfer"
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


def cache_error(folder: Path, error: OSError) -> CacheError:
    """Return the error for a folder that cannot be used."""
    advice = "Its file system must support locks, and the folder must be writable"
    if error.errno in FULL:
        advice = (
            "All unused copies have been evicted. Free space, use another folder, or limit the cache: max_bytes, or "
            "cache_bytes of AccessOptions"
        )
    return CacheError(f"The cache {folder} cannot be used: {error.strerror or error}. {advice}")
