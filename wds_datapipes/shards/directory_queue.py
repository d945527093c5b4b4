"""Directory queue: several processes take files from one directory, each file once."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, BinaryIO, Literal

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["After", "DirectoryQueue", "Select", "take_files"]

Select = Literal["oldest", "random"]
After = Literal["keep", "delete", "return"]

#: Where claimed files are, below the directory.
CLAIMS = ".claims"
#: Where files go that were read.
DONE = "done"
#: What a file system says that has no hard links.
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


def take_files(
    folder: str, patterns: Sequence[str], *, select: Select, after: After, poll_s: float, timeout_s: float | None
) -> Iterator[str]:
    """Yield the paths of files that are in a directory, or come into it, until none has come for ``timeout_s``.

    A file counts as read when the next one is asked for. The one that was yielded last is given back if the iteration
    is broken off.
    """
    rng = Random()
    with DirectoryQueue(folder) as claims:
        waiting: list[str] = []  # the next one last
        latest = time.monotonic()
        looked = -math.inf
        while True:
            now = time.monotonic()
            if now - looked >= poll_s:
                looked = now
                claims.give_back_lost()
                waiting.clear()
            if not waiting:
                waiting = _list_files(folder, patterns)
                if select == "random":
                    rng.shuffle(waiting)
            while waiting:
                path = claims.take(waiting.pop())
                if path is not None:
                    yield path
                    claims.settle(path, after)
                    latest = time.monotonic()
                    break
            else:
                rest_s = poll_s if timeout_s is None else min(poll_s, latest + timeout_s - time.monotonic())
                if rest_s <= 0:
                    return
                time.sleep(rest_s)


class DirectoryQueue:
    """The files that one iteration has taken: in a directory of its own, beside a file that it holds locked.

    The system releases the lock when the process ends, however it ends. So a claim whose lock can be had is one of a
    process that has died, and this holds for any process number and any host that sees the locks.

    Args:
        folder: the directory that files are taken from.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._all = self._folder / CLAIMS
        self._mine, self._lock = self._begun()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(self._mine)
        self._lock.close()

    def take(self, name: str) -> str | None:
        """Take a file, and return its path; or ``None`` if it has gone, as when another process has taken it."""
        path = self._mine / name
        try:
            (self._folder / name).rename(path)
        except FileNotFoundError:
            if not self._mine.is_dir():
                raise
            return None
        return str(path)

    def settle(self, path: str, after: After) -> None:
        """Do with a file what is to be done after it was read."""
        with contextlib.suppress(FileNotFoundError):  # someone was faster
            if after == "delete":
                Path(path).unlink()
            elif after == "keep":
                (self._folder / DONE).mkdir(exist_ok=True)
                _move(Path(path), self._folder / DONE)
            else:
                os.utime(path)  # as the oldest, it would be taken again before all others
                _move(Path(path), self._folder)

    def give_back_lost(self) -> int:
        """Put files back that processes had claimed which have died; return how many."""
        given = 0
        for token in {name.removesuffix(".lock") for name in os.listdir(self._all)}:  # noqa: PTH208  names are wanted
            if token == self._mine.name:
                continue
            with contextlib.suppress(FileNotFoundError), _lock_of_lost(self._all / f"{token}.lock") as is_lost:
                if is_lost:
                    given += self._end(self._all / token)
        return given

    def _begun(self) -> tuple[Path, BinaryIO]:
        """Lock a new file, and make the directory beside it."""
        self._all.mkdir(exist_ok=True)
        while True:
            mine = self._all / f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
            name = Path(f"{mine}.lock")
            lock = name.open("wb")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if name.exists():  # and was not taken for a lost one before it was locked
                    mine.mkdir()
                    return mine, lock
            except BaseException:
                lock.close()
                name.unlink(missing_ok=True)
                raise
            lock.close()

    def _end(self, claims: Path) -> int:
        """Put all files back of someone's claims, whose lock is held; return how many."""
        given = 0
        with contextlib.suppress(FileNotFoundError):
            for path in sorted(claims.iterdir()):
                with contextlib.suppress(FileNotFoundError):
                    _move(path, self._folder)
                    given += 1
            claims.rmdir()
        Path(f"{claims}.lock").unlink(missing_ok=True)
        return given


@contextlib.contextmanager
def _lock_of_lost(path: Path) -> Iterator[bool]:
    """Hold the lock on a file, or tell that another process does."""
    with path.open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_lost = False
        else:
            is_lost = True
        yield is_lost


def _list_files(folder: str, patterns: Sequence[str]) -> list[str]:
    """Return the names of the files that may be taken, the oldest last."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(".") and any(fnmatchcase(entry.name, pattern) for pattern in patterns):
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
    return [name for _, name in sorted(found, reverse=True)]


def _move(path: Path, folder: Path) -> None:
    """Move a file into a directory; where there is one of its name already, a number comes before its own."""
    number = 1
    while True:
        target = folder / (path.name if number == 1 else f"{number}-{path.name}")
        try:
            target.hardlink_to(path)  # which a rename would do over the other file
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if target.exists():
                number += 1
                continue
            path.rename(target)
            return
        path.unlink()
        return
