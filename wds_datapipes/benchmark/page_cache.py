"""The pages of shards that the operating system keeps in memory."""

from __future__ import annotations

import os
from collections.abc import Iterable

from wds_datapipes.io.local import local_path

__all__ = ["drop_pages", "find_remote"]


def find_remote(urls: Iterable[str]) -> str | None:
    """Return the first URL that is not a local file, or None."""
    return next((url for url in urls if local_path(url) is None), None)


def drop_pages(urls: Iterable[str]) -> None:
    """Remove the pages of local files from the page cache, so that they are read from the disk."""
    for url in urls:
        path = local_path(url)
        if path is None:
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not written yet cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
