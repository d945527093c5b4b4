"""The command ``index``: write or convert the indexes of shards, and the manifest of a dataset."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from cyclopts import Group

from wds_datapipes.errors import plural
from wds_datapipes.index.format.dataset_builder import build_indexes
from wds_datapipes.index.format.manifest import Manifest, read_manifest, write_manifest
from wds_datapipes.index.format.options import IndexOptions
from wds_datapipes.index.format.parquet_columns import parquet_columns
from wds_datapipes.index.format.user_columns import ComputeColumns
from wds_datapipes.io.openers import redact
from wds_datapipes.parallel.map_shards import collect_shards
from wds_datapipes.tools.cli.errors import WrongUse, printable
from wds_datapipes.tools.cli.options.read import READ, ReadArguments, Shards, Workers
from wds_datapipes.tools.cli.options.values import FileOrUrl, load_function, metavar, parse_pairs, wrong_use
from wds_datapipes.tools.cli.printing import print_json
from wds_datapipes.tools.interop.dali_index import dali_index_url, write_dali_index
from wds_datapipes.tools.interop.wids_index import write_wids_index

COLUMNS = Group("Columns", sort_key=6)


def index(
    *shards: Shards,
    to: Literal["wds", "dali", "wids"] = "wds",
    output: Annotated[FileOrUrl | None, metavar("FILE", alias="-o")] = None,
    manifest: Annotated[FileOrUrl | None, metavar("FILE")] = None,
    append: bool = False,
    index_dir: Annotated[FileOrUrl | None, metavar("DIR")] = None,
    rebuild: bool = False,
    digest: bool = False,
    columns: Annotated[list[str] | None, metavar("NAME=PLACE", group=COLUMNS)] = None,
    field: Annotated[list[str] | None, metavar("FIELD", group=COLUMNS)] = None,
    parquet: Annotated[FileOrUrl | None, metavar("FILE", group=COLUMNS)] = None,
    key_column: Annotated[str, metavar("NAME", group=COLUMNS)] = "key",
    num_workers: Workers = None,
    options: ReadArguments = READ,
) -> None:
    """Write an index next to each shard that lacks a valid one.

    With --to dali, write DALI's indexes instead (shard.idx) and replace existing ones. With --to wids, also write one
    JSON file. The command stops at the first faulty shard and keeps the indexes written before.

    Args:
        to: The program that reads the indexes; wds means this one.
        output: The JSON file for wids.
        manifest: Also write a manifest of all shards.
        append: Add new shards to the end of an existing manifest, so that a run can resume with them.
        index_dir: The folder for indexes, if not next to their shards.
        rebuild: Rebuild valid indexes too.
        digest: Include the SHA-256 of each shard, for which all of it is read.
        columns: Store a value of each sample as a column of the index, such as label=cls or
            width=json.size.0; may be repeated. Or MODULE:FUNCTION, from a sample to a mapping of such values.
        field: A field that this function needs, by default all; may be repeated.
        parquet: A Parquet file that has the columns of --columns, such as tokens=n_tokens, in a row for each key.
        key_column: The column of this file with the keys.
    """
    is_own = to != "dali"
    if (to == "wids") is (output is None):
        raise WrongUse("--output names the file of --to wids, so each requires the other")
    own: dict[str, Any] = {"--manifest": manifest, "--index-dir": index_dir, "--rebuild": rebuild, "--digest": digest}
    own |= {"--columns": columns, "--limit": options.limit, "--key-rule": options.key_rule != "first-dot"}
    if not is_own and (given := [name for name, value in own.items() if value]):
        raise WrongUse(f"{given[0]} cannot be used with --to {to}")
    if append and manifest is None:
        raise WrongUse("--append requires --manifest, to which it adds shards")
    computed = parse_columns(columns)
    if field and not callable(computed):
        raise WrongUse("--field names the fields that a function of --columns needs, so it requires one")
    if parquet is not None:
        if not isinstance(computed, dict):
            raise WrongUse("--parquet requires --columns NAME=COLUMN, the columns of the file to store")
        computed = parquet_columns(parquet, computed, key=key_column, storage_options=options.store)
    urls = options.list_shards(shards)
    if any(url == "-" or url.startswith("pipe:") for url in urls) and index_dir is None:
        raise WrongUse("Standard input and commands have no place for an index. Write the shard to a file first")
    indexing = IndexOptions(digest=digest, key_rule=options.rule, end_marker=options.end_marker, limits=options.limits)
    held, store = 0, options.store
    with wrong_use():
        if is_own:
            results = build_indexes(
                urls,
                index_dir=index_dir,
                rebuild=rebuild,
                options=indexing,
                columns=computed,
                fields=field,
                storage_options=store,
                num_workers=num_workers,
            )
            if manifest is not None:
                known = read_manifest(manifest, storage_options=store) if append else Manifest([])
                write_manifest(known.append(results), manifest, storage_options=store)
            written = [result.index_url for result in results if result.is_new]
            if output is not None:
                write_wids_index(Manifest(results), output, storage_options=store)
                written.append(output)
            samples, held = sum(result.samples for result in results), sum(not result.is_new for result in results)
        else:
            found = collect_shards(
                lambda url: (dali_index_url(url), len(write_dali_index(url, options=indexing, storage_options=store))),
                urls,
                label="Indexing",
                measure=lambda result: (result[1], None),
                num_workers=num_workers,
            )
            written, samples = [path for path, _ in found], sum(count for _, count in found)
    if options.json:
        facts = {"shards": len(urls), "samples": samples, "written": list(map(redact, written)), "held": held}
        print_json({**facts, "manifest": manifest}, indent=None)
        return
    count = plural(len(written), "index", "indexes")
    unchanged = f", {held:,} already up to date" if held else ""
    sys.stdout.write(f"{plural(len(urls), 'shard')}, {plural(samples, 'sample')}: {count} written{unchanged}\n")
    if manifest is not None:
        sys.stdout.write(f"Manifest: {printable(redact(manifest))}\n")


def parse_columns(words: list[str] | None) -> ComputeColumns | dict[str, str] | None:
    """Parse --columns into a function, or into the place of each column's value.

    >>> parse_columns(["label=cls", "width=json.size.0"])
    {'label': 'cls', 'width': 'json.size.0'}

    Raises:
        WrongUse: they are neither, or both.
    """
    if not words:
        return None
    if len(words) == 1 and ":" in words[0] and "=" not in words[0]:
        return load_function(words[0], "--columns")
    return parse_pairs(words, "[^=]+", "--columns must be NAME=PLACE, each name once, or one MODULE:FUNCTION")
