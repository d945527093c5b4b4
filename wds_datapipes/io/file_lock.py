"""Files shared by processes: locks that end with their owner, and files that are renamed when complete."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from wds_datapipes.system import HAS_LOCKS, MOVES_OPEN_FILES, OPEN_FLAGS, lock_descriptor, no_locks, unlock_descriptor

#: The errors of a read-only disk or folder.
READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
#: The errors of a file system without locks.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@contextmanager
def lock_file(path: Path, *, wait: bool = True, keep_file: bool = False, create: bool = True) -> Iterator[int | None]:
    """Lock a file within the context; yield its descriptor, or None if there is no lock.

    Args:
        path: the file.
        wait: wait for the current owner of the lock; otherwise, yield None if another process holds it.
        keep_file: do not remove the file at the end.
        create: create the file if needed; otherwise, yield None if it is missing.

    Raises:
        OSError: the file cannot be created, or its file system does not support locks.
    """
    if not HAS_LOCKS:  # before the file is created
        raise no_locks()
    owner = os.getpid()
    while True:
        # Some file systems, such as NFS, lock only files that are open for writing.
        access = os.O_RDWR | os.O_CREAT if create else os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY
        try:
            descriptor = os.open(path, access | OPEN_FLAGS, 0o666)
        except FileNotFoundError:
            if create:
                raise  # there is no folder
            yield None
            return
        try:
            try:
                lock_descriptor(descriptor, wait=wait)
            except BlockingIOError:
                yield None
                return
            if not is_same_file(path, descriptor):  # its previous owner has removed it
                continue
            try:
                yield descriptor
            finally:
                if os.getpid() == owner:  # a process forked in the meantime has a copy of the context
                    if not keep_file:
                        with contextlib.suppress(OSError):  # an unlocked file that stays harms nothing
                            path.unlink(missing_ok=True)
                    # Such a process also has the descriptor and would keep the lock.
                    unlock_descriptor(descriptor)
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


class AtomicFile:
    """Writes a file under a temporary name in the same folder, syncs it, and renames it.

    The file is locked while it is written, which distinguishes it from the leftovers of a killed process. Leftovers are
    removed the next time a file of the same name is written.

    Args:
        path: the final name of the file. An existing file stays until this one is finished.
        buffer_bytes: the size of the stream's buffer; 0 disables buffering.

    Raises:
        OSError: the file cannot be created.

    Attributes:
        stream: the stream to write to.
    """

    def __init__(self, path: str, *, buffer_bytes: int) -> None:
        self._path = path
        _remove_abandoned(path)
        self._part, self.stream = _create_locked(path, buffer_bytes)

    def finish(self) -> None:
        """Sync the file and rename it.

        Raises:
            OSError: syncing or renaming failed, or the disk is full. Call `discard` to remove the temporary file.
        """
        self.stream.flush()
        os.fsync(self.stream.fileno())
        if not MOVES_OPEN_FILES:
            self.stream.close()
        Path(self._part).replace(self._path)
        self.stream.close()
        sync_folder(self._path)

    def discard(self) -> None:
        """Remove the file, unless it is finished."""
        if MOVES_OPEN_FILES:
            self._remove()
        with contextlib.suppress(OSError):  # closing flushes, which may fail like the previous write
            self.stream.close()
        if not MOVES_OPEN_FILES:
            self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            Path(self._part).unlink()


def sync_folder(path: str) -> None:
    """Sync the folder of a file, so that a renamed file survives a power failure, if the system opens folders."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    folder = os.open(Path(path).parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _create_locked(path: str, buffer_bytes: int) -> tuple[str, BinaryIO]:
    """Create and lock the temporary file of ``path``."""
    while True:
        part = f"{path}.{os.getpid()}-{secrets.token_hex(4)}.part"
        stream: BinaryIO = open(part, "xb", buffering=buffer_bytes)  # noqa: PTH123, SIM115  the writer closes it
        with contextlib.suppress(OSError):  # without locks, no file is ever taken for abandoned
            lock_descriptor(stream.fileno())
        if Path(part).exists():  # no other process removed it as abandoned before it was locked
            return part, stream
        stream.close()


def _remove_abandoned(path: str) -> None:
    """Remove the temporary files of processes that were killed while writing ``path``."""
    folder, name = os.path.split(path)
    for each in os.listdir(folder or "."):  # noqa: PTH208  only the names are needed
        if each.startswith(f"{name}.") and each.endswith(".part"):
            with contextlib.suppress(OSError), lock_file(Path(folder, each), wait=False, create=False):
                pass  # removes the file
