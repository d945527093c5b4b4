"""The command ``ls``: the samples of shards, their fields and sizes."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Annotated, Any

import typer

from wds_datapipes.cli._app import FAULT_FOUND, WRONG_USE, on_one_line, printable, say_nothing_found
from wds_datapipes.cli._meter import plural
from wds_datapipes.cli._options import (
    EndMarkerOption,
    KeyRuleOption,
    KeyRuleWord,
    Presence,
    Retries,
    Shards,
    StorageOptions,
    Timeout,
    key_rule_of,
    list_shards,
    options_of,
)
from wds_datapipes.io.openers import redact
from wds_datapipes.prepare.shard_contents import ListedSample, ShardContents, outline_shard

__all__ = ["ls"]


def ls(
    shards: Shards,
    by_shard: Annotated[bool, typer.Option("--shards", "-s", help="One line for each shard.")] = False,
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=1, help="At most so many samples of each shard.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each line.")] = False,
    key_rule: KeyRuleOption = KeyRuleWord.first_dot,
    end_marker: EndMarkerOption = Presence.required,
    storage_options: StorageOptions = "",
    timeout: Timeout = None,
    retries: Retries = None,
) -> None:
    """List the samples of shards: the key, the size of all fields, and each field with its size in bytes.

    Only headers are read, where the shard can be read by ranges. Of a shard that breaks off, the samples before are
    listed; then comes the error, and the exit code is 1.
    """
    options = options_of(storage_options, timeout, retries)
    urls = list_shards(shards, options)
    rule, worst, samples = key_rule_of(key_rule), 0, 0
    for number, url in enumerate(urls):
        outline = outline_shard(url, key_rule=rule, end_marker=end_marker.value, storage_options=options)
        samples += len(outline.samples)
        if as_json:
            print_facts(outline, by_shard, count)
        elif by_shard:
            sys.stdout.write(f"{shard_line(outline)}\n")
        else:
            if len(urls) > 1:
                sys.stdout.write(f"{'' if number == 0 else chr(10)}{printable(redact(url))}:\n")
            print_samples(outline.samples[:count])
        for fault in outline.faults:
            sys.stdout.flush()
            typer.echo(f"Error: {on_one_line(fault.message)}", err=True)
            worst = max(worst, FAULT_FOUND if fault.kind != "ShardOpenError" else WRONG_USE)
    if not samples and not worst and not by_shard:
        say_nothing_found(len(urls))
    if worst:
        raise typer.Exit(worst)


def print_samples(samples: list[ListedSample]) -> None:
    """Print a line for each sample, with the keys and the sums in columns."""
    if not samples:
        return
    keys = [printable(sample.key) for sample in samples]
    wide, sums = max(map(len, keys)), max(len(str(sample.bytes)) for sample in samples)
    for key, sample in zip(keys, samples, strict=True):
        fields = "  ".join(f"{printable(field)} {size}" for field, size in sample.fields.items())
        sys.stdout.write(f"{key:{wide}}  {sample.bytes:{sums}}  {fields}\n")


def shard_line(outline: ShardContents) -> str:
    """Tell of a shard in a line."""
    fields = Counter(field for sample in outline.samples for field in sample.fields)
    count = len(outline.samples)
    told = ", ".join(
        printable(field) if times == count else f"{printable(field)} (of {times:,})" for field, times in fields.items()
    )
    size = "broken" if outline.bytes is None else f"{outline.bytes:,} bytes"
    return f"{printable(redact(outline.url))}: {plural(count, 'sample')}, {size}: {told or 'no fields'}"


def print_facts(outline: ShardContents, by_shard: bool, count: int | None) -> None:
    """Print JSON: a line for the shard, or one for each sample."""
    facts: dict[str, Any] = {"shard": redact(outline.url)}
    if by_shard:
        fields = Counter(field for sample in outline.samples for field in sample.fields)
        facts |= {"samples": len(outline.samples), "bytes": outline.bytes, "compression": outline.compression}
        sys.stdout.write(json.dumps({**facts, "fields": fields, "strays": outline.strays}) + "\n")
        return
    for sample in outline.samples[:count]:
        sys.stdout.write(json.dumps({**facts, "key": sample.key, "offset": sample.offset, "fields": sample.fields}))
        sys.stdout.write("\n")
