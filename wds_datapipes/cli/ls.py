"""The command ``ls``: list the samples of shards, their fields and sizes."""

from __future__ import annotations

import sys
from typing import Any

from wds_datapipes.cli._app import printable
from wds_datapipes.cli._declaration import Natural, Positive
from wds_datapipes.cli._options import ReadArguments
from wds_datapipes.cli._report import (
    end_with_faults,
    print_error,
    print_json,
    print_nothing_found,
    print_table,
    size_of_shards,
)
from wds_datapipes.errors import plural
from wds_datapipes.index.shard_index import IndexedSample
from wds_datapipes.io.openers import redact
from wds_datapipes.parallel.progress import human_bytes
from wds_datapipes.prepare.shard_contents import ScanOptions, ShardFault, read_contents
from wds_datapipes.prepare.stats import DatasetStats, Sizes, dataset_stats


def ls(shards: list[str], options: ReadArguments, count: Positive | None = None) -> None:
    """List the samples of shards with the sizes of their fields.

    Each line has the key, the total size, and each field with its size in bytes. Only headers are read if the shard
    supports range requests. For a truncated shard, the samples before the end are listed, then the error, and the exit
    code is 1.

    Options:
        --count, -n NUMBER: List at most this many samples of each shard.
    """
    urls, samples, faults = options.list_shards(shards), 0, list[ShardFault]()
    for number, url in enumerate(urls):
        contents = read_contents(url, ScanOptions(**options.reading))
        samples += len(contents.samples)
        if options.json:
            for sample in contents.samples[:count]:
                facts = {"shard": redact(url), "key": sample.key, "offset": sample.offset, "fields": sample.fields}
                print_json(facts, indent=None)
        else:
            if len(urls) > 1:
                sys.stdout.write(f"{'' if number == 0 else chr(10)}{printable(redact(url))}:\n")
            print_samples(contents.samples[:count])
        for fault in contents.faults:
            print_error(fault.message)
        faults += contents.faults
    if not samples and not faults:
        print_nothing_found(len(urls))
    end_with_faults(faults, is_printed=False)


def print_samples(samples: list[IndexedSample]) -> None:
    """Print a line for each sample, with keys and total sizes in columns."""
    if not samples:
        return
    keys = [printable(sample.key) for sample in samples]
    wide, sums = max(map(len, keys)), max(len(str(sample.bytes)) for sample in samples)
    for key, sample in zip(keys, samples, strict=True):
        fields = "  ".join(f"{printable(field)} {size}" for field, size in sample.fields.items())
        sys.stdout.write(f"{key:{wide}}  {sample.bytes:{sums}}  {fields}\n")


def stats(shards: list[str], options: ReadArguments, num_workers: Natural | None = None) -> None:
    """Count samples and fields and summarize their sizes.

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
        **{name: getattr(found, name)._asdict() for name in ("shards", "samples_per_shard", "samples")},
        "fields": {name: sizes._asdict() for name, sizes in found.fields.items()},
        "faults": [fault._asdict() for fault in found.faults],
    }


def print_stats(found: DatasetStats, shards: int) -> None:
    """Print the totals and a table of sizes."""
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
