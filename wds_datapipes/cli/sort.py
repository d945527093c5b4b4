"""The command ``sort``: all samples of a dataset in the order of their keys, or of something else that they hold."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from wds_datapipes.cli._app import WrongUse
from wds_datapipes.cli._copy import Compression, MaxCount, MaxSize, RemoveOld, SkipBad, WithIndex
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
from wds_datapipes.cli._reorder import Memory, Rekey, Temporary, reorder
from wds_datapipes.prepare.reorder.sort_key import FieldSortKey

__all__ = ["sort"]


class WithoutValueWord(str, Enum):
    """What becomes of a sample that has nothing to be sorted by."""

    fault = "raise"
    first = "first"
    last = "last"


def sort(
    shards: Shards,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="TARGET",
            help="Where samples go: shards with a place for their numbers, or one archive, as for cat.",
        ),
    ] = "sort-%06d.tar",
    by: Annotated[
        str,
        typer.Option(
            metavar="FIELD", help="A field, key for the key, or a value within JSON, such as json/size/width."
        ),
    ] = "key",
    numeric: Annotated[
        bool, typer.Option("--numeric", "-n", help="Read text as numbers; numbers in JSON are numbers anyway.")
    ] = False,
    reverse: Annotated[
        bool, typer.Option("--reverse", help="The largest first; what is equal keeps its order.")
    ] = False,
    missing: Annotated[
        WithoutValueWord, typer.Option(help="What becomes of a sample that has nothing to be sorted by.")
    ] = WithoutValueWord.fault,
    rekey: Rekey = "",
    maxcount: MaxCount = 100_000,
    maxsize: MaxSize = "3GB",
    compress: Compression = None,
    index: WithIndex = False,
    remove_old: RemoveOld = False,
    memory: Memory = "1GB",
    tmp: Temporary = None,
    skip_bad: SkipBad = False,
    as_json: AsJson = False,
    key_rule: KeyRuleOption = KeyRuleWord.first_dot,
    end_marker: EndMarkerOption = Presence.required,
    storage_options: StorageOptions = "",
    timeout: Timeout = None,
    retries: Retries = None,
    limits: Limits = None,
) -> None:
    """Sort all samples of a dataset, of any size, by their keys or by what a field holds.

    All shards are read first, and what memory does not hold waits in a temporary file. Samples that are equal stay in
    their order. Text is compared by its code points. Data are copied as they are.
    """
    options, rule = options_of(storage_options, timeout, retries), key_rule_of(key_rule)
    size, memory_bytes = parse_bytes(maxsize, "--maxsize"), parse_bytes(memory, "--memory")
    try:
        order = FieldSortKey(by, numeric=numeric, missing=missing.value, reverse=reverse)
    except ValueError as error:
        raise WrongUse(f"--by: {error}") from None
    reorder(
        list_shards(shards, options),
        order,
        output,
        reverse=reverse,
        excerpt={
            "rekey": rekey,
            "key_rule": rule,
            "end_marker": end_marker.value,
            "storage_options": options,
            "limits": limits_of(limits),
        },
        memory_bytes=max(int(memory_bytes), 1),
        tmp=tmp,
        compress=compress,  # type: ignore[arg-type]  # a wrong word is told by what writes
        skip_bad=skip_bad,
        as_json=as_json,
        maxcount=maxcount,
        maxsize=size,
        index=index,
        remove_old=remove_old,
    )
