"""The command ``cache``: manage the local copies of shards that `.cache_wds_shards()` keeps."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from wds_datapipes.cli._app import FAULT_FOUND, WrongUse, on_one_line, printable
from wds_datapipes.cli._meter import plural
from wds_datapipes.cli._options import AsJson, Shards, StoreOptions, parse_bytes
from wds_datapipes.index.manifest import read_manifest
from wds_datapipes.parallel.progress import ProgressMeter, human_bytes
from wds_datapipes.shard_cache.cached_shards import warm_cache
from wds_datapipes.shard_cache.entry import Entry, entries
from wds_datapipes.shard_cache.eviction import by_last_use, evict
from wds_datapipes.shard_cache.store import CacheFolder

__all__ = ["cache"]

Folder: TypeAlias = Annotated[str, typer.Option("--dir", metavar="DIR", help="The cache folder.", show_default=False)]
MaxBytes: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--max-bytes", metavar="BYTES", help="The limit for all copies together, such as 500GB.", show_default=False
    ),
]


def show_copies(folder: Folder, as_json: AsJson = False) -> None:
    """List the cached shards and their sizes, sorted by URL."""
    found = entries(existing_folder(folder))
    for url, entry in sorted((url_of(entry), entry) for entry in found):
        size = copy_bytes(entry)
        if as_json:
            sys.stdout.write(json.dumps({"shard": url, "bytes": size, "path": str(entry.path)}) + "\n")
        else:
            sys.stdout.write(f"{printable(url)}  {human_bytes(size)}\n")
    if not as_json:
        sys.stdout.write(f"{format_totals(found)}\n")


def warm(
    shards: Shards,
    folder: Folder,
    options: StoreOptions,
    max_bytes: MaxBytes = None,
    manifest: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Check the downloaded shards against this manifest.", show_default=False),
    ] = None,
    at_once: Annotated[
        int, typer.Option("--at-once", min=1, metavar="NUMBER", help="The number of concurrent downloads.")
    ] = 4,
    as_json: AsJson = False,
) -> None:
    """Download shards into the cache before a run.

    Without --max-bytes, the size of the cache is not limited. Failed downloads are reported at the end, after all
    others are complete.
    """
    urls = list(dict.fromkeys(options.list_shards(shards)))
    copies = CacheFolder(folder, None if max_bytes is None else int(parse_bytes(max_bytes, "--max-bytes")))
    found = read_manifest(manifest).entries if manifest is not None else ()
    results = []
    with ProgressMeter("warm", len(urls)) as meter:
        for each in warm_cache(
            copies,
            urls,
            known={entry.url: (entry.bytes or None, entry.sha256) for entry in found},
            options={} if options.store is None else {"storage_options": options.store},
            at_once=at_once,
        ):
            results.append(each)
            meter.add(shards=1, size=0 if each.was_cached else each.bytes)
    failed = [each.error for each in results if each.error]
    cached = sum(each.was_cached for each in results)
    fetched, size = len(urls) - len(failed) - cached, sum(each.bytes for each in results)
    evicted = sum(not copies.entry(url).path.exists() for url in urls) - len(failed)
    if evicted:
        failed.append(f"{evicted} of the copies were evicted again, as the shards together exceed --max-bytes")
    facts = {"shards": len(urls), "bytes": size, "fetched": fetched, "there": cached}
    if as_json:
        sys.stdout.write(json.dumps({**facts, "failed": failed}) + "\n")
    else:
        counts = f"{fetched:,} downloaded, {cached:,} already cached"
        sys.stdout.write(f"{plural(fetched + cached, 'shard')}, {human_bytes(size)}: {counts}\n")
    exit_on_faults(failed)


def verify_copies(
    folder: Folder,
    remove: Annotated[bool, typer.Option("--remove", help="Remove damaged copies.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read all copies, and compare them with the digests of their downloads. The exit code is 1 if one is damaged."""
    copies = CacheFolder(existing_folder(folder), check="digest")
    found = entries(copies.path)
    faults: list[str] = []
    with ProgressMeter("verify", len(found)) as meter:
        for entry in found:
            url, size = url_of(entry), copy_bytes(entry)
            wrong = copies.find_damage(entry, remove=remove)
            if wrong is not None:
                done = (
                    ". It was removed"
                    if remove
                    else ". Remove it with --remove; otherwise the next reader downloads it again"
                )
                faults.append(f"The copy {entry.path} of {url} is damaged: {wrong}{done}")
            meter.add(shards=1, size=size)
    if as_json:
        sys.stdout.write(json.dumps({"copies": len(found), "faults": faults}) + "\n")
    else:
        sys.stdout.write(f"{format_totals(found)}: {plural(len(faults), 'fault') if faults else 'no faults'}\n")
    exit_on_faults(faults)


def clear(folder: Folder, max_bytes: MaxBytes = None, as_json: AsJson = False) -> None:
    """Remove all copies, or the least recently used ones until the rest fits into --max-bytes.

    Copies that a process is reading or downloading are not removed.
    """
    limit = 0.0 if max_bytes is None else parse_bytes(max_bytes, "--max-bytes")
    found = list(by_last_use(existing_folder(folder)))
    remaining = sum(map(copy_bytes, found))
    removed = 0
    for entry in found:
        if remaining <= limit:
            break
        freed = evict(entry)
        remaining, removed = remaining - freed, removed + (not entry.path.exists())
    count = len(found) - removed
    if as_json:
        sys.stdout.write(json.dumps({"removed": removed, "left": count, "bytes": remaining}) + "\n")
    else:
        rest = f"{count:,} left{f', {human_bytes(remaining)}' if count else ''}"
        sys.stdout.write(f"{'1 copy' if removed == 1 else f'{removed:,} copies'} removed, {rest}\n")


def existing_folder(folder: str) -> Path:
    """Return the path of an existing folder."""
    path = Path(folder)
    if not path.is_dir():
        raise WrongUse(f"There is no folder {folder!r}. Name the folder passed to .cache_wds_shards()")
    return path


def url_of(entry: Entry) -> str:
    """Return the URL of a cached shard."""
    facts = entry.facts()
    return facts.url if facts else f"(unknown: {entry.path.name})"


def copy_bytes(entry: Entry) -> int:
    """Return the size of a copy, or 0 if it no longer exists."""
    try:
        return entry.path.stat().st_size
    except FileNotFoundError:
        return 0


def format_totals(found: list[Entry]) -> str:
    """Return the number of copies and their total size as text."""
    return f"{'1 copy' if len(found) == 1 else f'{len(found):,} copies'}, {human_bytes(sum(map(copy_bytes, found)))}"


def exit_on_faults(faults: list[str]) -> None:
    """Print errors, and exit with an error code if there are any."""
    sys.stdout.flush()
    for fault in faults:
        typer.echo(f"Error: {on_one_line(fault)}", err=True)
    if faults:
        raise typer.Exit(FAULT_FOUND)


#: The help text of the group.
HELP = "List, download, verify and remove the local copies of shards that .cache_wds_shards() keeps."
#: The subcommands.
cache: dict[str, Callable[..., Any]] = {
    "ls": show_copies,
    "warm": warm,
    "verify": verify_copies,
    "clear": clear,
}
