"""The command ``stats``: count samples and fields, and summarize their sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

from wds_datapipes.errors import plural
from wds_datapipes.parallel.progress import human_bytes
from wds_datapipes.tools.cli.errors import WrongUse, printable
from wds_datapipes.tools.cli.options.read import READ, ReadArguments, Shards, Workers
from wds_datapipes.tools.cli.options.values import metavar
from wds_datapipes.tools.cli.printing import end_with_faults, print_json, print_table, size_of_shards
from wds_datapipes.tools.prepare.read_options import ReadOptions
from wds_datapipes.tools.prepare.stats import DatasetStats, Sizes, dataset_stats

#: How many of the most and of the least frequent classes are printed.
CLASSES = 10
#: The columns of the table of sizes: the heading of each, and what it shows of the sizes of a row.
COLUMNS: dict[str, Callable[[Sizes], str]] = {
    "count": lambda sizes: f"{sizes.number:,}",
    "total": lambda sizes: human_bytes(sizes.total),
    "smallest": lambda sizes: human_bytes(sizes.smallest),
    "median": lambda sizes: human_bytes(sizes.median),
    "mean": lambda sizes: human_bytes(sizes.mean),
    "largest": lambda sizes: human_bytes(sizes.largest),
}


def stats(
    *shards: Shards,
    label: Annotated[str | None, metavar("FIELD")] = None,
    num_workers: Workers = None,
    options: ReadArguments = READ,
) -> None:
    """Count samples and fields and summarize their sizes.

    Only headers are read if shards support range requests, except with --label. Errors are reported at the end, with
    exit code 1, or 2 if a shard does not exist.

    Args:
        label: Also count the classes in this field, such as cls.
    """
    urls = options.list_shards(shards)
    if label is not None and "-" in urls:
        raise WrongUse("--label reads shards twice, which standard input does not permit. Write it to a file first")
    found = dataset_stats(urls, label=label, num_workers=num_workers, options=ReadOptions(**options.reading))
    if options.json:
        print_json(facts_of(found))
    elif found.samples.number or not found.faults:
        print_stats(found, len(urls))
        if label is not None:
            print_classes(found, label)
    end_with_faults(found.faults, is_printed=not options.json)


def facts_of(found: DatasetStats) -> dict[str, Any]:
    """Return all statistics for JSON."""
    return {
        **{name: getattr(found, name)._asdict() for name in ("shards", "samples_per_shard", "samples")},
        "fields": {name: sizes._asdict() for name, sizes in found.fields.items()},
        **({} if found.classes is None else {"classes": found.classes}),
        "faults": [fault._asdict() for fault in found.faults],
    }


def print_stats(found: DatasetStats, shards: int) -> None:
    """Print the totals and a table of sizes."""
    per_shard = found.samples_per_shard
    size = size_of_shards(found.shards.total, shards, shards - found.shards.number)
    share = f", from {per_shard.smallest:,} to {per_shard.largest:,} in a shard"
    if per_shard.smallest == per_shard.largest:
        share = f", {per_shard.smallest:,} in each" if shards > 1 else ""
    sys.stdout.write(f"{plural(shards, 'shard')} of {size}, {plural(found.samples.number, 'sample')}{share}\n\n")
    shards_row = [row("shards", found.shards)] if found.shards.number else []
    rows = [("", *COLUMNS), *shards_row]
    rows += [row("samples", found.samples), *(row(printable(name), each) for name, each in found.fields.items())]
    print_table(rows)


def print_classes(found: DatasetStats, label: str) -> None:
    """Print the most and the least frequent classes, and the number of samples without one."""
    classes = list((found.classes or {}).items())
    kinds = plural(len(classes), "class", "classes")
    sys.stdout.write(f"\n{kinds} in {printable(label)}\n")
    shown = [(printable(name), f"{number:,}") for name, number in classes]
    if len(shown) > 2 * CLASSES:
        shown[CLASSES:-CLASSES] = [("...", "")]
    if shown:
        print_table(shown)
    if without := found.samples.number - sum(number for _, number in classes):
        sys.stdout.write(f"{plural(without, 'sample')} without a class\n")


def row(name: str, sizes: Sizes) -> tuple[str, ...]:
    """Return a row of the table of sizes."""
    return name, *(show(sizes) for show in COLUMNS.values())
