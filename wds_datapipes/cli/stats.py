"""The command ``stats``: count samples and fields, and summarize their sizes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from wds_datapipes.cli._app import FAULT_FOUND, WRONG_USE, WrongUse, on_one_line, printable
from wds_datapipes.cli._meter import plural, size_of_shards
from wds_datapipes.cli._options import ReadingOptions, Shards, Workers
from wds_datapipes.io.openers import local_path
from wds_datapipes.parallel.progress import human_bytes
from wds_datapipes.prepare.stats import DatasetStats, Sizes, dataset_stats

__all__ = ["stats"]

#: The number of the most and of the least frequent classes that are shown.
CLASSES = 10
#: The width of the longest bar of the histogram.
WIDTH = 40


def stats(
    shards: Shards,
    options: ReadingOptions,
    label: Annotated[
        str | None,
        typer.Option(
            "--label", metavar="FIELD", help="Also count the classes in this field, such as cls.", show_default=False
        ),
    ] = None,
    workers: Workers = None,
) -> None:
    """Count samples and fields, and summarize their sizes.

    Only headers are read if shards support range requests, except with --label. Errors are reported at the end, with
    exit code 1, or 2 if a shard does not exist.
    """
    urls = options.list_shards(shards)
    if label is not None and (streams := [url for url in urls if is_stream(url)]):
        raise WrongUse(f"--label reads shards twice, so {printable(streams[0])!r} must be a file. Copy it to one first")
    found = dataset_stats(urls, label=label, num_workers=workers, **options.reading)
    if options.as_json:
        sys.stdout.write(json.dumps(facts_of(found), indent=1) + "\n")
    else:
        if found.samples.number or not found.faults:
            print_stats(found, len(urls))
            if label is not None:
                print_classes(found, label)
            sys.stdout.flush()
        for fault in found.faults:
            typer.echo(f"Error: {on_one_line(fault.message)}", err=True)
    if found.faults:
        exists = all(fault.kind != "ShardOpenError" for fault in found.faults)
        raise typer.Exit(FAULT_FOUND if exists else WRONG_USE)


def facts_of(found: DatasetStats) -> dict[str, Any]:
    """Return all statistics for JSON."""
    return {
        "shards": found.shards._asdict(),
        "samples_per_shard": found.samples_per_shard._asdict(),
        "samples": found.samples._asdict(),
        "fields": {name: sizes._asdict() for name, sizes in found.fields.items()},
        "histogram": found.histogram,
        **({} if found.classes is None else {"classes": found.classes}),
        "faults": [fault._asdict() for fault in found.faults],
    }


def print_stats(found: DatasetStats, shards: int) -> None:
    """Print the totals, a table of sizes, and a histogram."""
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
    if found.histogram:
        sys.stdout.write("\nSamples by size\n")
        most = max(found.histogram.values())
        bars = [
            (f"from {human_bytes(size)}", f"{count:,}", "#" * max(1, round(count * WIDTH / most)))
            for size, count in found.histogram.items()
        ]
        print_table(bars, left=(0, 2))


def print_classes(found: DatasetStats, label: str) -> None:
    """Print the most and the least frequent classes, and the number of samples without one."""
    classes = list((found.classes or {}).items())
    count = f"{len(classes):,} {'class' if len(classes) == 1 else 'classes'}"
    sys.stdout.write(f"\nSamples by class: {count} in {printable(label)}\n")
    shown = classes if len(classes) <= 2 * CLASSES else [*classes[:CLASSES], ("...", 0), *classes[-CLASSES:]]
    most = max((count for _, count in classes), default=1)
    bars = [
        (printable(name), f"{count:,}" if count else "", "#" * round(count * WIDTH / most)) for name, count in shown
    ]
    if bars:
        print_table(bars, left=(0, 2))
    if without := found.samples.number - sum(count for _, count in classes):
        sys.stdout.write(f"{plural(without, 'sample')} without a class\n")


def is_stream(url: str) -> bool:
    """Whether a shard can be read only once, such as standard input or a FIFO."""
    path = local_path(url)
    return url == "-" or (path is not None and os.path.exists(path) and not os.path.isfile(path))  # noqa: PTH110, PTH113  for long names


def row(name: str, sizes: Sizes) -> tuple[str, ...]:
    """Return a row of the table of sizes."""
    values = (sizes.total, sizes.smallest, sizes.median, sizes.mean, sizes.largest)
    return name, f"{sizes.number:,}", *map(human_bytes, values)


def print_table(rows: Sequence[tuple[str, ...]], left: tuple[int, ...] = (0,)) -> None:
    """Print rows in columns, with numbers aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        line = "  ".join(
            f"{cell:{width}}" if at in left else f"{cell:>{width}}"
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        sys.stdout.write(f"{line.rstrip()}\n")
