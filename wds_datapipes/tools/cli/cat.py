"""The command ``cat``: copy samples, or some of them, in order."""

from __future__ import annotations

import re
from typing import Annotated, Any

from cyclopts import Group, Parameter

from wds_datapipes.samples.fields import Lacking
from wds_datapipes.tools.cli.copying import copy_samples, open_output, report_copied
from wds_datapipes.tools.cli.errors import WrongUse
from wds_datapipes.tools.cli.options.read import Shards
from wds_datapipes.tools.cli.options.values import FileOrUrl, metavar, parse_pairs, wrong_use
from wds_datapipes.tools.cli.options.write import COPY, CopyArguments, Rekey
from wds_datapipes.tools.prepare.subset import Subset

SELECTION, OUTPUT = Group("Selection", sort_key=1), Group("Output", sort_key=2)


def cat(
    *shards: Shards,
    select: Annotated[list[str] | None, metavar("FIELD", group=SELECTION)] = None,
    missing: Annotated[Lacking, Parameter(group=SELECTION)] = "raise",
    slice_: Annotated[str, metavar("START:STOP[:STEP]", group=SELECTION)] = "",
    output: Annotated[FileOrUrl, metavar("TARGET", alias="-o", group=OUTPUT)] = "-",
    rename: Annotated[list[str] | None, metavar("NEW=OLD", alias="-r", group=OUTPUT)] = None,
    rekey: Rekey = "",
    options: CopyArguments = COPY,
) -> None:
    """Copy samples in order to an archive, numbered shards or a pipe.

    The data of fields are copied unchanged. --slice is applied first, then --select, --rename and --rekey.
    Field names become lower case, and files that belong to no sample are dropped. The output appears under its name
    when it is complete and may be one of the inputs.

    Args:
        select: Copy only matching fields, such as 'jpg;png'; may be repeated.
        missing: How to handle a sample without a selected field.
        slice_: Copy only samples at these positions, counted from 0.
        output: A file, a URL, 'pipe:COMMAND', or - for standard output; with %06d in its name, numbered
            shards.
        rename: Rename a field, which replaces one with the new name; may be repeated.
    """
    new_names = "--rename must be NEW=OLD, with each NEW once and in lower case, as in 'png=image.png'"
    taken: dict[str, Any] = {
        "positions": parse_slice_text(slice_),
        "select": select or (),
        "missing": missing,
        "rename": parse_pairs(rename or (), "[^=/A-Z]+", new_names),
        "rekey": rekey,
    }
    with wrong_use():
        Subset(**taken)  # rejects invalid options before anything is opened
    if missing != "raise" and not select:
        raise WrongUse("--missing requires --select, whose fields a sample may lack")
    urls = options.list_shards(shards)
    writer = open_output(output, urls, options)
    faults = copy_samples(urls, [writer], lambda _: writer, options, "Copying", shown=output != "-", **taken)
    report_copied([writer], urls, faults, options, shown=output != "-")


def parse_slice_text(text: str) -> tuple[int | None, ...]:
    """Return the start, stop and step of a slice.

    >>> parse_slice_text("10:20"), parse_slice_text(":100:2"), parse_slice_text("5:")
    ((10, 20), (None, 100, 2), (5, None))
    """
    if text and not re.fullmatch(r"\d*:\d*(:(0*[1-9]\d*)?)?", text):
        raise WrongUse(f"--slice must be START:STOP or START:STOP:STEP, counted from 0, as in 10:20, not {text!r}")
    return tuple(int(word) if word else None for word in text.split(":")) if text else ()
