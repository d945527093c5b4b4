"""The command ``cache ls``: list the cached shards."""

from __future__ import annotations

import sys

from wds_datapipes.errors import plural
from wds_datapipes.parallel.progress import human_bytes
from wds_datapipes.shard_cache.entry import Entry, entries
from wds_datapipes.tools.cli.cache.arguments import CacheArguments
from wds_datapipes.tools.cli.errors import printable
from wds_datapipes.tools.cli.printing import print_json


def ls(*, options: CacheArguments) -> None:
    """List the cached shards and their sizes, sorted by URL."""
    found = sorted((url_of(entry), entry.size(), entry.path) for entry in entries(options.path))
    for url, size, path in found:
        if options.json:
            print_json({"shard": url, "bytes": size, "path": str(path)}, indent=None)
        else:
            sys.stdout.write(f"{printable(url)}  {human_bytes(size)}\n")
    if not options.json:
        sys.stdout.write(f"{plural(len(found), 'copy', 'copies')}, {human_bytes(sum(size for _, size, _ in found))}\n")


def url_of(entry: Entry) -> str:
    """Return the URL of a cached shard."""
    facts = entry.facts()
    return facts.url if facts else f"(unknown: {entry.path.name})"
