"""Warm-up: downloads many shards into a cache before they are read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from wds_datapipes.errors import ShardError
from wds_datapipes.io.openers import redact
from wds_datapipes.shard_cache.cached_shards import Known
from wds_datapipes.shard_cache.download import CacheFullError, WantedShard
from wds_datapipes.shard_cache.store import CacheFolder

__all__ = ["WarmedShard", "warm_cache"]


class WarmedShard(NamedTuple):
    """The result of one download."""

    url: str
    #: The size of its copy.
    bytes: int = 0
    #: Whether the copy was there before.
    was_there: bool = False
    #: Why there is no copy, or nothing.
    error: str = ""


def warm_cache(
    copies: CacheFolder, urls: Sequence[str], *, known: Known, options: Mapping[str, Any], at_once: int
) -> Iterator[WarmedShard]:
    """Download shards in parallel, and yield the result of each.

    Args:
        copies: the folder.
        urls: the shards.
        known: the sizes and digests that they have to have.
        options: what they are opened with.
        at_once: how many are fetched at a time.

    Raises:
        CacheError: the folder cannot be written.
    """

    def fetch(url: str) -> WarmedShard | None:
        """Fetch a shard; return None if there is no room for it."""
        was_there = copies.entry(url).path.exists()
        size, sha256 = known.get(url, (None, None))
        try:
            copy = copies.open(WantedShard(url, size, sha256, options))
        except CacheFullError:
            return None
        except ShardError as error:
            return WarmedShard(url, error=str(error))
        if copy is None:  # which cannot be: it was waited for
            return None
        with copy:
            return WarmedShard(url, os.fstat(copy.fileno()).st_size, was_there)

    with ThreadPoolExecutor(at_once) as pool:
        crowded_out = []
        for url, future in [(url, pool.submit(fetch, url)) for url in urls]:
            found = future.result()
            if found is None:  # what is fetched at the same time does not leave
                crowded_out.append(url)
            else:
                yield found
    for url in crowded_out:
        error = f"{redact(url)} has more bytes than all copies may have, or what is read needs them"
        yield fetch(url) or WarmedShard(url, error=error)
