"""The command ``sort``: sort all samples of a dataset by key or by the value of a field."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from wds_datapipes.cli._app import WrongUse
from wds_datapipes.cli._copy import CopyOptions, Rekey
from wds_datapipes.cli._options import Shards
from wds_datapipes.cli.shuffle import reorder
from wds_datapipes.prepare.sort_key import FieldSortKey

__all__ = ["sort"]


class WithoutValueWord(str, Enum):
    """How to sort a sample without the value."""

    fault = "raise"
    first = "first"
    last = "last"


def sort(
    shards: Shards,
    options: CopyOptions,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="TARGET",
            help="The output: shards with a placeholder for the number, or one archive, as for cat.",
        ),
    ] = "sort-%06d.tar",
    by: Annotated[
        str,
        typer.Option(
            metavar="FIELD", help="A field, key for the key, or a value inside JSON, such as json/size/width."
        ),
    ] = "key",
    numeric: Annotated[
        bool, typer.Option("--numeric", help="Compare text as numbers; JSON numbers always are.")
    ] = False,
    reverse: Annotated[bool, typer.Option("--reverse", help="Sort in descending order, stably.")] = False,
    missing: Annotated[
        WithoutValueWord, typer.Option(help="How to sort a sample without the value.")
    ] = WithoutValueWord.fault,
    rekey: Rekey = "",
) -> None:
    """Sort all samples of a dataset by key or by the value of a field.

    Keeps the offsets of all samples in memory, and reads each sample by its offset, so shards must be uncompressed and
    support random access. The sort is stable, text is compared by code points, and data are copied unchanged.
    """
    try:
        key = FieldSortKey(by, numeric=numeric, missing=missing.value, reverse=reverse)
    except ValueError as error:
        raise WrongUse(f"--by: {error}") from None
    reorder(shards, lambda entries: entries.sort(key), output, rekey, options)
