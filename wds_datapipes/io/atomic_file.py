"""Atomic files: written under a temporary name, and renamed when they are complete."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path
from typing import BinaryIO


class AtomicFile:
    """Writes a file under a temporary name in the same folder, syncs it, and renames it.

    The file is locked while it is written, which distinguishes it from the leftovers of a killed process. Leftovers are
    removed the next time that a file of the same name is written.

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
        Path(self._part).replace(self._path)
        self.stream.close()
        sync_folder(self._path)

    def discard(self) -> None:
        """Remove the file, unless it is finished."""
        with contextlib.suppress(OSError):
            Path(self._part).unlink()
        with contextlib.suppress(OSError):  # closing flushes, which may fail as the write before it did
            self.stream.close()


def sync_folder(path: str) -> None:
    """Sync the folder of a file, so that a renamed file survives a power failure."""
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
        with contextlib.suppress(OSError):  # a file system without locks never reports a file as abandoned
            fcntl.flock(stream, fcntl.LOCK_EX)
        if Path(part).exists():  # no other process removed it as abandoned before it was locked
            return part, stream
        stream.close()


def _remove_abandoned(path: str) -> None:
    """Remove the temporary files of processes that were killed while writing ``path``."""
    folder, name = os.path.split(path)
    for each in os.listdir(folder or "."):  # noqa: PTH208  only the names are needed
        if each.startswith(f"{name}.") and each.endswith(".part"):
            part = Path(folder, each)
            with contextlib.suppress(OSError), part.open("rb") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()
