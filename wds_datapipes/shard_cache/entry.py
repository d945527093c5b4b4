"""Cache entries: the name of a copy, the facts recorded about it, and the time of its last use."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from wds_datapipes.io.file_lock import READ_ONLY, lock_file
from wds_datapipes.io.openers import redact, split_scheme
from wds_datapipes.io.remote.remote_file import FileFacts

FORMAT = "wds-datapipes copy"
VERSION = 1
#: The number of hexadecimal digits of the digest in a name: 128 bits.
DIGITS = 32
#: The maximum number of characters of a shard's name in its copy's name, for people who list the folder.
NAMED = 80
COPY = re.compile(rf"[0-9a-f]{{{DIGITS}}}-.+")
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
FACTS, PART, LOCK = ".json", ".part", ".lock"
#: The file that is locked during eviction; its modification time is the last use of any copy.
FOLDER_LOCK = "folder.lock"


#: The facts about a shard whose store reports nothing.
UNKNOWN = FileFacts()


@dataclass(frozen=True)
class CopyFacts:
    """Facts about a copy.

    Attributes:
        url: the shard, without credentials.
        bytes: its size.
        sha256: its digest in hexadecimal digits.
        mtime_ns: the modification time of the copy, in nanoseconds.
        source: the version of the shard, as reported by its store: its size, and its ETag or modification time.
        run: the last run that asked the store for this version; "" if none has.
    """

    url: str
    bytes: int
    sha256: str
    mtime_ns: int
    source: FileFacts = UNKNOWN
    run: str = ""


class Entry:
    """The files that belong to a copy: the copy itself, its facts, the download in progress, and the lock.

    Args:
        folder: the folder of the cache.
        digest: the digest of the shard's URL.
        name: the end of the copy's name.
    """

    def __init__(self, folder: Path, digest: str, name: str) -> None:
        self.digest = digest
        self.path = folder / f"{digest}-{name}"
        self.facts_path = folder / f"{digest}{FACTS}"
        self.part = folder / f"{digest}{PART}"
        self.lock = folder / f"{digest}{LOCK}"

    @classmethod
    def of(cls, folder: Path, url: str) -> Entry:
        """Return the entry of a shard, named by a digest of its URL, which reveals no secrets.

        >>> Entry.of(Path("cache"), "https://me:pass@host/train/000.tar?sig=1").path.name.partition("-")[2]
        '000.tar'
        """
        digest = hashlib.sha256(url.encode(errors="surrogatepass")).hexdigest()[:DIGITS]
        scheme, rest = split_scheme(redact(url))
        name = "" if scheme == "pipe" else re.split(r"[?#]", rest)[0].rstrip("/").rpartition("/")[2].rpartition("@")[2]
        return cls(folder, digest, UNSAFE.sub("_", name)[-NAMED:] or "shard")

    def facts(self) -> CopyFacts | None:
        """Return the facts about the copy, or None if there are none or they are unreadable."""
        try:
            found = json.loads(self.facts_path.read_bytes())
            if (found["format"], found["version"]) != (FORMAT, VERSION):
                return None
            url, size, sha256, mtime_ns = (found[name] for name in ("url", "bytes", "sha256", "mtime_ns"))
            source, run = FileFacts(*found.get("source", ())), str(found.get("run", ""))
            return CopyFacts(str(url), int(size), str(sha256), int(mtime_ns), source, run)
        except (OSError, LookupError, TypeError, ValueError, OverflowError, RecursionError):
            return None

    def write_facts(self, facts: CopyFacts) -> None:
        """Write the facts about the copy; the caller holds its lock.

        Raises:
            OSError: the file cannot be written.
        """
        content: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(facts)}
        part = Path(f"{self.facts_path}{PART}")
        part.write_text(json.dumps(content), encoding="utf-8")
        part.replace(self.facts_path)

    def last_use(self) -> int:
        """Return the time of the copy's last use in nanoseconds; 0 if nothing is recorded."""
        return modified_ns(self.facts_path)

    def remove(self) -> None:
        """Remove the copy and its facts."""
        self.path.unlink(missing_ok=True)
        self.facts_path.unlink(missing_ok=True)


