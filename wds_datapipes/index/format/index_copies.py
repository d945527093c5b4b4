"""Index copies: the indexes of remote shards, downloaded once per host and mapped by all of its processes."""

from __future__ import annotations

import logging
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from stat import S_ISDIR
from tempfile import gettempdir
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from wds_datapipes.errors import (
    CacheError,
    ChangedShardError,
    CorruptSidecarError,
    MissingSidecarError,
    ShardError,
    plural,
)
from wds_datapipes.index.format.index_file import index_url, parse_index, read_index
from wds_datapipes.index.format.options import AccessOptions
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.io.once_per_host import share_on_host
from wds_datapipes.io.openers import redact
from wds_datapipes.io.urls import create_folder, is_remote, split_scheme
from wds_datapipes.shard_cache.download import DownloadRequest
from wds_datapipes.shard_cache.entry import UNKNOWN, entries, modified_ns
from wds_datapipes.shard_cache.eviction import evict, reserve_space
from wds_datapipes.shard_cache.store import CacheFolder
from wds_datapipes.system import user_id

LOGGER = logging.getLogger("wds_datapipes")
#: The lifetime of copies that no process uses, and the interval between searches for them, in seconds.
KEPT_S, PAUSE_S = 86_400.0, 3600.0
#: The file whose modification time is the time of the last search.
CLEANED = "cleaned"


class IndexCopies:
    """Reads indexes. All processes of a host map the same copies of the indexes of remote shards.

    The copies are in the folder ``indexes`` of ``cache_dir``. Without it, they are in a temporary folder that only this
    user may open. When a run first reads a copy, one of its processes on the host asks the store whether the index is
    still the same; the others rely on the answer. If no copy can be made, the index is read into memory.

    Args:
        access: has ``cache_dir`` and the options of the store.
    """

    def __init__(self, access: AccessOptions) -> None:
        self._options = {"storage_options": access.storage_options}
        self._is_private = access.cache_dir is None
        self._parent = Path(access.cache_dir or Path(gettempdir(), f"wds-datapipes-{user_id()}"))
        run = share_on_host("begins to read indexes", lambda _: secrets.token_hex())
        self._folder = CacheFolder(self._parent / "indexes", run=run)
        self._is_cleaned = self._has_failed = False

    def read(self, url: str) -> ShardIndex:
        """Read an index.

        Raises:
            MissingSidecarError: it cannot be read.
            CorruptSidecarError: it is damaged or not an index.
        """
        if self._has_failed or not is_remote(split_scheme(url)[0]):
            return read_index(url, **self._options)
        try:
            self._prepare_folder()
            request = DownloadRequest(url, UNKNOWN, None, self._options)
            # The copy is pinned while it is mapped.
            with cast(BinaryIO, self._folder.open(request)) as copy:
                return parse_index(mmap(copy.fileno(), 0, access=ACCESS_READ), name=redact(url))
        except ShardError as error:
            raise MissingSidecarError(str(error)) from None
        except (CacheError, OSError) as error:
            self._has_failed = True
            LOGGER.warning("Each process reads the indexes of remote shards into its own memory: %s", error)
        except ValueError:  # it is damaged, and pinned by the frames of the error
            pass
        self._folder.discard(url, CorruptSidecarError())
        return read_index(url, **self._options)

    def _prepare_folder(self) -> None:
        """Check that the folder belongs to this user and remove copies that no run has used for a day.

        Raises:
            CacheError: another user could change the copies.
            OSError: the folder cannot be created.
        """
        if self._is_private:
            self._parent.mkdir(mode=0o700, exist_ok=True)
            facts = self._parent.lstat()
            if not S_ISDIR(facts.st_mode) or facts.st_uid != user_id() or facts.st_mode & 0o077:
                raise CacheError(
                    f"{self._parent} is not a folder that only this user may open. Remove it, or set TMPDIR"
                )
        cleaned = self._folder.path / CLEANED
        if self._is_cleaned or time.time() - modified_ns(cleaned) / 1e9 < PAUSE_S:
            return
        self._is_cleaned = True
        with suppress(OSError):  # the disk is read-only
            create_folder(self._folder.path)
            cleaned.touch()
            reserve_space(self._folder.path, None, 0, sys.maxsize)  # removes what killed processes left behind
            for entry in entries(self._folder.path):
                if time.time() - entry.last_use() / 1e9 > KEPT_S:
                    evict(entry)


class DatasetIndexes:
    """The indexes of the shards of a dataset, for reading samples by number.

    Args:
        urls: the shards.
        sizes: the number of samples in each shard; an index with a different number is an error.
        access: where the indexes are.
    """

    def __init__(
        self, urls: Sequence[str], sizes: Sequence[int] | npt.NDArray[np.int64], access: AccessOptions
    ) -> None:
        self._urls, self._sizes, self._folder = urls, sizes, access.index_dir
        self._copies = IndexCopies(access)

    def read(self, shard: int) -> ShardIndex:
        """Read the index of a shard.

        Raises:
            ChangedShardError: its number of samples differs from when the dataset was opened.
            SidecarError: it is missing or damaged, or its shard is compressed.
        """
        path = index_url(self._urls[shard], self._folder)
        try:
            index = self._copies.read(path)
        except MissingSidecarError as error:
            raise MissingSidecarError(f"{error}. Build the indexes of the dataset first, with build_indexes") from None
        index.check_random_access()
        if len(index) != self._sizes[shard]:
            raise ChangedShardError(
                f"The index {redact(path)} has {plural(len(index), 'sample')}, but the dataset was opened with "
                f"{self._sizes[shard]:,}. The shard was replaced, or the manifest belongs to other shards: write the "
                "manifest again, if there is one, and open the dataset again"
            )
        return index
