"""Locks by which one process builds an index, and the others that need it wait."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from wds_datapipes.errors import MissingSidecarError
from wds_datapipes.io.file_lock import NO_LOCKS, lock_file
from wds_datapipes.io.openers import local_path

LOGGER = logging.getLogger("wds_datapipes")
#: The file that is locked in the folder of indexes while many of them are built.
FOLDER_LOCK = ".wdsidx.lock"


@contextmanager
def lock_index(path: str, *, folder: bool = False, create: bool = False) -> Iterator[bool]:
    """Hold the lock of an index, or of its folder, after waiting for the process that holds it.

    Yields whether there was such a process, which may have built the index. A remote folder, and one on a file system
    without locks, is not locked. The kernel releases the lock of a process that dies.

    Args:
        path: the index.
        folder: lock its folder.
        create: create the folder if needed.

    Raises:
        MissingSidecarError: the folder cannot be written.
    """
    file, has_waited = local_path(path), False
    with ExitStack() as stack:
        if file is not None:
            lock = Path(file).parent / FOLDER_LOCK if folder else Path(f"{file}.lock")
            try:
                if create:
                    lock.parent.mkdir(parents=True, exist_ok=True)
                if stack.enter_context(lock_file(lock, wait=False)) is None:
                    has_waited = True
                    level = logging.WARNING if folder else logging.INFO
                    LOGGER.log(level, "Waiting for another process, which builds indexes and has locked %s", lock)
                    stack.enter_context(lock_file(lock))
            except (FileNotFoundError, ValueError):  # nor is there the shard, which is reported when it is opened
                pass
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    what = "indexes" if folder else Path(file).name
                    raise MissingSidecarError(
                        f"The directory {lock.parent} cannot be written, so {what} cannot be built there: "
                        f"{error.strerror}. Pass another directory for indexes, index_dir="
                    ) from None
                lock.unlink(missing_ok=True)
        yield has_waited
