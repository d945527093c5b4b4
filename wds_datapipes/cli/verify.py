"""The command ``verify``: what is wrong with shards."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from wds_datapipes.cli._app import FAULT_FOUND, WrongUse, on_one_line, printable
from wds_datapipes.cli._meter import ProgressMeter, human_bytes, plural
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
from wds_datapipes.index.manifest import read_manifest
from wds_datapipes.prepare.shard_contents import ShardFault
from wds_datapipes.prepare.verify import Checks, VerifiedShard, common_keys, verify_shards

__all__ = ["verify"]


def verify(
    shards: Shards,
    decode: Annotated[bool, typer.Option("--decode", help="Decode every field, images to their last pixel.")] = False,
    digest: Annotated[
        bool, typer.Option("--digest", help="Form the SHA-256 of shards, and compare it with indexes and the manifest.")
    ] = False,
    fields: Annotated[
        list[str] | None,
        typer.Option("--field", "-f", metavar="FIELD", help="What every sample has, such as 'jpg;png'; repeat it."),
    ] = None,
    manifest: Annotated[
        str | None, typer.Option(metavar="FILE", help="What the shards have to be.", show_default=False)
    ] = None,
    index: Annotated[bool, typer.Option(help="Check the index beside a shard, if there is one.")] = True,
    shared_keys: Annotated[bool, typer.Option("--shared-keys", help="A key may be in several shards.")] = False,
    shown: Annotated[int, typer.Option("--show", min=0, help="How many faults of each kind to show.")] = 10,
    workers: Workers = None,
    as_json: AsJson = False,
    key_rule: KeyRuleOption = KeyRuleWord.first_dot,
    end_marker: EndMarkerOption = Presence.required,
    storage_options: StorageOptions = "",
    timeout: Timeout = None,
    retries: Retries = None,
    limits: Limits = None,
) -> None:
    """Look for all that is wrong with shards; the exit code is 1 if anything is.

    Headers and their checksums, the end marker, samples in parts, fields that occur twice, keys that several shards
    hold, and indexes that tell something else. Compressed shards are read as a whole, others by their headers, unless
    --decode or --digest reads all.
    """
    options = options_of(storage_options, timeout, retries)
    entries = None if manifest is None else read_manifest(manifest, storage_options=options).entries
    checks = Checks(
        decode=decode,
        digest=digest,
        fields=fields or (),
        index=index,
        manifest=None if entries is None else {entry.url: entry for entry in entries},
        key_rule=key_rule_of(key_rule),
        end_marker=end_marker.value,
        storage_options=options,
        limits=limits_of(limits),
    )
    urls = list_shards(shards, options)
    if decode and "-" in urls:
        raise WrongUse("--decode reads a shard twice, which standard input cannot be. Write it to a file first")
    with ProgressMeter("Verifying", len(urls)) as meter:
        found = verify_shards(
            urls,
            checks,
            max_workers=workers,
            on_result=lambda shard: meter.add(shards=1, samples=shard.samples, size=shard.bytes or 0),
        )
    counts = sum((shard.counts for shard in found), Counter[str]())
    faults = [fault for shard in found for fault in shard.faults]
    if not shared_keys:
        common = list(common_keys(found))
        faults += common
        counts += Counter(fault.kind for fault in common)
    if as_json:
        sys.stdout.write(json.dumps(facts_of(found, faults, counts), indent=1) + "\n")
    else:
        print_report(found, faults, counts, shown)
    if counts:
        raise typer.Exit(FAULT_FOUND)


def facts_of(found: Sequence[VerifiedShard], faults: Sequence[ShardFault], counts: Counter[str]) -> dict[str, Any]:
    """Return all facts for JSON."""
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
    """Print faults by their kind, then notes, then the sums."""
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
    size = human_bytes(sum(shard.bytes or 0 for shard in found))
    sums = f"{plural(len(found), 'shard')}, {plural(samples, 'sample')}, {plural(files, 'file')}, {size}"
    indexed = sum(shard.has_index for shard in found)
    if indexed:
        sums += f", {indexed:,} indexed"
    bad = len({fault.shard for fault in faults})
    total = counts.total()
    told = f"{plural(total, 'fault')} in {plural(bad, 'shard')}" if total else "no fault"
    sys.stdout.write(f"{sums}: {told}\n")
