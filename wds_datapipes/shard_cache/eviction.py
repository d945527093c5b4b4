"""Eviction: removes the least recently used copies that no process is reading."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from wds_datapipes.io.file_lock import lock_file
from wds_datapipes.shard_cache.entry import DIGITS, FACTS, FOLDER_LOCK, LOCK, PART, Entry, entries, is_copy

LOGGER = logging.getLogger("wds_datapipes")

#: The minimum age of a stray file before it is removed, in seconds: a process may be about to use it.
STRAY_S = 3600.0


def reserve_space(folder: Path, own: Path | None, need: int, max_bytes: int) -> bool:
    """Evict copies until ``need`` bytes are free, and reserve them; return whether that succeeded.

    Downloads in progress in other processes count with their final size.

    Args:
        folder: the folder of the cache.
        own: the download to reserve space for, which does not count.
        need: its final size, in bytes.
        max_bytes: the maximum total size of all copies.
    """
    if need > max_bytes:
        return False
    with lock_file(folder / FOLDER_LOCK, keep_file=True):
        _remove_abandoned(folder, own)
        used = used_bytes(folder, own)
        if used + need > max_bytes:
            for entry in by_last_use(folder):
                used -= evict(entry)
                if used + need <= max_bytes:
                    break
        is_reserved = used + need <= max_bytes
        if is_reserved and own is not None:
            os.truncate(own, need)  # shows its final size to other processes
        return is_reserved


def evict_oldest(folder: Path) -> bool:
    """Evict the least recently used copy that is not in use; return whether there was one."""
    with lock_file(folder / FOLDER_LOCK, keep_file=True):
        return any(evict(entry) for entry in by_last_use(folder))


def evict(entry: Entry) -> int:
    """Remove a copy, unless it is in use; return the number of freed bytes."""
    with lock_file(entry.lock, wait=False) as descriptor:
        if descriptor is None:  # another process downloads or checks it
            return 0
        try:
            copy = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            fcntl.flock(copy, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(copy).st_size
            entry.remove()
        except BlockingIOError:
            return 0
        finally:
            os.close(copy)
        LOGGER.debug("Evicted the copy %s of %d bytes", entry.path, size)
        return size


def used_bytes(folder: Path, own: Path | None = None) -> int:
    """Return the size of all copies of a folder, including downloads in progress."""
    used = 0
    for path in folder.iterdir():
        if (is_copy(path.name) or path.suffix not in (FACTS, LOCK)) and path != own:
            with suppress(FileNotFoundError):
                used += path.stat().st_size
    return used


def by_last_use(folder: Path) -> list[Entry]:
    """Return all copies, the least recently used first."""
    return sorted(entries(folder), key=Entry.last_use)


def _remove_abandoned(folder: Path, own: Path | None) -> None:
    """Remove the files of killed processes."""
    paths = list(folder.iterdir())
    copies = {path.name[:DIGITS] for path in paths if is_copy(path.name)}
    for path in paths:
        if is_copy(path.name) or path.name == FOLDER_LOCK or path == own:
            continue
        is_of_download = path.suffix in (PART, LOCK) and "." not in path.stem
        is_stray = path.suffix == PART or (path.suffix == FACTS and path.name[:DIGITS] not in copies)
        with suppress(FileNotFoundError):
            if is_of_download:
                with lock_file(path.with_suffix(LOCK), wait=False) as descriptor:
                    if descriptor is not None:
                        path.with_suffix(PART).unlink(missing_ok=True)
            elif is_stray and abs(time.time() - path.stat().st_mtime) > STRAY_S:
                path.unlink()
