"""Cache eviction: which copies of shards make space for others, and the limit of their total size."""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from wds_datapipes.io.file_lock import lock_file
from wds_datapipes.shard_cache.entry import (
    DIGITS,
    DOWNLOAD,
    FACTS,
    FOLDER_LOCK,
    LOCK,
    OWN,
    PART,
    Entry,
    entries,
    is_copy,
    modified_ns,
)

C = TypeVar("C")
K = TypeVar("K")
V = TypeVar("V")

LOGGER = logging.getLogger("wds_datapipes")

#: The minimum age of a stray file before it is removed, in seconds, because a process may be about to use it.
STRAY_S = 3600.0


#: A copy that was not used in this many whole passes is stale. It is more than 1, because the processes of a host begin
#: a pass at different times.
STALE_PASSES = 2


class CachedCopy(Protocol):
    """What decides when a copy is evicted."""

    @property
    def digest(self) -> str:
        """What identifies its shard."""

    def last_use(self) -> int:
        """Return the time of its last use."""


class Passes:
    """The passes of a process over a dataset. Each shard is read once in a pass; the copy needed last is evicted first.

    A shard that was read in the current pass is needed again only in the next one, later than all shards that were not.
    A copy is therefore evicted before its pass only to make space for the first shards of that pass: with one reader, a
    pass has at most one hit less than if all future uses were known (Belady's rule).
    """

    def __init__(self) -> None:
        #: For each of the last passes, the time of the last use of any copy before the pass began.
        self._begun = deque([0], maxlen=STALE_PASSES + 1)
        self._expected = set[str]()

    def expect(self, copies: Iterable[Entry]) -> None:
        """Keep the copies that the next pass needs first longer than other copies used in this pass."""
        self._expected.update(copy.digest for copy in copies)

    def begin(self, folder: Path) -> None:
        """Start a pass over the copies in a folder."""
        self.begin_after(modified_ns(folder / FOLDER_LOCK))  # 0 if nothing was ever copied

    def begin_after(self, last_use: int) -> None:
        """Begin a pass after a copy was used for the last time."""
        self._expected.clear()
        self._begun.append(last_use)

    def priority(self, entry: CachedCopy) -> tuple[int, int]:
        """Return the sort key for eviction: stale copies, those used in this pass, expected ones, then others."""
        last_use = entry.last_use()
        group = 0 if last_use <= self._begun[0] else 1 if last_use > self._begun[-1] else 3
        return max(group, 2 * (entry.digest in self._expected)), last_use


class LeastRecentlyUsed(OrderedDict[K, V]):
    """A dict with a limit: the values that were not used for the longest time are evicted for others.

    >>> opened = LeastRecentlyUsed[str, int](2, print)
    >>> for key in "abac":
    ...     _ = opened.use(key) if key in opened else opened.add(key, ord(key))
    b 98
    >>> [*opened]
    ['a', 'c']

    Args:
        most: the maximum number of values.
        evict: called with each key and value that is evicted.
    """

    def __init__(self, most: int, evict: Callable[[K, V], object] = lambda *_: None) -> None:
        super().__init__()
        self._most, self._evict = most, evict

    def use(self, key: K) -> V:
        """Return a value, which is then the most recently used one."""
        self.move_to_end(key)
        return self[key]

    def add(self, key: K, value: V) -> None:
        """Evict values until there is space, and add a new one."""
        self.make_space()
        self[key] = value

    def make_space(self) -> None:
        """Evict values until another one can be added."""
        while len(self) >= self._most:
            self._evict(*self.popitem(last=False))


Priority: TypeAlias = "Callable[[Entry], Any]"
"""Returns the sort key of a copy; the copy with the smallest key is evicted first."""


