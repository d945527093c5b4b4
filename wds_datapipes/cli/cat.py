"""The command ``cat``: samples of shards to one archive, to shards or to a pipe."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from wds_datapipes.cli._app import WrongUse
from wds_datapipes.cli._copy import (
    Compression,
    MaxCount,
    MaxSize,
    Output,
    RemoveOld,
    SkipBad,
    WithIndex,
    check_outputs,
    copy_samples,
    parse_slice_text,
    report,
)
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
    key_rule_of,
    limits_of,
    list_shards,
    options_of,
    parse_bytes,
)
from wds_datapipes.prepare.subset import Subset

__all__ = ["cat"]

#: The headings of options.
TAKEN, WRITTEN = {"rich_help_panel": "What is taken"}, {"rich_help_panel": "What is written"}


class MissingWord(str, Enum):
    """What becomes of a sample without a selected field."""

    fault = "raise"
    keep = "keep"
    skip = "skip"


def cat(
    shards: Shards,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="TARGET",
            help="A file, a URL, 'pipe:COMMAND', or - for standard output; with %06d in its name, numbered shards.",
            **WRITTEN,
        ),
    ] = "-",
    select: Annotated[
        list[str] | None,
        typer.Option(
            "--select", "-f", metavar="FIELD", help="Only fields like this, such as 'jpg;png'; repeat it.", **TAKEN
        ),
    ] = None,
    missing: Annotated[
        MissingWord, typer.Option(help="What becomes of a sample without a selected field.", **TAKEN)
    ] = MissingWord.fault,
    positions: Annotated[
        str,
        typer.Option("--slice", metavar="START:STOP[:STEP]", help="Only samples at these positions, from 0.", **TAKEN),
    ] = "",
    share: Annotated[
        float, typer.Option("--sample", min=0, max=1, help="Take each sample with this probability.", **TAKEN)
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed draws the same samples.", **TAKEN)] = 0,
    rename: Annotated[
        list[str] | None,
        typer.Option("--rename", "-r", metavar="NEW=OLD", help="Give a field another name; repeat it.", **WRITTEN),
    ] = None,
    rekey: Annotated[
        str,
        typer.Option(
            metavar="PATTERN",
            help="New keys, of {number}, {key}, {name} and {shard}, such as '{number:08d}'.",
            **WRITTEN,
        ),
    ] = "",
    maxcount: MaxCount = 100_000,
    maxsize: MaxSize = "3GB",
    compress: Compression = None,
    index: WithIndex = False,
    remove_old: RemoveOld = False,
    skip_bad: SkipBad = False,
    as_json: AsJson = False,
    key_rule: KeyRuleOption = KeyRuleWord.first_dot,
    end_marker: EndMarkerOption = Presence.required,
    storage_options: StorageOptions = "",
    timeout: Timeout = None,
    retries: Retries = None,
    limits: Limits = None,
) -> None:
    """Copy samples of shards, one shard after the other, to an archive, to numbered shards or to a pipe.

    The data of fields are copied as they are. Samples are taken by --slice, then by --sample; then their fields are
    selected, renamed, and keys made anew. Names of fields become lower case, and files that belong to no sample are
    left out. The output appears under its name when it is whole, and may be one of the inputs.
    """
    if as_json and output == "-":
        raise WrongUse("--json and the archive cannot both go to standard output. Name a file with --output")
    options, rule, bounds = options_of(storage_options, timeout, retries), key_rule_of(key_rule), limits_of(limits)
    size = parse_bytes(maxsize, "--maxsize")
    names = new_names(rename or [])
    slice_positions = parse_slice_text(positions)

    def make(on_error: object) -> Subset:
        return Subset(
            positions=slice_positions,
            share=share,
            seed=seed,
            select=select or (),
            missing=missing.value,
            rename=names,
            rekey=rekey,
            key_rule=rule,
            end_marker=end_marker.value,
            on_error=on_error,  # type: ignore[arg-type]  # a word or a function
            storage_options=options,
            limits=bounds,
        )

    try:
        make("raise")
    except ValueError as error:
        raise WrongUse(str(error)) from None
    urls = list_shards(shards, options)
    out = Output(
        output,
        maxcount=maxcount,
        maxsize=size,
        remove_old=remove_old,
        urls=urls,
        compress=compress,
        index=index,
        key_rule=rule,
        storage_options=options,
    )
    faults = copy_samples(make, urls, [out], lambda _: out, skip_bad=skip_bad, label="Copying", shown=output != "-")
    report(out.shards if output != "-" else [], faults, as_json=as_json)
    check_outputs([out], urls)


def new_names(pairs: list[str]) -> dict[str, str]:
    """Return new names of fields to old ones."""
    names: dict[str, str] = {}
    for pair in pairs:
        new, _, old = pair.partition("=")
        if not new or not old or new in names or new != new.lower() or "/" in new:
            raise WrongUse(f"--rename is NEW=OLD, each NEW once and in lower case, as in 'png=image.png', not {pair!r}")
        names[new] = old
    return names
