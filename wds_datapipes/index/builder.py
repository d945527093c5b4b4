"""Index builder: turns the files of a shard into index entries, by the rules of `group_samples`."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from wds_datapipes.errors import DuplicateKeyError
from wds_datapipes.index.shard_columns import COLUMNS
from wds_datapipes.index.shard_index import RULES, ShardFacts, ShardIndex, rule_name
from wds_datapipes.io.openers import redact
from wds_datapipes.samples.grouping import OnDuplicate, OnRepeatedKey, SampleGrouping
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.shards.position import Progress
from wds_datapipes.tar.scanner import ShardScan
from wds_datapipes.types import MemberTuple, Shard

#: The keys of a sample that are not fields, at its beginning.
NO_FIELDS = ("__key__", "__url__", "__local_path__")


def index_members(
    members: Iterable[MemberTuple],
    shard: Shard,
    *,
    key_rule: KeyRule = first_dot,
    lowercase: bool = True,
    on_duplicate: OnDuplicate = "raise",
    on_repeated_key: OnRepeatedKey = "warn",
    on_fault: Callable[[DuplicateKeyError, str, str], object] | None = None,
) -> ShardIndex:
    """Return the index of the files of a shard, without facts about it but for the rules.

    Args:
        members: the files as `ShardScan` yields them.
        shard: the shard, which ends at the end of its files. If it is not complete after the last one, the last sample
            is left out, since it may lack a field.
        key_rule: splits member names.
        lowercase: convert field names to lower case.
        on_duplicate: what to do if a field occurs twice in a sample.
        on_repeated_key: what to do if a key recurs after other samples.
        on_fault: called with each error, the key and the field, or "", instead of raising the error. Of several members
            of the same field, the first counts then.

    Raises:
        DuplicateKeyError: a sample has a field twice, or a key recurs, and the options forbid it.

    Examples:
        >>> members = [("a.tar", "a.txt", ("a.txt", 512, 3), 0), ("a.tar", "a.cls", ("a.cls", 1536, 1), 1024)]
        >>> index_members(members, Shard("a.tar", end=2048, is_complete=True))[0].entries
        (IndexEntry(field='txt', offset=512, size=3), IndexEntry(field='cls', offset=1536, size=1))
    """
    shard.local_path = ""  # so that a field of the name __local_path__ is left out for every shard
    grouping = SampleGrouping(
        key_rule=key_rule,
        fields=None,
        lowercase=lowercase,
        on_duplicate=on_duplicate,
        on_repeated_key=on_repeated_key,
        on_error="raise",
        on_fault=on_fault,
        remembered_keys=sys.maxsize,  # the index holds all keys anyway, and every repeated one is reported
    )
    progress, end = Progress(), 0
    offsets, counts, key_ends, keys = array("q"), array("q", [0]), array("q"), bytearray()
    member_offsets, member_sizes, member_fields = array("q"), array("q"), array("I")
    numbers: dict[str, int] = {}  # of fields as written in member names
    is_plain = rule_name(key_rule) in RULES
    for sample in grouping.group([(shard, iter(members))], progress):
        key = sample["__key__"]
        _, start, end = progress.last
        for name, offset, size in islice(sample.values(), len(NO_FIELDS), None):
            raw = name[len(key) + 1 :] if is_plain else (key_rule(name) or ("", ""))[1]
            member_fields.append(numbers.setdefault(raw, len(numbers)))
            member_offsets.append(offset)
            member_sizes.append(size)
        offsets.append(start)
        counts.append(len(member_offsets))
        keys += key.encode("utf-8", "surrogateescape")
        key_ends.append(len(keys))
    fields = [field.encode("utf-8", "surrogateescape") for field in numbers]
    columns = {
        "sample_offsets": [*offsets, shard.end if shard.is_complete else end],
        "sample_members": counts,
        "member_offsets": member_offsets,
        "member_sizes": member_sizes,
        "member_fields": member_fields,
        "key_ends": key_ends,
        "key_text": np.frombuffer(bytes(keys), np.uint8),
        "field_ends": np.cumsum([len(field) for field in fields]),
        "field_text": np.frombuffer(b"".join(fields), np.uint8),
    }
    return ShardIndex(
        ShardFacts(key_rule=rule_name(key_rule), lowercase=lowercase, on_duplicate=on_duplicate),
        {name: np.array(columns[name], kind) for name, kind in COLUMNS.items()},
        name=f"The index of {redact(shard.url)}",
    )


def index_scan(scan: ShardScan, members: Generator[MemberTuple, None, None] | None = None, **rules: Any) -> ShardIndex:
    """Return the index of a shard from its headers.

    Args:
        scan: reads the headers.
        members: the files that the scan yields, by default all of them.
        rules: those of `index_members`.
    """
    with closing(members or iter(scan)) as found:
        index = index_members(found, scan.shard, **rules)
    index.facts = replace(index.facts, **scan.facts)
    return index
