"""Locks by which one process builds an index, and the others that need it wait."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from wds_datapipes.errors import MissingSidecarError
from wds_datapipes.io.file_lock import NO_LOCKS, lock_file
from wds_datapipes.io.openers import local_path

__all__ = ["FOLDER_LOCK", "lock_folder", "lock_index"]

LOGGER = logging.getLogger("wds_datapipes")
#: The file that is locked in the folder of indexes while many of them are built.
FOLDER_LOCK = ".wdsidx.lock"


@contextmanager
def lock_folder(path: str, *, create: bool = False) -> Iterator[bool]:
    """Hold the lock of the folder of an index, after waiting for the process that holds it.

    Yields whether there was such a process, which may have built the index. A remote folder, and one on a file system
    without locks, is not locked. The kernel releases the lock of a process that dies.

    Args:
        path: the index.
        create: create the folder if needed.

    Raises:
        MissingSidecarError: the folder cannot be written.
    """
    file = local_path(path)
    if file is None:
        yield False
        return
    folder = Path(file).parent
    with _locked(folder / FOLDER_LOCK, "indexes", logging.WARNING, create=create) as has_waited:
        yield has_waited


@contextmanager
def lock_index(path: str, *, create: bool = False) -> Iterator[None]:
    """Hold the lock of a single index; otherwise the same as `lock_folder`."""
    file = local_path(path)
    if file is None:
        yield
        return
    with _locked(Path(f"{file}.lock"), Path(file).name, logging.INFO, create=create):
        yield


@contextmanager
def _locked(lock: Path, what: str, level: int, *, create: bool) -> Iterator[bool]:
    with ExitStack() as stack:
        has_waited = False
        try:
            if create:
                lock.parent.mkdir(parents=True, exist_ok=True)
            if stack.enter_context(lock_file(lock, wait=False)) is None:
                has_waited = True
                LOGGER.log(level, "Waiting for another process, which builds indexes and has locked %s", lock)
                stack.enter_context(lock_file(lock))
        except (FileNotFoundError, ValueError):  # nor is there the shard, which is reported when it is opened
            pass
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise MissingSidecarError(
                    f"The directory {lock.parent} cannot be written, so {what} cannot be built there: "
                    f"{error.strerror}. Pass another directory for indexes, index_folder= of IndexedSamples or folder= "
                    "of build_indexes"
                ) from None
            lock.unlink(missing_ok=True)
        yield has_waited
