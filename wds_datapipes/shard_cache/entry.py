"""Cache entries: the name of a copy, the facts recorded about it, and the time of its last use."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from wds_datapipes.io.file_lock import READ_ONLY, lock_file
from wds_datapipes.io.openers import redact, split_scheme
from wds_datapipes.io.remote.remote_file import FileFacts
from wds_datapipes.redaction.signatures import without_signature

FORMAT = "wds-datapipes copy"
VERSION = 1
#: The number of hexadecimal digits of the digest in a name: 128 bits.
DIGITS = 32
#: The maximum number of characters of a shard's name in its copy's name, for people who list the folder.
NAMED = 80
COPY = re.compile(rf"[0-9a-f]{{{DIGITS}}}-.+")
#: The names of the other files of the cache, all but its lock.
OWN = re.compile(rf"[0-9a-f]{{{DIGITS}}}\.(?:json|part|lock|json\.(?:[\w-]+\.)?part)")
#: The name of a download in progress; facts that are being written do not count towards the size of the cache.
DOWNLOAD = re.compile(rf"[0-9a-f]{{{DIGITS}}}\.part")
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
FACTS, PART, LOCK = ".json", ".part", ".lock"
#: The file that is locked during eviction; its modification time is the last use of any copy.
FOLDER_LOCK = "folder.lock"


UrlToName: TypeAlias = "Callable[[str], str]"
"""Returns what identifies a shard: URLs with equal results share a copy."""

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
        self.folder, self.digest, self._name = folder, digest, name

    # Eviction needs only one of these paths of each copy in a folder.

    @cached_property
    def path(self) -> Path:
        """The copy."""
        return self.folder / f"{self.digest}-{self._name}"

    @cached_property
    def facts_path(self) -> Path:
        """The facts about it; its modification time is the last use of the copy."""
        return self.folder / f"{self.digest}{FACTS}"

    @cached_property
    def part(self) -> Path:
        """The download in progress."""
        return self.folder / f"{self.digest}{PART}"

    @cached_property
    def lock(self) -> Path:
        """The file that is locked during a download."""
        return self.folder / f"{self.digest}{LOCK}"

    @classmethod
    def of(cls, folder: Path, url: str, url_to_name: UrlToName = without_signature) -> Entry:
        """Return the entry of a shard, named by a digest of its URL, which reveals no secrets.

        >>> Entry.of(Path("cache"), "https://me:pass@host/train/000.tar?sig=1").path.name.partition("-")[2]
        '000.tar'
        """
        identity: object = url_to_name(str(url))
        if not isinstance(identity, str):
            raise TypeError(f"url_to_name must return a string, but returned {identity!r:.100} for {redact(url)}")
        digest = hashlib.sha256(identity.encode(errors="surrogatepass")).hexdigest()[:DIGITS]
        scheme, rest = split_scheme(redact(url))
        name = "" if scheme == "pipe" else re.split(r"[?#]", rest)[0].rstrip("/").rpartition("/")[2].rpartition("@")[2]
        return cls(folder, digest, UNSAFE.sub("_", name)[-NAMED:] or "shard")

    @property
    def is_link(self) -> bool:
        """Whether the copy is a link to a file that was put into the folder, which is never removed."""
        return self.path.is_symlink()

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
        try:
            part.write_text(json.dumps(content), encoding="utf-8")
            part.replace(self.facts_path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def size(self) -> int:
        """Return the size of the copy in bytes; 0 if there is none."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

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


def entries(folder: Path, *, with_links: bool = True) -> list[Entry]:
    """Return all copies in a folder, sorted by name; without links, only those that were downloaded."""
    with os.scandir(folder) as files:
        names = sorted(file.name for file in files if is_copy(file.name) and (with_links or not file.is_symlink()))
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
