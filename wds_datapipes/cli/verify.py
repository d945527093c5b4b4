"""The command ``verify``: check shards for faults."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from wds_datapipes.cli._app import FAULT_FOUND, WrongUse, on_one_line, printable
from wds_datapipes.cli._meter import plural, size_of_shards
from wds_datapipes.cli._options import LimitedOptions, Shards, Workers
from wds_datapipes.index.manifest import read_manifest
from wds_datapipes.prepare.shard_contents import ShardFault
from wds_datapipes.prepare.verify import VerifiedShard, verify_shards

__all__ = ["verify"]


def verify(
    shards: Shards,
    options: LimitedOptions,
    decode: Annotated[bool, typer.Option("--decode", help="Decode every field, images completely.")] = False,
    digest: Annotated[
        bool,
        typer.Option("--digest", help="Compute the SHA-256 of shards, and compare it with indexes and the manifest."),
    ] = False,
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--field",
            metavar="FIELD",
            help="A field that every sample must have, such as 'jpg;png'; may be repeated.",
        ),
    ] = None,
    manifest: Annotated[
        str | None, typer.Option(metavar="FILE", help="Compare the shards with this manifest.", show_default=False)
    ] = None,
    index: Annotated[bool, typer.Option(help="Check the index next to a shard, if there is one.")] = True,
    shared_keys: Annotated[bool, typer.Option("--shared-keys", help="Allow the same key in several shards.")] = False,
    shown: Annotated[
        int, typer.Option("--show", min=0, metavar="NUMBER", help="The number of faults of each kind to show.")
    ] = 10,
    workers: Workers = None,
) -> None:
    """Check shards for faults; the exit code is 1 if there are any.

    Checks headers and their checksums, the end marker, split samples, repeated fields, keys that occur in several
    shards, and stale indexes. Only headers are read, except for compressed shards and with --decode or --digest.
    """
    urls = options.list_shards(shards)
    if decode and "-" in urls:
        raise WrongUse(
            "--decode reads each shard twice, which is not possible with standard input. Write it to a file first"
        )
    found = verify_shards(
        urls,
        decode=decode,
        digest=digest,
        fields=fields or (),
        index=index,
        manifest=None if manifest is None else read_manifest(manifest, storage_options=options.store),
        shared_keys=shared_keys,
        num_workers=workers,
        **options.reading,
    )
    counts = sum((shard.counts for shard in found), Counter[str]())
    faults = [fault for shard in found for fault in shard.faults]
    if options.as_json:
        sys.stdout.write(json.dumps(facts_of(found, faults, counts), indent=1) + "\n")
    else:
        print_report(found, faults, counts, shown)
    if counts:
        raise typer.Exit(FAULT_FOUND)


def facts_of(found: Sequence[VerifiedShard], faults: Sequence[ShardFault], counts: Counter[str]) -> dict[str, Any]:
    """Return all results for JSON."""
    return {
        "shards": len(found),
        "samples": sum(shard.samples for shard in found),
        "files": sum(shard.files for shard in found),
        "bytes": sum(shard.bytes or 0 for shard in found),
        "indexes": sum(shard.has_index for shard in found),
        "counts": counts,
        "faults": [fault._asdict() for fault in faults],
        "notes": [note for shard in found for note in shard.notes],
    }


def print_report(
    found: Sequence[VerifiedShard], faults: Sequence[ShardFault], counts: Counter[str], shown: int
) -> None:
    """Print faults by kind, then notes, then totals."""
    for kind, count in sorted(counts.items()):
        of_kind = [fault for fault in faults if fault.kind == kind][:shown]
        sys.stdout.write(f"{kind} ({count:,}):\n")
        for fault in of_kind:
            sys.stdout.write(f"  {on_one_line(fault.message)}\n")
        if count > len(of_kind) and shown:
            sys.stdout.write(f"  ... and {count - len(of_kind):,} more\n")
    notes = [note for shard in found for note in shard.notes]
    for note in notes[: max(shown, 1)]:
        sys.stdout.write(f"Note: {printable(note)}\n")
    if len(notes) > max(shown, 1):
        sys.stdout.write(f"Note: ... and {len(notes) - max(shown, 1):,} more\n")
    samples, files = sum(shard.samples for shard in found), sum(shard.files for shard in found)
    sizes = [shard.bytes for shard in found if shard.bytes is not None]
    size = size_of_shards(sum(sizes), len(found), len(found) - len(sizes))
    sums = f"{plural(len(found), 'shard')}, {plural(samples, 'sample')}, {plural(files, 'file')}, {size}"
    indexed = sum(shard.has_index for shard in found)
    if indexed:
        sums += f", {indexed:,} indexed"
    bad = len({fault.shard for fault in faults})
    total = counts.total()
    summary = f"{plural(total, 'fault')} in {plural(bad, 'shard')}" if total else "no faults"
    sys.stdout.write(f"{sums}: {summary}\n")
