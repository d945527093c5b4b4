"""Downloads into the cache: to a temporary name, hashed and synced before the copy gets its own name."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from wds_datapipes.errors import (
    CacheError,
    CorruptShardError,
    MissingDependencyError,
    ReadLimitError,
    ShardError,
    ShardReadError,
    TruncatedShardError,
    UnsupportedMemberError,
)
from wds_datapipes.io.openers import open_url, redact
from wds_datapipes.io.remote.range_reader import file_facts
from wds_datapipes.shard_cache.entry import CopyFacts, Entry, stamp
from wds_datapipes.shard_cache.eviction import evict_oldest, make_room
from wds_datapipes.tar.scanner import scan_shard

__all__ = ["CacheFullError", "DownloadStopped", "WantedShard", "fetch_copy"]

#: The options that hold for asking for the size as well.
FACTS_OPTIONS = ("storage_options", "timeout_s", "retries")
#: So much is taken from the source at once, in bytes.
BLOCK_BYTES = 1 << 20
#: If the size of a shard is unknown, space is reserved in steps of this size, in bytes.
STEP_BYTES = 64 << 20


class CacheFullError(Exception):
    """The cache is full: all copies are in use, or the shard is larger than the limit."""


class DownloadStopped(Exception):
    """The download was cancelled."""


class WantedShard:
    """A shard to download.

    Args:
        url: the shard.
        bytes: its size, where that is known.
        sha256: its digest, where that is known.
        options: what it is opened with.
    """

    def __init__(self, url: str, size: int | None, sha256: str | None, options: Mapping[str, Any]) -> None:
        self.url, self.size, self.sha256, self.options = url, size, sha256, options
        self.name = redact(url)


def fetch_copy(
    folder: Path,
    entry: Entry,
    wanted: WantedShard,
    max_bytes: int | None,
    is_wanted: Callable[[], bool],
    *,
    is_last: bool = False,
) -> BinaryIO:
    """Download a copy whose lock is held, and return it open and pinned.

    Where nothing tells the size of a shard, it has to be a whole archive, unless this is the last attempt: those that
    were written without an end marker are left to the reader, who was told what to expect.

    Raises:
        CacheFullError: there is none, and none can be made.
        Stopped: ``is_wanted`` says so.
        CacheError: the folder cannot be written.
        ShardError: the shard cannot be read, is shorter than its store says, or is not what its digest says.
    """
    size = wanted.size
    if size is None:
        asked = {name: value for name, value in wanted.options.items() if name in FACTS_OPTIONS}
        size = file_facts(wanted.url, **asked).bytes
    try:
        entry.part.unlink(missing_ok=True)  # of a process that was killed
        copy = io.FileIO(entry.part, "x+")
    except OSError as error:
        raise _unwritable(entry.part, error) from error
    try:
        fcntl.flock(copy, fcntl.LOCK_SH)  # the pin: it stays while this is open
        room = _Room(folder, entry.part, max_bytes)
        room.ensure(size or 0)
        digest = _copy_source(wanted, copy, room, size, is_wanted)
        if size is None and not is_last:
            _check_whole(wanted, copy, room.written)
        _settle(folder, entry, copy, wanted, digest, room.written)
    except BaseException:
        entry.part.unlink(missing_ok=True)
        copy.close()
        raise
    return copy


class _Room:
    """The disk space reserved for one download; it grows if the size is unknown."""

    def __init__(self, folder: Path, part: Path, max_bytes: int | None) -> None:
        self._folder, self._part, self._max_bytes = folder, part, max_bytes
        self._reserved = 0
        self.written = 0

    def ensure(self, need: int) -> None:
        if self._max_bytes is None or need <= self._reserved:
            return
        if not make_room(self._folder, self._part, need, self._max_bytes):
            raise CacheFullError
        self._reserved = need

    def write(self, copy: io.FileIO, data: memoryview) -> None:
        """Write data, and evict copies if the disk is full."""
        if self.written + len(data) > self._reserved:
            self.ensure(self.written + max(len(data), STEP_BYTES) if self._reserved or self.written else len(data))
        while data:
            try:
                count = copy.write(data)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not evict_oldest(self._folder):
                    raise _unwritable(self._part, error) from error
                continue
            data = data[count:]
            self.written += count


def _copy_source(
    wanted: WantedShard, copy: io.FileIO, room: _Room, size: int | None, is_wanted: Callable[[], bool]
) -> str:
    """Write the source to the copy, and return its digest."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BLOCK_BYTES))
    try:
        with open_url(wanted.url, **wanted.options) as source:
            while count := source.readinto(buffer):  # type: ignore[attr-defined]  # the streams of open_url have it
                if not is_wanted():
                    raise DownloadStopped
                digest.update(buffer[:count])
                room.write(copy, buffer[:count])
    except (ShardError, CacheError):
        raise
    except OSError as error:
        raise ShardReadError(f"{wanted.name} could not be read to its end: {type(error).__name__}: {error}") from error
    if size is not None and room.written != size:
        raise TruncatedShardError(
            f"{wanted.name} should have {size} bytes, and {room.written} came. It was cut off on its way, or has "
            f"changed meanwhile"
        )
    found = digest.hexdigest()
    if wanted.sha256 is not None and found != wanted.sha256:
        raise CorruptShardError(
            f"{wanted.name} was fetched, and its SHA-256 is {found}, where {wanted.sha256} is known for it. It was "
            f"replaced or damaged: fetch or write the shard again, or make the manifest again"
        )
    return found


def _check_whole(wanted: WantedShard, copy: io.FileIO, size: int) -> None:
    """Raise if a download is a truncated archive, as after a broken connection."""
    copy.truncate(size)
    with suppress(
        CorruptShardError, UnsupportedMemberError, ReadLimitError, MissingDependencyError
    ):  # which the reader is to tell
        try:
            scan_shard(f"/proc/self/fd/{copy.fileno()}", lambda *_: None, ignore_zeros=True)
        except TruncatedShardError:
            raise TruncatedShardError(
                f"{wanted.name} came with {size} bytes, which are no complete archive, and its store does not report "
                "how many it has. It may have been truncated in transfer"
            ) from None


def _settle(folder: Path, entry: Entry, copy: io.FileIO, wanted: WantedShard, digest: str, size: int) -> None:
    """Give a whole copy its name, once it is on the disk: a copy that a loss of power has cut would be taken for it."""
    try:
        copy.truncate(size)
        os.fsync(copy.fileno())
        entry.write_facts(CopyFacts(wanted.name, size, digest, os.fstat(copy.fileno()).st_mtime_ns))
        stamp(folder, entry.facts_path)
        entry.part.replace(entry.path)
        copy.seek(0)
    except OSError as error:
        raise _unwritable(entry.part, error) from error


def _unwritable(path: Path, error: OSError) -> CacheError:
    advice = "Check the folder and its permissions"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "All copies not in use were evicted already. Free space, use another folder, or pass max_bytes"
    return CacheError(f"The copy {path} cannot be written: {error.strerror or error}. {advice}")
