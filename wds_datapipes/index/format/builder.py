"""Index construction: builds the index of a shard with the columns of users, and checks an index against its shard."""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from wds_datapipes.arguments import checks_calls
from wds_datapipes.errors import DuplicateKeyError
from wds_datapipes.index.format.index_columns import COLUMNS
from wds_datapipes.index.format.options import IndexOptions
from wds_datapipes.index.format.origin import origin_of
from wds_datapipes.index.format.shard_facts import RULES, ShardFacts, rule_name
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.index.format.user_columns import Columns, add_columns, as_function
from wds_datapipes.io.openers import redact
from wds_datapipes.samples.grouping import OnRepeatedKey, SampleGrouping
from wds_datapipes.shards.position import Progress
from wds_datapipes.tar.scanner import ShardScan
from wds_datapipes.types import MemberTuple, Shard

DEFAULT_OPTIONS = IndexOptions()
#: The keys of a sample that are not fields, at its beginning.
NO_FIELDS = ("__key__", "__url__", "__local_path__")


@checks_calls
def build_index(
    url: str | os.PathLike[str],
    options: IndexOptions = DEFAULT_OPTIONS,
    *,
    columns: Columns | None = None,
    fields: Collection[str] | None = None,
    on_repeated_key: OnRepeatedKey = "warn",
    storage_options: Mapping[str, Any] | None = None,
) -> ShardIndex:
    """Build the index of a shard.

    Only headers are read if the shard is local or its store supports range requests. A compressed
    shard is read completely; its index has the keys, sizes and counts, but does not allow reading samples in any order.

    Args:
        url: the shard, a path or a URL.
        options: how it is indexed.
        columns: a function from a sample, with its fields as bytes, to a mapping of names to numbers, Boolean values or
            short text, such as ``lambda sample: {"label": int(sample["cls"])}``; or a mapping from names to the paths
            of such values in fields, which are decoded as ``.wds_decode()`` does, such as ``{"label": "cls", "width":
            "json.size.0"}``. They are arrays in ``index.columns``.
        fields: the fields that this function needs, by default all. Other fields are not read.
        on_repeated_key: ``"warn"``, ``"raise"`` or ``"ignore"`` a key that recurs after other samples.
        storage_options: passed to a remote file system.

    Raises:
        ShardError: the shard cannot be read to its end, or exceeds its limits.
        SampleError: a field occurs twice, or a key recurs.
        StaleSidecarError: the shard has changed while it was read.
        UnsupportedSidecarError: columns of a compressed shard.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> index = build_index(build_shard("a.tar", [{"__key__": "x", "txt": "one"}]), IndexOptions(digest=True))
        >>> index[0], index.facts.bytes, len(index.facts.sha256)
        (IndexedSample(key='x', offset=0, end=1024, entries=(IndexEntry(field='txt', offset=512, size=3),)), 10240, 64)
    """
    path = os.fspath(url)
    scan = ShardScan(
        path,
        digest=options.digest,
        ignore_zeros=options.ignore_zeros,
        end_marker=options.end_marker,
        storage_options=storage_options,
        limits=options.limits,
    )
    index = index_scan(scan, options=options, on_repeated_key=on_repeated_key)
    if (compute := as_function(columns)) is None:
        return index
    return add_columns(index, path, compute, fields=fields, storage_options=storage_options, limits=options.limits)


def index_members(
    members: Iterable[MemberTuple],
    shard: Shard,
    options: IndexOptions = DEFAULT_OPTIONS,
    *,
    on_repeated_key: OnRepeatedKey = "warn",
    on_fault: Callable[[DuplicateKeyError, str, str], object] | None = None,
) -> ShardIndex:
    """Return the index of the files of a shard, without any facts except the rules.

    Args:
        members: the files as `ShardScan` yields them.
        shard: the shard, which ends at the end of its files. If it is not complete after the last file, the last sample
            is left out, because it may lack a field.
        options: the rules for keys and fields.
        on_repeated_key: what to do if a key recurs after other samples.
        on_fault: called with each error, the key and the field, or "", instead of raising the error. Of several members
            of the same field, the first counts then.

    Raises:
        DuplicateKeyError: a sample has a field twice or a key recurs, and the options forbid it.

    Examples:
        >>> members = [("a.tar", "a.txt", ("a.txt", 512, 3), 0), ("a.tar", "a.cls", ("a.cls", 1536, 1), 1024)]
        >>> index_members(members, Shard("a.tar", end=2048, is_complete=True))[0].entries
        (IndexEntry(field='txt', offset=512, size=3), IndexEntry(field='cls', offset=1536, size=1))
    """
    shard.local_path = ""  # so that a field named __local_path__ is left out of every shard
    grouping = SampleGrouping(
        key_rule=options.key_rule,
        lowercase=options.lowercase,
        on_duplicate=options.on_duplicate,
        on_repeated_key=on_repeated_key,
        on_fault=on_fault,
        remembered_keys=sys.maxsize,  # the index contains all keys anyway, and each repeated one is reported
    )
    progress, end = Progress(), 0
    offsets, counts, key_ends, keys = array("q"), array("q", [0]), array("q"), bytearray()
    member_offsets, member_sizes, member_fields = array("q"), array("q"), array("I")
    numbers: dict[str, int] = {}  # the fields as written in member names
    rule = rule_name(options.key_rule)
    for sample in grouping.group([(shard, iter(members))], progress):
        key = sample["__key__"]
        _, start, end = progress.last
        for name, offset, size in islice(sample.values(), len(NO_FIELDS), None):
            raw = name[len(key) + 1 :] if rule in RULES else (options.key_rule(name) or ("", ""))[1]
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
        ShardFacts(key_rule=rule, lowercase=options.lowercase, on_duplicate=options.on_duplicate),
        {name: np.array(columns[name], kind) for name, kind in COLUMNS.items()},
        name=f"The index of {redact(shard.url)}",
    )


def index_scan(scan: ShardScan, members: Generator[MemberTuple, None, None] | None = None, **rules: Any) -> ShardIndex:
    """Return the index of a shard from its headers.

    Args:
        scan: reads the headers.
        members: the files that the scan yields, by default all of them.
        rules: the arguments of `index_members`.
    """
    with closing(members or iter(scan)) as found:
        index = index_members(found, scan.shard, **rules)
    index.facts = replace(index.facts, **scan.facts)
    if (index.facts.mtime_ns, index.facts.etag) != (None, None):
        index.facts = replace(index.facts, origin=origin_of(scan.shard.url, scan.storage_options))
    return index
