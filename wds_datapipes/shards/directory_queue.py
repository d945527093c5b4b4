"""Directory queue: distributes the files of a directory to several processes, each file once."""

from __future__ import annotations

import contextlib
import ctypes
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

from wds_datapipes.errors import ShardOpenError
from wds_datapipes.io.file_lock import is_same_file

if TYPE_CHECKING:
    from typing_extensions import Self


Select = Literal["oldest", "random"]
After = Literal["keep", "delete", "return"]

#: The subdirectory for claimed files.
CLAIMS = ".claims"
#: The subdirectory for files that were read.
DONE = "done"
#: The arguments of ``renameat2`` for paths, and for a failure if the new name exists.
AT_FDCWD, RENAME_NOREPLACE = -100, 1
#: The errors of a system, sandbox or file system, such as NFS, that does not support it.
NO_NOREPLACE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


def take_files(
    folder: str, patterns: Sequence[str], *, select: Select, after: After, poll_s: float, timeout_s: float | None
) -> Iterator[str]:
    """Yield the paths of files in a directory, current and new ones, until none arrives for ``timeout_s``.

    A file counts as read when the next one is requested. If the iteration stops early, the file yielded last is
    returned to the directory.
    """
    rng = Random()
    with DirectoryQueue(folder) as claims:
        waiting: list[str] = []  # in reverse order
        latest = time.monotonic()
        checked = -math.inf
        while True:
            now = time.monotonic()
            if now - checked >= poll_s:
                checked = now
                claims.return_orphaned()
                waiting.clear()
            if not waiting:
                waiting = _list_files(folder, patterns)
                if select == "random":
                    rng.shuffle(waiting)
            while waiting:
                path = claims.take(waiting.pop())
                if path is not None:
                    yield path
                    claims.finish(path, after)
                    latest = time.monotonic()
                    break
            else:
                rest_s = poll_s if timeout_s is None else min(poll_s, latest + timeout_s - time.monotonic())
                if rest_s <= 0:
                    return
                time.sleep(rest_s)


class DirectoryQueue:
    """The files claimed by one iteration: in a separate directory next to a lock file.

    The operating system releases the lock when the process ends for any reason. So a claim that can be locked belongs
    to a process that has died, on any host that sees the locks.

    Args:
        folder: the directory to take files from.

    Raises:
        ShardOpenError: the directory cannot be written, or has no locks.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._claims = self._folder / CLAIMS
        self._owner = os.getpid()
        try:
            self._claim, self._lock = self._create_claim()
        except OSError as error:
            raise ShardOpenError(
                f"No shards can be claimed in the directory {folder!r}: {error.strerror}. It must be writable, and its "
                f"file system must support locks"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if os.getpid() == self._owner:  # not a forked process
            self._release(self._claim)
        self._lock.close()

    def take(self, name: str) -> str | None:
        """Claim a file and return its path, or ``None`` if it is gone, for example claimed by another process."""
        path = self._claim / name
        try:
            (self._folder / name).rename(path)
        except FileNotFoundError:
            if not self._claim.is_dir():
                raise
            return None
        return str(path)

    def finish(self, path: str, after: After) -> None:
        """Keep, delete or return a file that was read."""
        with contextlib.suppress(FileNotFoundError):  # already removed or moved
            if after == "delete":
                Path(path).unlink()
            elif after == "keep":
                (self._folder / DONE).mkdir(exist_ok=True)
                _move(Path(path), self._folder / DONE)
            else:
                os.utime(path)  # so that it is not the oldest, which is taken first
                _move(Path(path), self._folder)

    def return_orphaned(self) -> int:
        """Return the files claimed by processes that have died to the directory; return their number."""
        count = 0
        for token in {name.removesuffix(".lock") for name in os.listdir(self._claims)}:  # noqa: PTH208  only names
            if token == self._claim.name:
                continue
            with contextlib.suppress(FileNotFoundError), _try_lock(self._claims / f"{token}.lock") as is_locked:
                if is_locked:
                    count += self._release(self._claims / token)
        return count

    def _create_claim(self) -> tuple[Path, BinaryIO]:
        """Lock a new file, and make the directory next to it."""
        self._claims.mkdir(exist_ok=True)
        while True:
            claim = self._claims / f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
            name = Path(f"{claim}.lock")
            lock = name.open("wb")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if is_same_file(name, lock.fileno()):  # it was not removed as orphaned before it was locked
                    claim.mkdir()
                    return claim, lock
            except BaseException:
                lock.close()
                name.unlink(missing_ok=True)
                raise
            lock.close()

    def _release(self, claim: Path) -> int:
        """Return all files of a locked claim to the directory, and remove the claim; return their number."""
        count = 0
        with contextlib.suppress(FileNotFoundError):
            for path in sorted(claim.iterdir()):
                with contextlib.suppress(FileNotFoundError):
                    _move(path, self._folder)
                    count += 1
            claim.rmdir()
        Path(f"{claim}.lock").unlink(missing_ok=True)
        return count


@contextlib.contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Lock a file; yield False if another process holds the lock."""
    with path.open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_locked = False
        else:
            is_locked = True
        yield is_locked


def _list_files(folder: str, patterns: Sequence[str]) -> list[str]:
    """Return the names of the available files, the oldest last."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(".") and any(fnmatchcase(entry.name, pattern) for pattern in patterns):
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
    return [name for _, name in sorted(found, reverse=True)]


def _move(path: Path, folder: Path) -> None:
    """Move a file into a directory, in one step; if its name exists there, prefix it with a number."""
    number = 1
    while True:
        target = folder / (path.name if number == 1 else f"{number}-{path.name}")
        try:
            _rename_to_new_name(path, target)
        except FileExistsError:
            number += 1
        else:
            return


def _rename_to_new_name(path: Path, target: Path) -> None:
    """Rename a file.

    Raises:
        FileExistsError: the new name exists.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    code = errno.ENOSYS
    if hasattr(libc, "renameat2"):
        if not libc.renameat2(AT_FDCWD, os.fsencode(path), AT_FDCWD, os.fsencode(target), RENAME_NOREPLACE):
            return
        code = ctypes.get_errno()
    if code not in NO_NOREPLACE:
        raise OSError(code, os.strerror(code), os.fspath(path), None, os.fspath(target))
    # Not a link to the new name, since a process that is killed before it removes the old name leaves the shard twice.
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target))
    path.rename(target)
