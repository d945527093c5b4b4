"""The command ``cat``: copy samples of shards to an archive, to shards or to a pipe."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from wds_datapipes.cli._app import WrongUse
from wds_datapipes.cli._copy import (
    CopyOptions,
    Output,
    check_outputs,
    copy_samples,
    make_subset,
    parse_slice_text,
    report,
)
from wds_datapipes.cli._options import Shards

__all__ = ["cat"]

#: The help panels of options.
SELECTION, OUTPUT = {"rich_help_panel": "Selection"}, {"rich_help_panel": "Output"}


class MissingField(str, Enum):
    """How to handle a sample without a selected field."""

    fault = "raise"
    keep = "keep"
    skip = "skip"


def cat(
    shards: Shards,
    options: CopyOptions,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="TARGET",
            help="A file, a URL, 'pipe:COMMAND', or - for standard output; with %06d in its name, numbered shards.",
            **OUTPUT,
        ),
    ] = "-",
    select: Annotated[
        list[str] | None,
        typer.Option(
            "--select",
            metavar="FIELD",
            help="Copy only matching fields, such as 'jpg;png'; may be repeated.",
            **SELECTION,
        ),
    ] = None,
    missing: Annotated[
        MissingField, typer.Option(help="How to handle a sample without a selected field.", **SELECTION)
    ] = MissingField.fault,
    positions: Annotated[
        str,
        typer.Option(
            "--slice",
            metavar="START:STOP[:STEP]",
            help="Copy only samples at these positions, counted from 0.",
            **SELECTION,
        ),
    ] = "",
    share: Annotated[
        float,
        typer.Option(
            "--sample", min=0, max=1, metavar="SHARE", help="Copy each sample with this probability.", **SELECTION
        ),
    ] = 1.0,
    seed: Annotated[int, typer.Option(metavar="NUMBER", help="The seed for --sample.", **SELECTION)] = 0,
    rename: Annotated[
        list[str] | None,
        typer.Option("--rename", "-r", metavar="NEW=OLD", help="Rename a field; may be repeated.", **OUTPUT),
    ] = None,
    rekey: Annotated[
        str,
        typer.Option(
            metavar="PATTERN",
            help="A pattern for new keys with {number}, {key}, {name} and {shard}, such as '{number:08d}'.",
            **OUTPUT,
        ),
    ] = "",
) -> None:
    """Copy samples of shards, in order, to an archive, to numbered shards or to a pipe.

    The data of fields are copied unchanged. --slice is applied first, then --sample, --select, --rename and --rekey.
    Field names become lower case, and files that belong to no sample are dropped. The output appears under its name
    when it is complete, and may be one of the inputs.
    """
    taken = {
        "positions": parse_slice_text(positions),
        "share": share,
        "seed": seed,
        "select": select or (),
        "missing": missing.value,
        "rename": parse_renames(rename or []),
        "rekey": rekey,
    }
    make_subset(**taken)  # rejects invalid options before anything is opened
    urls = options.list_shards(shards)
    out = Output(output, urls, options)
    faults = copy_samples(urls, [out], lambda _: out, options, label="Copying", shown=output != "-", **taken)
    report(out.shards if output != "-" else [], faults, as_json=options.as_json)
    check_outputs([out], urls)


def parse_renames(pairs: list[str]) -> dict[str, str]:
    """Parse --rename into a mapping of new field names to old ones."""
    names: dict[str, str] = {}
    for pair in pairs:
        new, _, old = pair.partition("=")
        if not new or not old or new in names or new != new.lower() or "/" in new:
            raise WrongUse(
                f"--rename must be NEW=OLD, with each NEW once and in lower case, as in 'png=image.png', not {pair!r}"
            )
        names[new] = old
    return names
