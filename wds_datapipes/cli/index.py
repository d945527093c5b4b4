"""The command ``index``: write or convert the indexes of shards, and the manifest of a dataset."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Annotated, Any

import typer

from wds_datapipes.cli._app import WrongUse, printable
from wds_datapipes.cli._functions import OWN, load_function
from wds_datapipes.cli._meter import plural
from wds_datapipes.cli._options import LimitedOptions, Shards, Workers
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
from wds_datapipes.samples.keys import KeyRule, first_dot

__all__ = ["index"]


class Format(str, Enum):
    """The formats of indexes."""

    wds = "wds"
    dali = "dali"
    energon = "energon"
    wids = "wids"


class IndexSource(str, Enum):
    """The sources of an index."""

    shard = "shard"
    dali = "dali"
    energon = "energon"


def index(
    shards: Shards,
    options: LimitedOptions,
    to: Annotated[
        Format, typer.Option("--to", help="The program that reads the indexes; wds means this one.")
    ] = Format.wds,
    source: Annotated[
        IndexSource,
        typer.Option("--from", help="Convert the indexes of this program, checked against the headers of shards."),
    ] = IndexSource.shard,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="The JSON file for wids.", show_default=False)
    ] = None,
    manifest: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also write a manifest of all shards.", show_default=False),
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The folder for indexes, if not next to their shards.", show_default=False),
    ] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Rebuild valid indexes, too.")] = False,
    digest: Annotated[
        bool, typer.Option("--digest", help="Include the SHA-256 of each shard, which reads all of it.")
    ] = False,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="A function from a sample to a mapping of names to values, which become columns of the index.",
            show_default=False,
            **OWN,
        ),
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option("--field", metavar="FIELD", help="A field that this function needs; may be repeated.", **OWN),
    ] = None,
    workers: Workers = None,
) -> None:
    """Write an index next to each shard whose index is missing or stale.

    With --to, write the indexes for DALI (shard.idx), Energon (shard.tar.idx) or wids (one JSON file), and replace
    existing ones. The command stops at the first faulty shard, and keeps the indexes written before.
    """
    if options.limits and (to is not Format.wds or source is not IndexSource.shard):
        raise WrongUse("--limit cannot be used with --to and --from")
    check_use(to, source, output, manifest, folder, rebuild, digest, columns, options.rule)
    if fields and columns is None:
        raise WrongUse("--field names the fields that the function of --columns needs, so it requires --columns")
    urls = options.list_shards(shards)
    if any(url == "-" or url.startswith("pipe:") for url in urls) and folder is None:
        raise WrongUse(
            "An index cannot be written next to standard input or a command. Write the shard to a file first"
        )
    rules = {"key_rule": options.rule, "end_marker": options.end_marker.value, "limits": options.reading["limits"]}
    indexing = IndexOptions(digest=digest, **rules)
    with ProgressMeter("Indexing", len(urls)) as meter:
        if to is Format.wds and source is IndexSource.shard:
            results = own_indexes(
                urls,
                meter,
                index_dir=folder,
                rebuild=rebuild,
                options=indexing,
                columns=None if columns is None else load_function(columns),
                fields=fields or None,
                storage_options=options.store,
                num_workers=workers,
            )
            if manifest is not None:
                write_manifest(Manifest(results), manifest, storage_options=options.store)
            written = [result.index_url for result in results if result.is_new]
            samples, held = sum(result.samples for result in results), len(results) - len(written)
        elif to is Format.wids:
            wids = write_wids_index(urls, str(output), storage_options=options.store, num_workers=workers)
            written, samples, held = [str(output)], wids.samples, 0
        else:
            work = WORK[source, to]
            written, samples = foreign_indexes(urls, work, (indexing, options.store), meter, workers)
            held = 0
    if options.as_json:
        facts = {"shards": len(urls), "samples": samples, "written": list(map(redact, written)), "held": held}
        sys.stdout.write(json.dumps({**facts, "manifest": manifest}) + "\n")
        return
    count = f"{len(written):,} {'index' if len(written) == 1 else 'indexes'}"
    unchanged = f", {held:,} already up to date" if held else ""
    sys.stdout.write(f"{plural(len(urls), 'shard')}, {plural(samples, 'sample')}: {count} written{unchanged}\n")
    if manifest is not None:
        sys.stdout.write(f"Manifest: {printable(redact(manifest))}\n")


def check_use(
    to: Format,
    source: IndexSource,
    output: str | None,
    manifest: str | None,
    folder: str | None,
    rebuild: bool,
    digest: bool,
    columns: str | None,
    key_rule: KeyRule,
) -> None:
    """Reject options that cannot be combined."""
    if (to is Format.wids) is (output is None):
        raise WrongUse(
            "--output is required with --to wids, which writes one file for all shards, and cannot be used otherwise"
        )
    if source is not IndexSource.shard and to is not Format.wds:
        raise WrongUse(
            "--from converts to indexes of wds-datapipes. Write other formats from the shards, without --from"
        )
    own = {"--manifest": manifest, "--folder": folder, "--rebuild": rebuild, "--digest": digest}
    own["--columns"] = columns
    given = [name for name, value in own.items() if value]
    if key_rule is not first_dot:
        given.append("--key-rule")
    if given and (to is not Format.wds or source is not IndexSource.shard):
        raise WrongUse(f"{given[0]} cannot be used with --to and --from")


def own_indexes(urls: Sequence[str], meter: ProgressMeter, **options: Any) -> list[IndexResult]:
    """Build the indexes that are missing or stale."""

    def done(result: IndexResult) -> None:
        meter.add(shards=1, samples=result.samples, size=result.bytes)

    try:
        return build_indexes(urls, on_result=done, progress=False, **options)
    except ValueError as error:
        if type(error) is not ValueError:  # an error class of this package
            raise
        raise WrongUse(str(error)) from None


def foreign_indexes(
    urls: Sequence[str],
    work: Callable[..., tuple[str, int]],
    arguments: Sequence[Any],
    meter: ProgressMeter,
    workers: int | None,
) -> tuple[list[str], int]:
    """Write an index for each shard; return their paths, and the number of samples."""
    paths: dict[int, str] = {}
    samples = 0
    for number, task in map_shards(work, urls, arguments, executor=None, num_workers=workers):
        paths[number], count = task.result()
        samples += count
        meter.add(shards=1, samples=count)
    return [paths[number] for number in sorted(paths)], samples


def to_dali(url: str, indexing: IndexOptions, store: Mapping[str, Any] | None) -> tuple[str, int]:
    """Write the index of a shard for DALI, and check it against the shard."""
    path = write_dali_index(url, options=indexing, storage_options=store)
    as_written = replace(indexing, lowercase=False)
    return path, len(read_dali_index(path, url, as_written, storage_options=store))


def to_energon(url: str, indexing: IndexOptions, store: Mapping[str, Any] | None) -> tuple[str, int]:
    """Write the index of a shard for Energon, and check it against the shard."""
    path = write_energon_index(url, options=indexing, storage_options=store)
    return path, len(read_energon_index(path, url, indexing, storage_options=store))


def from_dali(url: str, indexing: IndexOptions, store: Mapping[str, Any] | None) -> tuple[str, int]:
    """Convert the index of a shard from DALI."""
    return write_next_to(url, read_dali_index(dali_index_url(url), url, indexing, storage_options=store), store)


def from_energon(url: str, indexing: IndexOptions, store: Mapping[str, Any] | None) -> tuple[str, int]:
    """Convert the index of a shard from Energon."""
    return write_next_to(url, read_energon_index(energon_index_url(url), url, indexing, storage_options=store), store)


def write_next_to(url: str, found: ShardIndex, options: Mapping[str, Any] | None) -> tuple[str, int]:
    """Write an index next to its shard."""
    path = index_url(url)
    write_index(found, path, storage_options=options)
    return path, len(found)


WORK: dict[tuple[IndexSource, Format], Callable[..., tuple[str, int]]] = {
    (IndexSource.shard, Format.dali): to_dali,
    (IndexSource.shard, Format.energon): to_energon,
    (IndexSource.dali, Format.wds): from_dali,
    (IndexSource.energon, Format.wds): from_energon,
}
