"""Eviction: removes the least recently used copies that no process reads."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from wds_datapipes.shard_cache.entry import FACTS, FOLDER_LOCK, LOCK, PART, Entry, entries, lock_file

__all__ = ["evict", "make_room", "used_bytes"]

LOGGER = logging.getLogger("wds_datapipes")

#: A file that belongs to no copy is left alone for so long, in seconds: its process may be about to use it.
STRAY_S = 3600.0


def make_room(folder: Path, own: Path | None, need: int, max_bytes: int) -> bool:
    """Evict copies until there is room for ``need`` bytes; return whether that succeeded.

    What other processes fetch right now counts with the size that it will have.

    Args:
        folder: the folder of the cache.
        own: the part that room is made for, which does not count.
        need: how large it will be, in bytes.
        max_bytes: how much all copies may have together.
    """
    if need > max_bytes:
        return False
    with lock_file(folder / FOLDER_LOCK, keep=True):
        _remove_abandoned(folder, own)
        used = used_bytes(folder, own)
        for entry in by_last_use(folder):
            if used + need <= max_bytes:
                break
            used -= evict(entry)
        is_room = used + need <= max_bytes
        if is_room and own is not None:
            os.truncate(own, need)  # by which others know how large it will be
        return is_room


def evict_oldest(folder: Path) -> bool:
    """Evict the least recently used copy; return whether there was one not in use."""
    with lock_file(folder / FOLDER_LOCK, keep=True):
        return any(evict(entry) for entry in by_last_use(folder))


def evict(entry: Entry) -> int:
    """Remove a copy, unless it is in use; return the number of freed bytes."""
    with lock_file(entry.lock, wait=False) as mine:
        if mine is None:  # another process downloads or checks it
            return 0
        try:
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(descriptor).st_size
            entry.remove()
        except BlockingIOError:
            return 0
        finally:
            os.close(descriptor)
        LOGGER.debug("The copy %s of %d bytes has left", entry.path, size)
        return size


def used_bytes(folder: Path, own: Path | None = None) -> int:
    """Return the size of all copies of a folder, including downloads in progress."""
    used = 0
    with os.scandir(folder) as found:
        for each in found:
            if not each.name.endswith((FACTS, LOCK)) and (own is None or each.name != own.name):
                with suppress(FileNotFoundError):
                    used += each.stat(follow_symlinks=False).st_size  # a link leads to a file that counts by itself
    return used


def by_last_use(folder: Path) -> list[Entry]:
    """Return all copies that may be evicted, the least recently used first.

    A link to a file that was put into the folder does not, since the file would stay.
    """
    return sorted((entry for entry in entries(folder) if not entry.path.is_symlink()), key=_last_use)


def _last_use(entry: Entry) -> int:
    try:
        return entry.facts_path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _remove_abandoned(folder: Path, own: Path | None) -> None:
    """Remove the files of processes that were killed."""
    for path in folder.iterdir():
        if path == own or path.name == FOLDER_LOCK:
            continue
        with suppress(FileNotFoundError):
            if path.suffix in (PART, LOCK) and "." not in path.stem:
                with lock_file(path.with_suffix(LOCK), wait=False) as descriptor:
                    if descriptor is not None:
                        path.with_suffix(PART).unlink(missing_ok=True)
            elif path.suffix in (PART, FACTS) and _is_stray(path):
                path.unlink()


def _is_stray(path: Path) -> bool:
    """Whether a file describes a copy that has been missing for long."""
    digest = path.name.partition(".")[0]
    if path.suffix == FACTS and any(path.parent.glob(f"{digest}-*")):
        return False
    return abs(time.time() - path.stat().st_mtime) > STRAY_S
