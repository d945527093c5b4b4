"""Warm-up: downloads many shards into a cache before they are read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from wds_datapipes.errors import ShardError
from wds_datapipes.io.openers import redact
from wds_datapipes.shard_cache.cached_shards import KnownShards
from wds_datapipes.shard_cache.download import CacheFullError, DownloadRequest
from wds_datapipes.shard_cache.store import CacheFolder

__all__ = ["WarmedShard", "warm_cache"]


class WarmedShard(NamedTuple):
    """The result of one download."""

    url: str
    #: The size of its copy.
    bytes: int = 0
    #: Whether the copy existed before.
    was_cached: bool = False
    #: Why there is no copy, or "".
    error: str = ""


def warm_cache(
    copies: CacheFolder, urls: Sequence[str], *, known: KnownShards, options: Mapping[str, Any], at_once: int
) -> Iterator[WarmedShard]:
    """Download shards in parallel, and yield the result of each.

    Args:
        copies: the folder.
        urls: the shards.
        known: their expected sizes and digests.
        options: the options to open them with.
        at_once: the number of concurrent downloads.

    Raises:
        CacheError: the folder cannot be written.
    """

    def fetch(url: str) -> WarmedShard | None:
        """Download a shard; return None if there is no space for it."""
        was_cached = copies.entry(url).path.exists()
        size, sha256 = known.get(url, (None, None))
        try:
            copy = copies.open(DownloadRequest(url, size, sha256, options))
        except CacheFullError:
            return None
        except ShardError as error:
            return WarmedShard(url, error=str(error))
        if copy is None:  # cannot happen after waiting
            return None
        with copy:
            return WarmedShard(url, os.fstat(copy.fileno()).st_size, was_cached)

    with ThreadPoolExecutor(at_once) as pool:
        postponed = []
        for url, future in [(url, pool.submit(fetch, url)) for url in urls]:
            found = future.result()
            if found is None:  # concurrent downloads cannot be evicted
                postponed.append(url)
            else:
                yield found
    for url in postponed:
        error = f"{redact(url)} is larger than the cache, or the cache is full of copies in use"
        yield fetch(url) or WarmedShard(url, error=error)
