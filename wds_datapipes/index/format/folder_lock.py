"""The lock of a folder while indexes are built in it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from wds_datapipes.errors import MissingSidecarError
from wds_datapipes.hints import INDEX_DIR
from wds_datapipes.io.file_lock import NO_LOCKS, lock_file
from wds_datapipes.io.openers import local_path
from wds_datapipes.io.sidecars import folder_of
from wds_datapipes.io.urls import create_folder

LOGGER = logging.getLogger("wds_datapipes")
#: The file that is locked in the folder of indexes while they are built.
FOLDER_LOCK = ".wdsidx.lock"


@contextmanager
def lock_folder(path: str, *, create: bool = False) -> Iterator[bool]:
    """Hold the lock of the folder of an index, after waiting for the process that holds it.

    Yields whether there was such a process, which may have built indexes. Remote folders and folders on a file system
    without locks are not locked. The kernel releases the lock of a process that dies.

    Args:
        path: the index.
        create: create the folder if needed.

    Raises:
        MissingSidecarError: the folder cannot be written.
    """
    file, has_waited = local_path(path), False
    with ExitStack() as stack:
        if file is not None:
            lock = Path(file).parent / FOLDER_LOCK
            try:
                if create:
                    create_folder(lock.parent)
                if stack.enter_context(lock_file(lock, wait=False)) is None:
                    has_waited = True
                    LOGGER.warning("Waiting for another process that builds indexes and has locked %s", lock)
                    stack.enter_context(lock_file(lock))
            except (FileNotFoundError, ValueError):  # nor is there the shard, which is reported when it is opened
                pass
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise MissingSidecarError(
                        f"The directory {lock.parent} cannot be written, so indexes cannot be built there: "
                        f"{error.strerror}. For another directory, ",
                        INDEX_DIR,
                    ) from None
                lock.unlink(missing_ok=True)
        yield has_waited


def remove_abandoned_locks(paths: Iterable[str]) -> None:
    """Remove the locks that killed processes have left in the folders of indexes; `lock_folder` removes the others."""
    for folder in {folder_of(path) for path in paths}:
        if (local := local_path(folder)) is not None:
            with suppress(OSError), lock_file(Path(local, FOLDER_LOCK), wait=False, create=False):
                pass