def modified_ns(path: Path) -> int:
    """Return the modification time of a file in nanoseconds; 0 if there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def is_copy(name: str) -> bool:
    """Whether a file in the folder of a cache is a copy, by its name."""
    return COPY.fullmatch(name) is not None


def entries(folder: Path) -> list[Entry]:
    """Return all copies in a folder, sorted by name."""
    names = filter(is_copy, sorted(os.listdir(folder)))  # noqa: PTH208  only the names are needed
    return [Entry(folder, name[:DIGITS], name[DIGITS + 1 :]) for name in names]


def digest_of(copy: io.FileIO) -> str:
    """Return the SHA-256 of an open file."""
    copy.seek(0)
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    while count := copy.readinto(buffer):
        digest.update(buffer[:count])
    return digest.hexdigest()


def stamp(folder: Path, path: Path) -> None:
    """Record the current use of a copy in a file's modification time, monotonically even if the clock is not.

    On a read-only disk, nothing is recorded, because copies there are never evicted.
    """
    try:
        with lock_file(folder / FOLDER_LOCK, keep_file=True) as descriptor, contextlib.suppress(FileNotFoundError):
            if descriptor is None:  # cannot happen after waiting
                return
            now = max(time.time_ns(), os.fstat(descriptor).st_mtime_ns + 1000)
            os.utime(descriptor, ns=(now, now))
            os.utime(path, ns=(now, now))
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise


LOGGER = logging.getLogger("wds_datapipes")

#: The minimum age of a stray file before it is removed, in seconds, because a process may be about to use it.
STRAY_S = 3600.0


#: A copy that was not used in this many whole passes is stale. It is more than 1, because the processes of a host begin
#: a pass at different times.
STALE_PASSES = 2


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
        """Begin a pass."""
        self._expected.clear()
        self._begun.append(modified_ns(folder / FOLDER_LOCK))  # 0 if nothing was ever copied

    def priority(self, entry: Entry) -> tuple[int, int]:
        """Return the sort key for eviction: stale copies, those used in this pass, expected ones, then others."""
        last_use = entry.last_use()
        group = 0 if last_use <= self._begun[0] else 1 if last_use > self._begun[-1] else 3
        return max(group, 2 * (entry.digest in self._expected)), last_use


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
            for entry in sorted(entries(folder), key=priority):
                used -= evict(entry)
                if used + need <= max_bytes:
                    break
        is_reserved = used + need <= max_bytes
        if is_reserved and own is not None:
            os.truncate(own, need)  # shows its final size to other processes
        return is_reserved


def evict_one(folder: Path, priority: Priority = Entry.last_use) -> bool:
    """Evict a copy that is not in use; return whether there was one."""
    with lock_file(folder / FOLDER_LOCK, keep_file=True):
        return any(evict(entry) for entry in sorted(entries(folder), key=priority))


def evict(entry: Entry) -> int:
    """Remove a copy, unless it is in use; return the number of freed bytes."""
    with lock_file(entry.lock, wait=False) as descriptor:
        if descriptor is None:  # another process is downloading or checking it
            return 0
        with lock_file(entry.path, wait=False, keep_file=True, create=False) as copy:
            if copy is None:
                return 0
            size = os.fstat(copy).st_size
            entry.remove()
        LOGGER.debug("Evicted the copy %s of %d bytes", entry.path, size)
        return size


def used_bytes(folder: Path, own: Path | None = None) -> int:
    """Return the total size of all copies in a folder, including downloads in progress."""
    used = 0
    for path in folder.iterdir():
        if (is_copy(path.name) or path.suffix not in (FACTS, LOCK)) and path != own:
            with suppress(FileNotFoundError):
                used += path.stat().st_size
    return used


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
