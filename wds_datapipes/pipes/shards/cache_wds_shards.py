"""The stage that caches shards. It imports the cache, and with it fsspec, when it is used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from wds_datapipes.arguments import check_integer, check_optional_integer, check_path
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import PipelineGraph
from wds_datapipes.pipes.roles import Transform
from wds_datapipes.pipes.stage import EngineStage
from wds_datapipes.redaction.signatures import without_signature

if TYPE_CHECKING:
    from wds_datapipes.index.format.manifest import Manifest
    from wds_datapipes.shard_cache.cached_shards import KnownShards
    from wds_datapipes.shard_cache.entry import UrlToName
    from wds_datapipes.shard_cache.eviction import Passes


#: webdataset's environment variable, which logs each download.
VERBOSE = "WDS_VERBOSE_CACHE"


class ShardCacher(Transform, EngineStage[str]):
    """Reads shards from local copies, which are downloaded on first use (functional name: ``cache_wds_shards``).

    Put it directly before ``.load_wds_shards()``: while a shard is read, the next shards of the worker are downloaded.
    Shards that are skipped, as when a state is loaded, are not downloaded. ``__url__`` is the URL of the shard, and
    ``__local_path__`` is the path of the copy.

    Any number of processes may share a folder: workers, ranks, other runs, and other hosts if the file system has locks
    between hosts. One process downloads a shard while others wait for it. A copy appears under its name once it is
    complete and synced. Copies that are being read are never evicted; of the others, the least recently used one is
    evicted first. If ``.shuffle(lanes=)`` shuffles the list, which keeps shards on their host, copies already used in
    this epoch are evicted before those that the epoch still needs. A modified copy is downloaded again.

    A shard that is already in the folder under its own name (``000.tar``) or path (``train/000.tar``), put there by
    hand or by webdataset, is used instead of a download if it is a complete archive and has the size that the store
    reports, or the size and digest of the manifest. It is never evicted, and ``max_bytes`` does not count it. With
    ``.load_wds_shards(allow_local_files=False)``, no such file is used.

    All shards except standard input are copied, even local files, because the folder may be on a faster disk.

    Each download is logged at the level INFO, or at WARNING with ``WDS_VERBOSE_CACHE=1``.

    Yields:
        str: the URLs of ``source``, in their order.

    Args:
        source: yields URLs of shards.
        cache_dir: the folder, created if necessary. The name of a copy contains a digest of the URL without the
            signature of a presigned URL (S3, Google Cloud Storage, Azure, CloudFront and similar).
        max_bytes: the maximum total size of all copies in bytes, including those of other processes; None means that
            only the disk limits it. A shard that does not fit is read from its source, with a warning.
        prefetch: the number of shards to download in advance; 0 after `DirectoryShards`, where requesting the next
            shard marks the last one as read.
        manifest: the manifest of the dataset, or its path or URL. Copies must match its sizes and digests. Without
            digests, each time a process opens a copy in an epoch, one request asks the store for the version of the
            shard; a shard that has been replaced is downloaded again.
        url_to_name: returns a string that identifies a shard, given its URL. URLs with the same string share a copy.
            Use it if URLs contain a token of another kind, which changes.

    Raises:
        ValueError: ``max_bytes`` is less than the size of a shard in the manifest.
        CacheError: the folder cannot be written, or the disk is full and no copy can be evicted.
        TruncatedShardError: a download was incomplete twice.
        CorruptShardError: a download did not match the digest in the manifest twice.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> shard = build_shard("train.tar", [{"__key__": "a", "cls": b"1"}])
        >>> pipe = ShardList(shard).cache_wds_shards("copies", max_bytes=10**9).load_wds_shards().group_samples()
        >>> [(sample["__url__"], sample["__local_path__"][-10:]) for sample in pipe]
        [('train.tar', '-train.tar')]
    """

    is_stateless = False
    is_transparent = True

    def __init__(
        self,
        source: IterDataPipe[str],
        cache_dir: str | os.PathLike[str],
        *,
        max_bytes: int | None = None,
        prefetch: int = 1,
        manifest: Manifest | str | os.PathLike[str] | None = None,
        url_to_name: UrlToName | None = None,
    ) -> None:
        if url_to_name is not None and not callable(url_to_name):
            raise TypeError(f"url_to_name must be a function of a URL, not {url_to_name!r}")
        max_bytes = check_optional_integer("max_bytes", max_bytes, 1)
        prefetch = check_integer("prefetch", prefetch, 0)
        self.source = source
        self.cache_dir = check_path("cache_dir", cache_dir)
        self.max_bytes = max_bytes
        self.prefetch = prefetch
        self.url_to_name = url_to_name
        self._known = _known_shards(manifest)
        self._passes: Passes | None = None
        largest = max((size or 0 for size, _ in self._known.values()), default=0)
        if max_bytes is not None and largest > max_bytes:
            raise ValueError(
                f"The largest shard of the manifest has {largest} bytes, but the cache is limited to "
                f"max_bytes={max_bytes}. Allow at least that size for each worker of the host, or write smaller shards"
            )

    def __iter__(self) -> Iterator[str]:
        from wds_datapipes.shard_cache.cached_shards import cache_wds_shards
        from wds_datapipes.shard_cache.eviction import Passes
        from wds_datapipes.shard_cache.store import CacheFolder

        verbose = os.environ.get(VERBOSE, "0") not in ("", "0")
        url_to_name = self.url_to_name or without_signature
        folder = CacheFolder(self.cache_dir, self.max_bytes, verbose=verbose, url_to_name=url_to_name)
        stages = PipelineGraph(self.source).stages
        if any(declared(stage).has_lanes() for stage in stages):
            self._passes = self._passes or Passes()
            self._passes.begin(folder.path)
            folder.priority = self._passes.priority
        # Requesting the next shard from DirectoryShards marks the last one as read, which may delete it.
        prefetch = 0 if any(declared(stage).shard_access == "claimed" for stage in stages) else self.prefetch
        yield from cache_wds_shards(self.source, folder, prefetch=prefetch, known=self._known)

    def __len__(self) -> int:
        return len(self.source)


def _known_shards(manifest: Manifest | str | os.PathLike[str] | None) -> KnownShards:
    if manifest is None:
        return {}
    from wds_datapipes.index.format.manifest import Manifest, read_manifest
    from wds_datapipes.shard_cache.cached_shards import known_shards

    if not isinstance(manifest, Manifest | str | os.PathLike):
        raise TypeError(f"manifest must be a Manifest, or the path or URL of one, not {manifest!r:.200}")
    return known_shards((manifest if isinstance(manifest, Manifest) else read_manifest(manifest)).entries)