def reserve_space(
    folder: Path, own: Path | None, need: int, max_bytes: int, priority: Priority = Entry.last_use
) -> bool:
    """Evict copies until ``need`` bytes are free and reserve these bytes; return whether this succeeded.

    Downloads in progress in other processes count with their final size.

    Args:
        folder: the folder of the cache.
        own: the download to reserve space for, whose current size does not count.
        need: its final size, in bytes.
        max_bytes: the maximum total size of all copies.
        priority: the order of eviction; by default, the least recently used copy is evicted first.
    """
    if need > max_bytes:
        return False
    with lock_file(folder / FOLDER_LOCK, keep_file=True):
        _remove_abandoned(folder, own)
        used = used_bytes(folder, own)
        if used + need > max_bytes:
            used = free_space(used, need, max_bytes, iter(evictable(folder, priority)), evict)
        is_reserved = used + need <= max_bytes
        if is_reserved and own is not None:
            os.truncate(own, need)  # shows its final size to other processes
        return is_reserved


def free_space(used: int, need: int, max_bytes: int, copies: Iterator[C], evict: Callable[[C], int]) -> int:
    """Evict copies until ``need`` more bytes fit, or there is no other copy; return the bytes that are used then.

    >>> free_space(9, 4, 10, iter([2, 2, 2]), lambda copy: copy)
    5

    Args:
        used: the size of all copies.
        need: the size of another one.
        max_bytes: the maximum size of all.
        copies: the copies in the order of eviction.
        evict: removes a copy, and returns how many bytes that has freed.
    """
    while used + need > max_bytes and (copy := next(copies, None)) is not None:
        used -= evict(copy)
    return used


def evict_one(folder: Path, priority: Priority = Entry.last_use) -> bool:
    """Evict a copy that is not in use; return whether there was one."""
    with lock_file(folder / FOLDER_LOCK, keep_file=True):
        return any(evict(entry) for entry in evictable(folder, priority))


def evictable(folder: Path, priority: Priority = Entry.last_use) -> list[Entry]:
    """Return the downloaded copies in the order of their eviction; files that were put into the folder stay."""
    return sorted(entries(folder, with_links=False), key=priority)


def evict(entry: Entry) -> int:
    """Remove a copy, unless it is in use; return the number of freed bytes."""
    with lock_file(entry.lock, wait=False) as descriptor:
        if descriptor is None:  # another process is downloading or checking it
            return 0
        with lock_file(entry.path, wait=False, keep_file=True, create=False) as copy:
            if copy is None:
                return 0
            size = 0 if entry.is_link else os.fstat(copy).st_size
            entry.remove()
        LOGGER.debug("Evicted the copy %s of %d bytes", entry.path, size)
        return size


def used_bytes(folder: Path, own: Path | None = None) -> int:
    """Return the total size of all downloaded copies in a folder, including downloads in progress."""
    used = 0
    with os.scandir(folder) as files:
        for file in files:
            is_counted = is_copy(file.name) or DOWNLOAD.fullmatch(file.name)
            if is_counted and not file.is_symlink() and (own is None or file.name != own.name):
                with suppress(FileNotFoundError):
                    used += file.stat().st_size
    return used


def _remove_abandoned(folder: Path, own: Path | None) -> None:
    """Remove the files of killed processes, and links to files that are gone."""
    with os.scandir(folder) as files:
        found = [(file.name, is_copy(file.name), file.is_symlink()) for file in files]
    copies = {name[:DIGITS] for name, is_a_copy, _ in found if is_a_copy}
    for name, is_a_copy, is_link in found:
        is_used = name.endswith(FACTS) and name[:DIGITS] in copies
        if is_used or not (is_link if is_a_copy else OWN.fullmatch(name)):
            continue
        path = folder / name
        if path == own or (is_a_copy and path.exists()):
            continue
        is_of_download = path.suffix in (PART, LOCK) and FACTS not in path.suffixes
        is_stray = path.suffix == PART or name[:DIGITS] not in copies
        with suppress(FileNotFoundError), lock_file(folder / f"{name[:DIGITS]}{LOCK}", wait=False) as descriptor:
            if descriptor is None:  # a process is about to use it
                continue
            if is_of_download:
                path.with_suffix(PART).unlink(missing_ok=True)
            elif not path.exists() if is_a_copy else is_stray and abs(time.time() - path.stat().st_mtime) > STRAY_S:
                path.unlink()
