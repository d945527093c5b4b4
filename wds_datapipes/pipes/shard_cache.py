"""Local copies of shards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import get_args

from torch.utils.data import IterDataPipe

from wds_datapipes.index.manifest import Manifest, read_manifest
from wds_datapipes.pipes.directory_shards import DirectoryShards
from wds_datapipes.pipes.stage import Stage, register_stage
from wds_datapipes.pipes.state.graph import upstream
from wds_datapipes.shard_cache.cached_shards import Known, cache_wds_shards
from wds_datapipes.shard_cache.store import CacheFolder, Check

__all__ = ["ShardCacher"]

#: The environment variable of webdataset that has each fetch told.
VERBOSE = "WDS_VERBOSE_CACHE"


@register_stage("cache_wds_shards")
class ShardCacher(Stage[str]):
    """Read local copies of shards, fetched when they are read first (functional name: ``cache_wds_shards``).

    Place it right before ``.load_wds_shards()``: while a shard is read, the next ones of its worker are fetched.
    Nothing is fetched for a shard that is passed over, as when a state is loaded. ``__url__`` stays the shard's own
    URL, and ``__local_path__`` is that of the copy.

    Any number of processes may share a folder: workers, ranks, other runs, and other hosts if its file system has locks
    for them. A shard is fetched by one of them, while others that want it wait. A copy gets its name once it is whole
    and on the disk. It stays while somebody reads it; of the others, the one that was used longest ago leaves first.
    A copy that is no longer what was fetched is fetched again.

    Everything is copied but standard input: also files of this host, as the folder may be on a faster disk.

    Each fetch is logged at the level INFO; with ``WDS_VERBOSE_CACHE=1``, at WARNING.

    Yields:
        str: the URLs of ``source``, in their order.

    Args:
        source: yields URLs of shards.
        cache_dir: the folder, which is made if need be. Its copies are called by a digest of the whole URL. A file
            under webdataset's name for a shard is its copy, if it has the shard's size and is a whole archive.
        max_bytes: how much all copies may have together, those of other processes included; None is as much as the disk
            has. A shard for which there is no room is read from its source, with a warning.
        prefetch: how many of the next shards are fetched while one is read; none behind `DirectoryShards`, where to ask
            for the next one says that the last one was read.
        manifest: of the dataset, or where it is. What is fetched has to have the size and the digest that it tells.
        check: how a copy is held against what was fetched, each time that it is opened: ``"size"``, and the time of its
            last change, costs nothing; ``"digest"`` reads all of it.

    Raises:
        CacheError: the folder cannot be written, or the disk is full, with no copy left that could leave.
        TruncatedShardError: less than the whole shard came, twice.
        CorruptShardError: a shard has not the digest in the manifest, twice.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> shard = build_shard("train.tar", [{"__key__": "a", "cls": b"1"}])
        >>> pipe = ShardList(shard).cache_wds_shards("copies", max_bytes=10**9).load_wds_shards().group_samples()
        >>> [(sample["__url__"], sample["__local_path__"][-10:]) for sample in pipe]
        [('train.tar', '-train.tar')]
    """

    #: A state goes on with other copies, or with none.
    is_transparent = True

    def __init__(
        self,
        source: IterDataPipe[str],
        cache_dir: str | os.PathLike[str],
        *,
        max_bytes: int | None = None,
        prefetch: int = 1,
        manifest: Manifest | str | os.PathLike[str] | None = None,
        check: Check = "size",
    ) -> None:
        super().__init__()
        if not isinstance(cache_dir, str | os.PathLike):
            raise TypeError(f"cache_dir is the path of a folder, not {cache_dir!r}")
        if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int)):
            raise TypeError(f"max_bytes is a whole number of bytes, or None, not {max_bytes!r}")
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes is a number of bytes from 1, or None, not {max_bytes!r}")
        if isinstance(prefetch, bool) or not isinstance(prefetch, int):
            raise TypeError(f"prefetch is a number of shards, not {prefetch!r}")
        if prefetch < 0:
            raise ValueError(f"prefetch is a number of shards from 0, not {prefetch!r}")
        if check not in get_args(Check):
            raise ValueError(f'check is "size" or "digest", not {check!r}')
        self.source = source
        self.cache_dir = os.fspath(cache_dir)
        self.max_bytes = max_bytes
        self.prefetch = prefetch
        self.check = check
        self._known = _known_shards(manifest)

    def __iter__(self) -> Iterator[str]:
        verbose = os.environ.get(VERBOSE, "0") not in ("", "0")
        folder = CacheFolder(self.cache_dir, self.max_bytes, self.check, verbose=verbose)
        # To ask DirectoryShards for the next shard says that the last one was read, and may be deleted.
        prefetch = 0 if any(isinstance(stage, DirectoryShards) for stage in upstream(self.source)) else self.prefetch
        yield from cache_wds_shards(self.source, folder, prefetch=prefetch, known=self._known)

    def __len__(self) -> int:
        return len(self.source)


def _known_shards(manifest: Manifest | str | os.PathLike[str] | None) -> Known:
    if manifest is None:
        return {}
    found = manifest if isinstance(manifest, Manifest) else read_manifest(manifest)
    return {entry.url: (entry.bytes, entry.sha256) for entry in found.entries}
