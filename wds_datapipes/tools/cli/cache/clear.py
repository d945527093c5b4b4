"""The command ``cache clear``: remove copies from the cache."""

from __future__ import annotations

from wds_datapipes.errors import plural
from wds_datapipes.parallel.progress import human_bytes
from wds_datapipes.shard_cache.eviction import evict, evictable
from wds_datapipes.tools.cli.cache.arguments import CacheArguments, MaxBytes
from wds_datapipes.tools.cli.options.values import parse_bytes


def clear(*, max_bytes: MaxBytes = "", options: CacheArguments) -> None:
    """Remove copies from the cache, by default all of them.

    With --max-bytes, removes the least recently used copies until the others fit. Copies that a process is reading or
    downloading are not removed, and neither are files that were put into the folder.
    """
    limit = parse_bytes(max_bytes, "--max-bytes") if max_bytes else 0.0
    found = evictable(options.path)
    remaining = sum(entry.size() for entry in found)
    removed = 0
    for entry in found:
        if remaining <= limit:
            break
        freed = evict(entry)
        remaining, removed = remaining - freed, removed + (not entry.path.exists())
    count = len(found) - removed
    rest = f"{count:,} left{f', {human_bytes(remaining)}' if count else ''}"
    facts = {"removed": removed, "left": count, "bytes": remaining}
    options.report(facts, f"{plural(removed, 'copy', 'copies')} removed, {rest}")
