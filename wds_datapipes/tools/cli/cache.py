"""The command ``cache``: manage the local copies of shards that `.cache_wds_shards()` keeps."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wds_datapipes.errors import plural
from wds_datapipes.index.format.manifest import read_manifest
from wds_datapipes.parallel.progress import ProgressMeter, human_bytes
from wds_datapipes.shard_cache.cached_shards import known_shards, warm_cache
from wds_datapipes.shard_cache.entry import Entry, entries
from wds_datapipes.shard_cache.eviction import evict, evictable
from wds_datapipes.shard_cache.store import CacheFolder
from wds_datapipes.tools.cli.docstring_options import Positive
from wds_datapipes.tools.cli.printing import print_error, print_json
from wds_datapipes.tools.cli.program import FAULT_FOUND, WrongUse, printable
from wds_datapipes.tools.cli.shared_options import StoreArguments, parse_bytes


@dataclass(frozen=True, kw_only=True)
class CacheArguments:
    """The options of all ``cache`` commands.

    Options:
        --cache-dir DIR: The cache folder.
        --max-bytes BYTES: The limit for all copies together, such as 500GB.
        --json: Print the facts as JSON.
    """

    cache_dir: str
    json: bool = False

    @property
    def path(self) -> Path:
        """The path of the folder, which must exist."""
        path = Path(self.cache_dir)
        if not path.is_dir():
            raise WrongUse(f"There is no folder {self.cache_dir!r}. Name the folder passed to .cache_wds_shards()")
        return path


def show_copies(options: CacheArguments) -> None:
    """List the cached shards and their sizes, sorted by URL."""
    found = sorted((url_of(entry), copy_bytes(entry), entry.path) for entry in entries(options.path))
    for url, size, path in found:
        if options.json:
            print_json({"shard": url, "bytes": size, "path": str(path)}, indent=None)
        else:
            sys.stdout.write(f"{printable(url)}  {human_bytes(size)}\n")
    if not options.json:
        sys.stdout.write(f"{plural(len(found), 'copy', 'copies')}, {human_bytes(sum(size for _, size, _ in found))}\n")


def warm(
    shards: list[str],
    options: CacheArguments,
    stores: StoreArguments,
    max_bytes: str = "",
    manifest: str | None = None,
    at_once: Positive = 4,
) -> None:
    """Download shards into the cache before a run.

    Without --max-bytes, the size of the cache is not limited. Failed downloads are reported at the end, after all
    others are complete.

    Options:
        SHARDS: Paths, URLs or patterns, such as 's3://bucket/train-{000..099}.tar'.
        --manifest FILE: Check the downloaded shards against this manifest.
        --at-once NUMBER: The number of concurrent downloads.
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
    report(options, facts, f"{plural(fetched + cached, 'shard')}, {human_bytes(size)}: {counts}", failed)


def clear(options: CacheArguments, max_bytes: str = "") -> None:
    """Remove copies from the cache, by default all of them.

    With --max-bytes, removes the least recently used copies until the others fit. Copies that a process is reading or
    downloading are not removed, and neither are files that were put into the folder.
    """
    limit = parse_bytes(max_bytes, "--max-bytes") if max_bytes else 0.0
    found = evictable(options.path)
    remaining = sum(map(copy_bytes, found))
    removed = 0
    for entry in found:
        if remaining <= limit:
            break
        freed = evict(entry)
        remaining, removed = remaining - freed, removed + (not entry.path.exists())
    count = len(found) - removed
    rest = f"{count:,} left{f', {human_bytes(remaining)}' if count else ''}"
    facts = {"removed": removed, "left": count, "bytes": remaining}
    report(options, facts, f"{plural(removed, 'copy', 'copies')} removed, {rest}", ())


def report(options: CacheArguments, facts: Mapping[str, object], text: str, faults: Sequence[str]) -> None:
    """Print the facts as JSON or text, then the faults; end with an error code if there are any."""
    if options.json:
        print_json(facts, indent=None)
    else:
        sys.stdout.write(f"{text}\n")
    for fault in faults:
        print_error(fault)
    if faults:
        raise SystemExit(FAULT_FOUND)


def url_of(entry: Entry) -> str:
    """Return the URL of a cached shard."""
    facts = entry.facts()
    return facts.url if facts else f"(unknown: {entry.path.name})"


def copy_bytes(entry: Entry) -> int:
    """Return the size of a copy, or 0 if it no longer exists."""
    try:
        return entry.path.stat().st_size
    except FileNotFoundError:
        return 0
