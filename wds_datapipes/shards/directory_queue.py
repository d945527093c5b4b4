"""A directory as a queue: each of its files goes to exactly one of several processes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import logging
import math
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random
from typing import Literal

from wds_datapipes.errors import ShardOpenError
from wds_datapipes.io.file_lock import lock_file

LOGGER = logging.getLogger("wds_datapipes")

Select = Literal["oldest", "random"]
After = Literal["keep", "delete", "return"]

#: The subdirectory for claimed files, whose names are prefixed with random digits and a hyphen.
CLAIMS, NAME_START = ".claims", 9
#: The subdirectory for files that were read.
DONE = "done"
#: Arguments of ``renameat2``: for plain paths, and for failing if the new name exists.
AT_FDCWD, RENAME_NOREPLACE = -100, 1
#: The errors of systems, sandboxes and file systems, such as NFS, that do not support it.
NO_NOREPLACE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


def take_files(
    folder: str, patterns: Sequence[str], *, select: Select, after: After, poll_s: float, timeout_s: float | None
) -> Iterator[str]:
    """Yield the paths of current and new files in a directory until none arrives for ``timeout_s``.

    A file counts as read when the next one is requested. If iteration stops early, the last file yielded is returned to
    the directory.

    Raises:
        ShardOpenError: the directory cannot be read or written, or has no locks. A file that was claimed is returned,
            at the latest once this process has ended.
    """
    rng, claims = Random(), Path(folder, CLAIMS)
    waiting: list[Path] = []  # in reverse order
    latest = time.monotonic()
    checked = -math.inf
    while True:
        now = time.monotonic()
        if now - checked >= poll_s:
            checked = now
            with _named(folder):
                _return_orphaned(claims)
            waiting.clear()
        if not waiting:
            with _named(folder):
                waiting = _list_files(folder, patterns)
            if select == "random":
                rng.shuffle(waiting)
        while waiting:
            with _claim_file(waiting.pop(), claims) as path:
                if path is None:
                    continue
                yield str(path)
                with _named(folder):
                    _finish(path, after)
            latest = time.monotonic()
            break
        else:
            rest_s = poll_s if timeout_s is None else min(poll_s, latest + timeout_s - time.monotonic())
            if rest_s <= 0:
                return
            time.sleep(rest_s)


@contextlib.contextmanager
def _claim_file(path: Path, claims: Path) -> Iterator[Path | None]:
    """Claim a file: move it to the claims and lock it. Yield its new path, or None if it is gone.

    At the end, the file is returned, unless it was moved or removed. The operating system releases the lock when the
    process ends for any reason. A claimed file that can be locked therefore belongs to a process that has died, on any
    host that shares the locks.
    """
    owner, claim = os.getpid(), claims / f"{secrets.token_hex(NAME_START // 2)}-{path.name}"
    with contextlib.ExitStack() as held:
        with _named(claims.parent):
            with contextlib.suppress(FileNotFoundError):  # claimed by another process
                path.rename(claim)
            # A process that looks for orphaned files may briefly hold the lock.
            lock = lock_file(claim, keep_file=True, create=False)
            try:
                descriptor = held.enter_context(lock)
            except OSError:
                _move(claim, path.parent, path.name)
                raise
        try:
            yield None if descriptor is None else claim
        finally:
            if descriptor is not None and os.getpid() == owner:  # not a forked process
                try:
                    _move(claim, path.parent, path.name)
                except OSError as error:
                    LOGGER.warning("%s stays claimed until a process looks for shards again: %s", claim, error)


def _finish(path: Path, after: After) -> None:
    """Keep, delete or return a claimed file that was read."""
    if after == "delete":
        path.unlink(missing_ok=True)
    elif after == "keep":
        done = path.parent.with_name(DONE)
        done.mkdir(exist_ok=True)
        _move(path, done, path.name[NAME_START:])
    else:
        with contextlib.suppress(FileNotFoundError):  # the program has removed it
            os.utime(path)  # make it the newest, because the oldest is taken first


def _return_orphaned(claims: Path) -> None:
    """Return files to the directory whose claiming processes have died."""
    claims.mkdir(exist_ok=True)
    with lock_file(claims / ".lock", wait=False):  # fails if there are no locks
        orphaned = [claims / name for name in os.listdir(claims) if name[0] != "."]  # noqa: PTH208  only names
    for path in orphaned:
        with lock_file(path, wait=False, keep_file=True, create=False) as descriptor:
            if descriptor is not None:
                _move(path, claims.parent, path.name[NAME_START:])


@contextlib.contextmanager
def _named(folder: str | Path) -> Iterator[None]:
    """Raise an error of the operating system as one that names the directory.

    Raises:
        ShardOpenError: the directory cannot be read or written, or has no locks.
    """
    try:
        yield
    except OSError as error:
        where = f" ({error.filename!r})" if error.filename else ""
        failed = ShardOpenError(
            f"No shards can be claimed in the directory {str(folder)!r}: {error.strerror or error}{where}. It must be "
            "writable, and its file system must support locks"
        )
        failed.concerns_all = True
        raise failed from error


def _list_files(folder: str, patterns: Sequence[str]) -> list[Path]:
    """Return the available files, oldest last."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(".") and any(fnmatchcase(entry.name, pattern) for pattern in patterns):
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        found.append((entry.stat(follow_symlinks=False).st_mtime_ns, Path(entry.path)))
    return [path for _, path in sorted(found, reverse=True)]


def _move(path: Path, folder: Path, name: str) -> None:
    """Atomically move a file, unless it is gone, into a directory; if its name exists there, prefix a number."""
    for number in itertools.count(1):
        try:
            _rename_to_new_name(path, folder / (name if number == 1 else f"{number}-{name}"))
        except FileExistsError:
            continue
        except FileNotFoundError:
            pass
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
    # Do not link to the new name: a process killed before it removes the old name would leave the shard twice.
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target))
    path.rename(target)
