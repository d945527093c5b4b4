"""The command ``stats``: count samples and fields, and summarize their sizes."""

from __future__ import annotations

import sys
from typing import Any

from wds_datapipes.cli._app import printable
from wds_datapipes.cli._declaration import Natural
from wds_datapipes.cli._options import ReadArguments
from wds_datapipes.cli._report import end_with_faults, plural, print_json, print_table, size_of_shards
from wds_datapipes.parallel.progress import human_bytes
from wds_datapipes.prepare.stats import DatasetStats, Sizes, dataset_stats


def stats(shards: list[str], options: ReadArguments, num_workers: Natural | None = None) -> None:
    """Count samples and fields, and summarize their sizes.

    Only headers are read if shards support range requests. Errors are reported at the end, with exit code 1, or 2 if a
    shard does not exist.
    """
    urls = options.list_shards(shards)
    found = dataset_stats(urls, num_workers=num_workers, **options.reading)
    if options.json:
        print_json(facts_of(found))
    elif found.samples.number or not found.faults:
        print_stats(found, len(urls))
    end_with_faults(found.faults, is_printed=not options.json)


def facts_of(found: DatasetStats) -> dict[str, Any]:
    """Return all statistics for JSON."""
    return {
        "shards": found.shards._asdict(),
        "samples_per_shard": found.samples_per_shard._asdict(),
        "samples": found.samples._asdict(),
        "fields": {name: sizes._asdict() for name, sizes in found.fields.items()},
        "faults": [fault._asdict() for fault in found.faults],
    }


def print_stats(found: DatasetStats, shards: int) -> None:
    """Print the totals, and a table of sizes."""
    per_shard = found.samples_per_shard
    size = size_of_shards(found.shards.total, shards, shards - found.shards.number)
    sys.stdout.write(
        f"{plural(shards, 'shard')} of {size}, {plural(found.samples.number, 'sample')}, "
        f"from {per_shard.smallest:,} to {per_shard.largest:,} in a shard\n\n"
    )
    shards_row = [row("shards", found.shards)] if found.shards.number else []
    rows = [("", "count", "total", "smallest", "median", "mean", "largest"), *shards_row]
    rows += [row("samples", found.samples), *(row(printable(name), each) for name, each in found.fields.items())]
    print_table(rows)


def row(name: str, sizes: Sizes) -> tuple[str, ...]:
    """Return a row of the table of sizes."""
    values = (sizes.total, sizes.smallest, sizes.median, sizes.mean, sizes.largest)
    return name, f"{sizes.number:,}", *map(human_bytes, values)
