"""The command ``index``: write or convert the indexes of shards, and the manifest of a dataset."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from wds_datapipes.cli._app import WrongUse, printable
from wds_datapipes.cli._declaration import Natural
from wds_datapipes.cli._options import LimitedArguments, load_function, wrong_use
from wds_datapipes.cli._report import plural, print_json
from wds_datapipes.index.build_many import IndexResult, build_indexes
from wds_datapipes.index.file_format import index_url, write_index
from wds_datapipes.index.interop.dali import dali_index_url, read_dali_index, write_dali_index
from wds_datapipes.index.interop.energon import energon_index_url, read_energon_index, write_energon_index
from wds_datapipes.index.interop.wids import write_wids_index
from wds_datapipes.index.manifest import Manifest, write_manifest
from wds_datapipes.index.options import IndexOptions
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.io.openers import redact
from wds_datapipes.parallel.map_shards import map_shards
from wds_datapipes.parallel.progress import ProgressMeter

#: For each other program: where its index of a shard is, and the functions that write and read it.
PROGRAMS: dict[str, tuple[Callable[[str], str], Callable[..., str], Callable[..., ShardIndex]]] = {
    "dali": (dali_index_url, write_dali_index, read_dali_index),
    "energon": (energon_index_url, write_energon_index, read_energon_index),
}


def index(
    shards: list[str],
    options: LimitedArguments,
    to: Literal["wds", "dali", "energon", "wids"] = "wds",
    from_: Literal["shard", "dali", "energon"] = "shard",
    output: str | None = None,
    manifest: str | None = None,
    index_dir: str | None = None,
    rebuild: bool = False,
    digest: bool = False,
    columns: str | None = None,
    field: list[str] | None = None,
    num_workers: Natural | None = None,
) -> None:
    """Write an index next to each shard whose index is missing or stale.

    With --to, write the indexes for DALI (shard.idx), Energon (shard.tar.idx) or wids (one JSON file), and replace
    existing ones. The command stops at the first faulty shard, and keeps the indexes written before.

    Options:
        --to: The program that reads the indexes; wds means this one.
        --from: Convert the indexes of this program, checked against the headers of shards.
        --output, -o FILE: The JSON file for wids.
        --manifest FILE: Also write a manifest of all shards.
        --index-dir DIR: The folder for indexes, if not next to their shards.
        --rebuild: Rebuild valid indexes, too.
        --digest: Include the SHA-256 of each shard, which reads all of it.

    User function:
        --columns MODULE:FUNCTION: A function from a sample to a mapping of names to values, which become columns of
            the index.
        --field FIELD: A field that this function needs; may be repeated.
    """
    is_own = to == "wds" and from_ == "shard"
    if (to == "wids") is (output is None):
        raise WrongUse(
            "--output is required with --to wids, which writes one file for all shards, and cannot be used otherwise"
        )
    if from_ != "shard" and to != "wds":
        raise WrongUse(
            "--from converts to indexes of wds-datapipes. Write other formats from the shards, without --from"
        )
    own: dict[str, Any] = {"--manifest": manifest, "--index-dir": index_dir, "--rebuild": rebuild, "--digest": digest}
    own |= {"--columns": columns, "--limit": options.limit, "--key-rule": options.key_rule != "first-dot"}
    if not is_own and (given := [name for name, value in own.items() if value]):
        raise WrongUse(f"{given[0]} cannot be used with --to and --from")
    if field and columns is None:
        raise WrongUse("--field names the fields that the function of --columns needs, so it requires --columns")
    urls = options.list_shards(shards)
    if any(url == "-" or url.startswith("pipe:") for url in urls) and index_dir is None:
        raise WrongUse(
            "An index cannot be written next to standard input or a command. Write the shard to a file first"
        )
    indexing = IndexOptions(digest=digest, key_rule=options.rule, end_marker=options.end_marker, limits=options.limits)
    held = 0
    with ProgressMeter("Indexing", len(urls)) as meter, wrong_use():
        if is_own:
            results = build_indexes(
                urls,
                columns=None if columns is None else load_function(columns),
                fields=field or None,
                index_dir=index_dir,
                rebuild=rebuild,
                options=indexing,
                on_result=partial(count_result, meter),
                progress=False,
                storage_options=options.store,
                num_workers=num_workers,
            )
            if manifest is not None:
                write_manifest(Manifest(results), manifest, storage_options=options.store)
            written = [result.index_url for result in results if result.is_new]
            samples, held = sum(result.samples for result in results), len(results) - len(written)
        elif to == "wids":
            wids = write_wids_index(urls, str(output), storage_options=options.store, num_workers=num_workers)
            written, samples = [str(output)], wids.samples
        else:
            arguments = (from_ if to == "wds" else to, to == "wds", indexing, options.store)
            written, samples = foreign_indexes(urls, arguments, meter, num_workers)
    if options.json:
        facts = {"shards": len(urls), "samples": samples, "written": list(map(redact, written)), "held": held}
        print_json({**facts, "manifest": manifest}, indent=None)
        return
    count = plural(len(written), "index", "indexes")
    unchanged = f", {held:,} already up to date" if held else ""
    sys.stdout.write(f"{plural(len(urls), 'shard')}, {plural(samples, 'sample')}: {count} written{unchanged}\n")
    if manifest is not None:
        sys.stdout.write(f"Manifest: {printable(redact(manifest))}\n")


def count_result(meter: ProgressMeter, result: IndexResult) -> None:
    """Count an index in the progress bar."""
    meter.add(shards=1, samples=result.samples, size=result.bytes)


def foreign_indexes(
    urls: Sequence[str], arguments: Sequence[Any], meter: ProgressMeter, num_workers: int | None
) -> tuple[list[str], int]:
    """Convert the index of each shard; return the paths of what was written, and the number of samples."""
    paths: dict[int, str] = {}
    samples = 0
    for number, task in map_shards(convert_index, urls, arguments, executor=None, num_workers=num_workers):
        paths[number], count = task.result()
        samples += count
        meter.add(shards=1, samples=count)
    return [paths[number] for number in sorted(paths)], samples


def convert_index(
    url: str, program: str, is_read: bool, indexing: IndexOptions, store: Mapping[str, Any] | None
) -> tuple[str, int]:
    """Convert the index of a shard from another program, or write it for the program; checked against the shard."""
    locate, write, read = PROGRAMS[program]
    if not is_read:
        path = write(url, options=indexing, storage_options=store)
        as_written = replace(indexing, lowercase=False) if program == "dali" else indexing
        return path, len(read(path, url, as_written, storage_options=store))
    found, path = read(locate(url), url, indexing, storage_options=store), index_url(url)
    write_index(found, path, storage_options=store)
    return path, len(found)
