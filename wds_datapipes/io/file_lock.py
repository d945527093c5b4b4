"""Lock on a file, which the kernel releases when its owner dies."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: The errors of a read-only disk or folder.
READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
#: The errors of a file system without locks.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@contextmanager
def lock_file(path: Path, *, wait: bool = True, keep_file: bool = False) -> Iterator[int | None]:
    """Lock a file within the context; yield its descriptor, or None if another process holds the lock.

    Args:
        path: the file, which is created if needed.
        wait: wait for the current owner of the lock.
        keep_file: do not remove the file at the end.

    Raises:
        OSError: the file cannot be created, or its file system does not support locks.
    """
    owner = os.getpid()
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield None
                return
            if not is_same_file(path, descriptor):  # its last owner has removed it
                continue
            try:
                yield descriptor
            finally:
                if os.getpid() == owner:  # a process forked meanwhile has a copy of the context
                    if not keep_file:
                        path.unlink(missing_ok=True)
                    # Such a process has the descriptor too, and would keep the lock.
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
            return
        finally:
            os.close(descriptor)


def is_same_file(path: Path, descriptor: int) -> bool:
    """Whether a path still refers to an open file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    own = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)
