"""The command ``index``: the indexes of shards, those of other programs too, and the manifest of a dataset."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any

import typer

from wds_datapipes.cli._app import WrongUse, printable
from wds_datapipes.cli._meter import ProgressMeter, plural
from wds_datapipes.cli._options import (
    AsJson,
    EndMarkerOption,
    KeyRuleOption,
    KeyRuleWord,
    Limits,
    Presence,
    Retries,
    Shards,
    StorageOptions,
    Timeout,
    Workers,
    key_rule_of,
    limits_of,
    list_shards,
    options_of,
)
from wds_datapipes.index.build_many import IndexResult, build_indexes
from wds_datapipes.index.file_format import index_url, write_index
from wds_datapipes.index.interop.dali import dali_index_url, read_dali_index, write_dali_index
from wds_datapipes.index.interop.energon import energon_index_url, read_energon_index, write_energon_index
from wds_datapipes.index.interop.wids import write_wids_index
from wds_datapipes.index.manifest import Manifest, write_manifest
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.io.openers import redact
from wds_datapipes.parallel.map_shards import each_shard

__all__ = ["index"]


class Format(str, Enum):
    """The kinds of indexes."""

    wds = "wds"
    dali = "dali"
    energon = "energon"
    wids = "wids"


class Source(str, Enum):
    """Where the index of a shard comes from."""

    shard = "shard"
    dali = "dali"
    energon = "energon"


def index(
    shards: Shards,
    to: Annotated[Format, typer.Option("--to", help="For which program; wds is this one.")] = Format.wds,
    source: Annotated[
        Source, typer.Option("--from", help="Convert the indexes of this program, held against the headers of shards.")
    ] = Source.shard,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="The JSON file for wids.", show_default=False)
    ] = None,
    manifest: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the manifest of all shards, too.", show_default=False),
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where indexes go, if not beside their shards.", show_default=False),
    ] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Also those that hold.")] = False,
    digest: Annotated[bool, typer.Option("--digest", help="With the SHA-256 of each shard, which reads all of it.")] = (
        False
    ),
    workers: Workers = None,
    as_json: AsJson = False,
    key_rule: KeyRuleOption = KeyRuleWord.first_dot,
    end_marker: EndMarkerOption = Presence.required,
    storage_options: StorageOptions = "",
    timeout: Timeout = None,
    retries: Retries = None,
    limits: Limits = None,
) -> None:
    """Write an index beside each shard that has none, or one that no longer holds.

    With --to, the indexes that DALI (shard.idx), Energon (shard.tar.idx) or wids (one JSON file) read; these are
    always written anew. The first shard with a fault ends it, and what was written by then stays.
    """
    options = options_of(storage_options, timeout, retries)
    if limits and (to is not Format.wds or source is not Source.shard):
        raise WrongUse("--limit goes with our own indexes of shards, and not with --to and --from")
    check_use(to, source, output, manifest, folder, rebuild, digest, key_rule)
    urls = list_shards(shards, options)
    if any(url == "-" or url.startswith("pipe:") for url in urls) and folder is None:
        raise WrongUse("Standard input and commands have no place beside them. Write the shard to a file first")
    with ProgressMeter("Indexing", len(urls)) as meter:
        if to is Format.wds and source is Source.shard:
            results = own_indexes(
                urls,
                meter,
                folder=folder,
                rebuild=rebuild,
                digest=digest,
                key_rule=key_rule_of(key_rule),
                end_marker=end_marker.value,
                storage_options=options,
                limits=limits_of(limits),
                max_workers=workers,
            )
            if manifest is not None:
                write_manifest(Manifest(results), manifest, storage_options=options)
            written = [result.index_url for result in results if result.is_new]
            samples, held = sum(result.samples for result in results), len(results) - len(written)
        elif to is Format.wids:
            told = write_wids_index(urls, str(output), storage_options=options, max_workers=workers)
            written, samples, held = [str(output)], told.samples, 0
        else:
            work = WORK[source, to]
            written, samples = foreign_indexes(urls, work, (end_marker.value, options), meter, workers)
            held = 0
    if as_json:
        facts = {"shards": len(urls), "samples": samples, "written": list(map(redact, written)), "held": held}
        sys.stdout.write(json.dumps({**facts, "manifest": manifest}) + "\n")
        return
    count = f"{len(written):,} {'index' if len(written) == 1 else 'indexes'}"
    kept = f", {held:,} held already" if held else ""
    sys.stdout.write(f"{plural(len(urls), 'shard')}, {plural(samples, 'sample')}: {count} written{kept}\n")
    if manifest is not None:
        sys.stdout.write(f"Manifest: {printable(redact(manifest))}\n")


def check_use(
    to: Format,
    source: Source,
    output: str | None,
    manifest: str | None,
    folder: str | None,
    rebuild: bool,
    digest: bool,
    key_rule: KeyRuleWord,
) -> None:
    """Refuse options that do not go together."""
    if (to is Format.wids) is (output is None):
        raise WrongUse("--output names the file of --to wids, which is one for all shards; it goes with nothing else")
    if source is not Source.shard and to is not Format.wds:
        raise WrongUse("--from converts to the indexes of this program. Write others from the shards, without --from")
    own = {"--manifest": manifest, "--folder": folder, "--rebuild": rebuild, "--digest": digest}
    given = [name for name, value in own.items() if value]
    if key_rule is not KeyRuleWord.first_dot:
        given.append("--key-rule")
    if given and (to is not Format.wds or source is not Source.shard):
        raise WrongUse(f"{given[0]} is for the indexes of this program, made from shards")


def own_indexes(urls: Sequence[str], meter: ProgressMeter, **options: Any) -> list[IndexResult]:
    """Build the indexes that are missing or stale."""

    def done(result: IndexResult) -> None:
        meter.add(shards=1, samples=result.samples, size=result.bytes)

    try:
        return build_indexes(urls, on_result=done, **options)
    except ValueError as error:
        if type(error) is not ValueError:  # one of this package, with a text of its own
            raise
        raise WrongUse(str(error)) from None


def foreign_indexes(
    urls: Sequence[str],
    work: Callable[..., tuple[str, int]],
    arguments: Sequence[Any],
    meter: ProgressMeter,
    workers: int | None,
) -> tuple[list[str], int]:
    """Write an index for each shard; return their names, and how many samples there are."""
    places: dict[int, str] = {}
    samples = 0
    for number, task in each_shard(work, urls, arguments, executor=None, max_workers=workers):
        places[number], count = task.result()
        samples += count
        meter.add(shards=1, samples=count)
    return [places[number] for number in sorted(places)], samples


def to_dali(url: str, end_marker: Any, options: Mapping[str, Any] | None) -> tuple[str, int]:
    """Write the index of a shard for DALI, and hold it against the shard."""
    place = write_dali_index(url, end_marker=end_marker, storage_options=options)
    return place, len(read_dali_index(place, url, end_marker=end_marker, on_duplicate="first", storage_options=options))


def to_energon(url: str, end_marker: Any, options: Mapping[str, Any] | None) -> tuple[str, int]:
    """Write the index of a shard for Energon, and hold it against the shard."""
    place = write_energon_index(url, end_marker=end_marker, storage_options=options)
    return place, len(read_energon_index(place, url, end_marker=end_marker, storage_options=options))


def from_dali(url: str, end_marker: Any, options: Mapping[str, Any] | None) -> tuple[str, int]:
    """Make an index from that of DALI."""
    return write_beside(
        url, read_dali_index(dali_index_url(url), url, end_marker=end_marker, storage_options=options), options
    )


def from_energon(url: str, end_marker: Any, options: Mapping[str, Any] | None) -> tuple[str, int]:
    """Make an index from that of Energon."""
    found = read_energon_index(energon_index_url(url), url, end_marker=end_marker, storage_options=options)
    return write_beside(url, found, options)


def write_beside(url: str, found: ShardIndex, options: Mapping[str, Any] | None) -> tuple[str, int]:
    """Write an index beside its shard."""
    place = index_url(url)
    write_index(found, place, storage_options=options)
    return place, len(found)


WORK: dict[tuple[Source, Format], Callable[..., tuple[str, int]]] = {
    (Source.shard, Format.dali): to_dali,
    (Source.shard, Format.energon): to_energon,
    (Source.dali, Format.wds): from_dali,
    (Source.energon, Format.wds): from_energon,
}
