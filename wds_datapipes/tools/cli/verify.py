"""The command ``verify``: check shards for faults."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from wds_datapipes.errors import plural
from wds_datapipes.index.format.manifest import read_manifest
from wds_datapipes.tools.cli.errors import FAULT_FOUND, WrongUse, on_one_line, printable
from wds_datapipes.tools.cli.options.read import READ, ReadArguments, Shards, Workers
from wds_datapipes.tools.cli.options.values import FileOrUrl, Natural, metavar
from wds_datapipes.tools.cli.printing import print_json, size_of_shards
from wds_datapipes.tools.prepare.read_options import ReadOptions
from wds_datapipes.tools.prepare.shard_contents import ShardFault
from wds_datapipes.tools.prepare.verify import VerifiedShard, verify_shards


def verify(
    *shards: Shards,
    decode: bool = False,
    digest: bool = False,
    field: Annotated[list[str] | None, metavar("FIELD")] = None,
    manifest: Annotated[FileOrUrl | None, metavar("FILE")] = None,
    index: Annotated[bool, Parameter(negative="--no-index")] = True,
    shared_keys: bool = False,
    show: Natural = 10,
    num_workers: Workers = None,
    options: ReadArguments = READ,
) -> None:
    """Check shards for faults; the exit code is 1 if there are any.

    Finds damaged headers, missing end markers, split samples, repeated fields, keys that occur in several shards, and
    stale indexes. Reads only headers, except for compressed shards and with --decode or --digest.

    Args:
        decode: Decode every field, images, video and audio completely.
        digest: Compute the SHA-256 of shards and compare it with indexes and the manifest.
        field: A field that every sample must have, such as 'jpg;png'; may be repeated.
        manifest: Compare the shards with this manifest.
        index: Check the index next to a shard, if there is one.
        shared_keys: Allow the same key in several shards.
        show: How many faults of each kind to show.
    """
    urls = options.list_shards(shards)
    if decode and "-" in urls:
        raise WrongUse("--decode reads shards twice, but standard input can be read only once. Write it to a file")
    found = verify_shards(
        urls,
        decode=decode,
        digest=digest,
        fields=field or (),
        index=index,
        manifest=None if manifest is None else read_manifest(manifest, storage_options=options.store),
        shared_keys=shared_keys,
        num_workers=num_workers,
        options=ReadOptions(**options.reading),
    )
    faults = [fault for shard in found for fault in shard.faults]
    counts = sum((shard.counts for shard in found), Counter[str]())
    notes = [note for shard in found for note in shard.notes]
    totals = {
        "shards": len(found),
        "samples": sum(shard.samples for shard in found),
        "files": sum(shard.files for shard in found),
        "bytes": sum(shard.bytes or 0 for shard in found),
        "indexes": sum(shard.has_index for shard in found),
    }
    if options.json:
        print_json({**totals, "counts": counts, "faults": [each._asdict() for each in faults], "notes": notes})
    else:
        print_faults(faults, counts, show)
        for note in notes[: max(show, 1)]:
            sys.stdout.write(f"Note: {printable(note)}\n")
        if len(notes) > max(show, 1):
            sys.stdout.write(f"Note: ... and {len(notes) - max(show, 1):,} more\n")
        print_totals(found, totals, counts.total(), len({fault.shard for fault in faults}))
    if counts:
        raise SystemExit(FAULT_FOUND)


def print_faults(faults: Sequence[ShardFault], counts: Counter[str], shown: int) -> None:
    """Print the first faults of each kind."""
    for kind, count in sorted(counts.items()):
        of_kind = [fault for fault in faults if fault.kind == kind][:shown]
        sys.stdout.write(f"{kind} ({count:,}):\n")
        for fault in of_kind:
            sys.stdout.write(f"  {on_one_line(fault.message)}\n")
        if count > len(of_kind) and shown:
            sys.stdout.write(f"  ... and {count - len(of_kind):,} more\n")


def print_totals(found: Sequence[VerifiedShard], totals: dict[str, int], faults: int, bad: int) -> None:
    """Print what was checked and the number of faults."""
    size = size_of_shards(totals["bytes"], len(found), sum(shard.bytes is None for shard in found))
    sums = [*(plural(totals[f"{noun}s"], noun) for noun in ("shard", "sample", "file")), size]
    if totals["indexes"]:
        sums.append(f"{totals['indexes']:,} indexed")
    summary = f"{plural(faults, 'fault')} in {plural(bad, 'shard')}" if faults else "no faults"
    sys.stdout.write(f"{', '.join(sums)}: {summary}\n")
