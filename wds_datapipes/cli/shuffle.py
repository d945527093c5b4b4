"""The command ``shuffle``: all samples of a dataset in an order that is drawn."""

from __future__ import annotations

from typing import Annotated

import typer

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
from wds_datapipes.prepare.reorder.sort_key import RandomSortKey

__all__ = ["shuffle"]


def shuffle(
    shards: Shards,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="TARGET",
            help="Where samples go: shards with a place for their numbers, or one archive, as for cat.",
        ),
    ] = "shuffle-%06d.tar",
    seed: Annotated[int, typer.Option(help="Another one gives another order.")] = 0,
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
    """Shuffle all samples of a dataset, of any size, so that every order is as likely as any other.

    All shards are read first, and what memory does not hold waits in a temporary file. The order follows from the seed
    and the order of the samples in the input, and from nothing else. Data are copied as they are.
    """
    options, rule = options_of(storage_options, timeout, retries), key_rule_of(key_rule)
    size, memory_bytes = parse_bytes(maxsize, "--maxsize"), parse_bytes(memory, "--memory")
    reorder(
        list_shards(shards, options),
        RandomSortKey(seed),
        output,
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
