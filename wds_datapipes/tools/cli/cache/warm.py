"""The command ``cache warm``: download shards into the cache before a run."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from wds_datapipes.errors import plural
from wds_datapipes.index.format.manifest import read_manifest
from wds_datapipes.parallel.progress import ProgressMeter, human_bytes
from wds_datapipes.shard_cache.cached_shards import known_shards, warm_cache
from wds_datapipes.shard_cache.store import CacheFolder
from wds_datapipes.tools.cli.cache.arguments import CacheArguments, MaxBytes
from wds_datapipes.tools.cli.options.read import STORE, Shards, StoreArguments
from wds_datapipes.tools.cli.options.values import FileOrUrl, Positive, metavar, parse_bytes


def warm(
    *shards: Annotated[Shards, Parameter(help="Paths, URLs or patterns, such as 's3://bucket/train-{000..099}.tar'.")],
    manifest: Annotated[FileOrUrl | None, metavar("FILE")] = None,
    at_once: Positive = 4,
    max_bytes: MaxBytes = "",
    options: CacheArguments,
    stores: StoreArguments = STORE,
) -> None:
    """Download shards into the cache before a run.

    Without --max-bytes, the size of the cache is not limited. Failed downloads are reported at the end, after all
    others are complete.

    Args:
        manifest: Check the downloaded shards against this manifest.
        at_once: The number of concurrent downloads.
    """
    urls = list(dict.fromkeys(stores.list_shards(shards)))
    copies = CacheFolder(options.cache_dir, int(parse_bytes(max_bytes, "--max-bytes")) if max_bytes else None)
    found = read_manifest(manifest).entries if manifest is not None else ()
    results = []
    with ProgressMeter("Downloading", len(urls)) as meter:
        for each in warm_cache(
            copies,
            urls,
            known=known_shards(found),
            options={} if stores.store is None else {"storage_options": stores.store},
            at_once=at_once,
        ):
            results.append(each)
            meter.add(shards=1, size=0 if each.was_cached else each.bytes)
    failed = [each.error for each in results if each.error]
    cached = sum(each.was_cached for each in results)
    fetched, size = len(urls) - len(failed) - cached, sum(each.bytes for each in results)
    evicted = sum(not copies.entry(url).path.exists() for url in urls) - len(failed)
    if evicted:
        failed.append(f"{plural(evicted, 'copy', 'copies')} evicted again, as the shards together exceed --max-bytes")
    facts = {"shards": len(urls), "bytes": size, "fetched": fetched, "there": cached, "failed": failed}
    counts = f"{fetched:,} downloaded, {cached:,} already cached"
    options.report(facts, f"{plural(fetched + cached, 'shard')}, {human_bytes(size)}: {counts}", failed)
