"""Cache entry: the name of a copy, what is recorded about it, and when it was last used."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wds_datapipes.io.openers import redact, split_scheme

__all__ = ["READ_ONLY", "CopyFacts", "Entry", "entries", "lock_file", "stamp"]

FORMAT = "wds-datapipes copy"
VERSION = 1
#: Digits of the digest in a name: 128 bits.
DIGITS = 32
#: How many characters of a shard's name are in that of its copy, for people who list the folder.
NAMED = 80
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
FACTS, PART, LOCK = ".json", ".part", ".lock"
#: The file whose lock is held while room is made, and whose time is that of the last use of any copy.
FOLDER_LOCK = "folder.lock"
#: How a disk says that this process may only read.
READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


@dataclass(frozen=True)
class CopyFacts:
    """Facts about a copy.

    Attributes:
        url: the shard, without credentials.
        bytes: its size.
        sha256: its digest in hexadecimal digits.
        mtime_ns: the time of the copy's last change, in nanoseconds, which changes when the copy is written to.
    """

    url: str
    bytes: int
    sha256: str
    mtime_ns: int


class Entry:
    """The files of one copy: the copy, its facts, the download in progress, and its lock.

    Args:
        folder: the folder of the cache.
        digest: what tells one shard from all others.
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
        """Return the entry of a shard, named by a digest of its URL, which shows no secret.

        >>> Entry.of(Path("kept"), "https://me:pass@host/train/000.tar?sig=1").path.name.partition("-")[2]
        '000.tar'
        """
        digest = hashlib.sha256(url.encode(errors="surrogatepass")).hexdigest()[:DIGITS]
        scheme, rest = split_scheme(url)
        name = "" if scheme == "pipe" else re.split(r"[?#]", rest)[0].rstrip("/").rpartition("/")[2].rpartition("@")[2]
        return cls(folder, digest, UNSAFE.sub("_", redact(name))[-NAMED:] or "shard")

    def facts(self) -> CopyFacts | None:
        """Return the facts about the copy, or None if there are none or they are unreadable."""
        try:
            found = json.loads(self.facts_path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or (found.pop("format", None), found.pop("version", None)) != (FORMAT, VERSION):
            return None
        try:
            return CopyFacts(str(found["url"]), int(found["bytes"]), str(found["sha256"]), int(found["mtime_ns"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            return None

    def write_facts(self, facts: CopyFacts) -> None:
        """Write the facts about the copy.

        Raises:
            OSError: that cannot be written.
        """
        described: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(facts)}
        part = Path(f"{self.facts_path}.{os.getpid()}-{secrets.token_hex(4)}{PART}")
        try:
            part.write_text(json.dumps(described), encoding="utf-8")
            part.replace(self.facts_path)
        finally:
            part.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the copy and its facts."""
        self.path.unlink(missing_ok=True)
        self.facts_path.unlink(missing_ok=True)


def entries(folder: Path) -> list[Entry]:
    """Return all copies of a folder, in the order of their names."""
    found = [re.fullmatch(rf"([0-9a-f]{{{DIGITS}}})-(.+)", name) for name in sorted(os.listdir(folder))]  # noqa: PTH208  names are wanted
    return [Entry(folder, match[1], match[2]) for match in found if match]


@contextmanager
def lock_file(path: Path, *, wait: bool = True, keep: bool = False) -> Iterator[int | None]:
    """Lock a file while in the context; yield its descriptor, or None if another process holds the lock.

    Args:
        path: the file, which is made if need be.
        wait: wait for another owner.
        keep: leave the file there in the end.

    Raises:
        OSError: the file cannot be made, or its file system has no locks.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield None
                return
            if not _is_still(path, descriptor):  # its owner has removed it, and another one may have made it again
                continue
            try:
                yield descriptor
            finally:
                if not keep:
                    path.unlink(missing_ok=True)
                # A process that was forked meanwhile has the descriptor, too, and would keep the lock.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            return
        finally:
            os.close(descriptor)


def stamp(folder: Path, path: Path) -> None:
    """Record in a file's time that its copy is used now, monotonically even if the clock is not.

    On a disk that this process may only read, no copy leaves, and nothing needs a note.
    """
    try:
        with lock_file(folder / FOLDER_LOCK, keep=True) as descriptor, contextlib.suppress(FileNotFoundError):
            if descriptor is None:  # which cannot be: it was waited for
                return
            now = max(time.time_ns(), os.fstat(descriptor).st_mtime_ns + 1000)
            os.utime(descriptor, ns=(now, now))
            os.utime(path, ns=(now, now))
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether a name still belongs to an open file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    own = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)
