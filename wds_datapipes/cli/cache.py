"""The command ``cache``: the local copies of shards, those of `.cache_wds_shards()`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from wds_datapipes.cli._app import FAULT_FOUND, WrongUse, on_one_line, printable
from wds_datapipes.cli._meter import ProgressMeter, human_bytes, plural
from wds_datapipes.cli._options import (
    AsJson,
    Retries,
    Shards,
    StorageOptions,
    Timeout,
    list_shards,
    options_of,
    parse_bytes,
)
from wds_datapipes.index.manifest import read_manifest
from wds_datapipes.shard_cache.entry import Entry, entries
from wds_datapipes.shard_cache.eviction import by_last_use, evict
from wds_datapipes.shard_cache.store import CacheFolder
from wds_datapipes.shard_cache.warmup import warm_cache

__all__ = ["cache"]

Folder: TypeAlias = Annotated[
    str, typer.Option("--dir", "-d", metavar="DIR", help="The folder with the copies.", show_default=False)
]
MaxBytes: TypeAlias = Annotated[
    str | None,
    typer.Option("--max-bytes", metavar="BYTES", help="For all copies together, such as 500GB.", show_default=False),
]


def show_copies(folder: Folder, as_json: AsJson = False) -> None:
    """List the copies of a folder, in the order of the names of their shards: each shard and its size."""
    found = entries(existing_folder(folder))
    for url, entry in sorted((url_of(entry), entry) for entry in found):
        size = size_of(entry)
        if as_json:
            sys.stdout.write(json.dumps({"shard": url, "bytes": size, "path": str(entry.path)}) + "\n")
        else:
            sys.stdout.write(f"{printable(url)}  {human_bytes(size)}\n")
    if not as_json:
        sys.stdout.write(f"{totals_of(found)}\n")


def warm(
    shards: Shards,
    folder: Folder,
    max_bytes: MaxBytes = None,
    manifest: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="What is fetched has to be what it tells.", show_default=False),
    ] = None,
    at_once: Annotated[int, typer.Option("--at-once", min=1, help="How many shards are fetched at a time.")] = 4,
    as_json: AsJson = False,
    storage_options: StorageOptions = "",
    timeout: Timeout = None,
    retries: Retries = None,
) -> None:
    """Fetch shards into a folder, before a run begins.

    Without --max-bytes, the folder gets as large as they are. A shard that cannot be fetched is told at the end, and
    the others are fetched.
    """
    options = options_of(storage_options, timeout, retries)
    urls = list(dict.fromkeys(list_shards(shards, options)))
    copies = CacheFolder(folder, None if max_bytes is None else int(parse_bytes(max_bytes, "--max-bytes")))
    found = read_manifest(manifest).entries if manifest is not None else ()
    results = []
    with ProgressMeter("warm", len(urls)) as meter:
        for each in warm_cache(
            copies,
            urls,
            known={entry.url: (entry.bytes, entry.sha256) for entry in found},
            options={} if options is None else {"storage_options": options},
            at_once=at_once,
        ):
            results.append(each)
            meter.add(shards=1, size=0 if each.was_there else each.bytes)
    failed = [each.error for each in results if each.error]
    there = sum(each.was_there for each in results)
    fetched, size = len(urls) - len(failed) - there, sum(each.bytes for each in results)
    left_again = sum(not copies.entry(url).path.exists() for url in urls) - len(failed)
    if left_again:
        failed.append(f"{left_again} of the copies have left again: all shards together have more than --max-bytes")
    facts = {"shards": len(urls), "bytes": size, "fetched": fetched, "there": there}
    if as_json:
        sys.stdout.write(json.dumps({**facts, "failed": failed}) + "\n")
    else:
        sys.stdout.write(
            f"{plural(fetched + there, 'shard')}, {human_bytes(size)}: {fetched:,} fetched, {there:,} there already\n"
        )
    tell(failed)


def verify_copies(
    folder: Folder,
    remove: Annotated[bool, typer.Option("--remove", help="Let those that are damaged leave.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read all copies, and hold them against what was fetched. The exit code is 1 if one is damaged."""
    copies = CacheFolder(existing_folder(folder), check="digest")
    found = entries(copies.path)
    faults: list[str] = []
    with ProgressMeter("verify", len(found)) as meter:
        for entry in found:
            url, size = url_of(entry), size_of(entry)
            wrong = copies.fault(entry, remove=remove)
            if wrong is not None:
                done = (
                    ". It was removed" if remove else ". Remove it with --remove, or let the next reader fetch it again"
                )
                faults.append(f"The copy {entry.path} of {url} is damaged, as {wrong}{done}")
            meter.add(shards=1, size=size)
    if as_json:
        sys.stdout.write(json.dumps({"copies": len(found), "faults": faults}) + "\n")
    else:
        sys.stdout.write(f"{totals_of(found)}: {plural(len(faults), 'fault') if faults else 'no fault'}\n")
    tell(faults)


def clear(folder: Folder, max_bytes: MaxBytes = None, as_json: AsJson = False) -> None:
    """Remove the copies of a folder: all, or those that were used longest ago until the rest has --max-bytes.

    What a process reads or fetches right now stays.
    """
    most = 0.0 if max_bytes is None else parse_bytes(max_bytes, "--max-bytes")
    found = by_last_use(existing_folder(folder))
    left = sum(map(size_of, found))
    removed = 0
    for entry in found:
        if left <= most:
            break
        freed = evict(entry)
        left, removed = left - freed, removed + (not entry.path.exists())
    count = len(found) - removed
    if as_json:
        sys.stdout.write(json.dumps({"removed": removed, "left": count, "bytes": left}) + "\n")
    else:
        rest = f"{count:,} left{f', {human_bytes(left)}' if count else ''}"
        sys.stdout.write(f"{'1 copy' if removed == 1 else f'{removed:,} copies'} removed, {rest}\n")


def existing_folder(folder: str) -> Path:
    """Return a folder that is there."""
    path = Path(folder)
    if not path.is_dir():
        raise WrongUse(f"There is no folder {folder!r}. Name that of .cache_wds_shards()")
    return path


def url_of(entry: Entry) -> str:
    """Return the shard that a copy is of."""
    facts = entry.facts()
    return facts.url if facts else f"(unknown: {entry.path.name})"


def size_of(entry: Entry) -> int:
    """Return the size of a copy, 0 if it has gone."""
    try:
        return entry.path.stat().st_size
    except FileNotFoundError:
        return 0


def totals_of(found: list[Entry]) -> str:
    """Tell how many copies there are, and how large they are."""
    return f"{'1 copy' if len(found) == 1 else f'{len(found):,} copies'}, {human_bytes(sum(map(size_of, found)))}"


def tell(faults: list[str]) -> None:
    """Print errors, and end with their exit code."""
    sys.stdout.flush()
    for fault in faults:
        typer.echo(f"Error: {on_one_line(fault)}", err=True)
    if faults:
        raise typer.Exit(FAULT_FOUND)


#: What the help page says of all of them.
HELP = "List, fetch, check and remove the local copies of shards, those of .cache_wds_shards()."
#: The commands below this one.
cache: dict[str, Callable[..., Any]] = {
    "ls": show_copies,
    "warm": warm,
    "verify": verify_copies,
    "clear": clear,
}
