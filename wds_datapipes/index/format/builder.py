"""Index construction: builds the index of a shard with the columns of users, and checks an index against its shard."""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, TypeAlias

import numpy as np

from wds_datapipes.arguments import check_choice, checks_calls
from wds_datapipes.errors import CorruptShardError, DuplicateKeyError, StaleSidecarError, plural
from wds_datapipes.index.format.options import IndexOptions
from wds_datapipes.index.format.origin import origin_of
from wds_datapipes.index.format.shard_index import COLUMNS, RULES, ShardFacts, ShardIndex, rule_name
from wds_datapipes.index.format.user_columns import Columns, add_columns, as_function
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.io.remote.remote_file import file_facts
from wds_datapipes.samples.grouping import OnRepeatedKey, SampleGrouping
from wds_datapipes.samples.keys import KeyRule
from wds_datapipes.shards.position import Progress
from wds_datapipes.tar.scanner import ShardScan
from wds_datapipes.types import MemberTuple, Shard

Depth: TypeAlias = Literal["size", "headers", "bytes"]
"""How much of a shard `check_index` reads."""


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
            short text, such as ``lambda sample: {"label": int(sample["cls"])}``; or a mapping from names to the places
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


@checks_calls
def check_index(
    index: ShardIndex,
    url: str | os.PathLike[str],
    *,
    depth: Depth = "size",
    key_rule: KeyRule | None = None,
    storage_options: Mapping[str, Any] | None = None,
    limits: ReadLimits = DEFAULT_LIMITS,
) -> None:
    """Raise an error unless an index matches the current state of a shard.

    Args:
        index: the index.
        url: the shard.
        depth: ``"size"`` compares the size of the shard and, where the index was built, its ETag or, if the index has
            columns of your own or was built by your own key rule, its modification time; ``"headers"`` reads all
            headers and compares the positions of all samples; ``"bytes"`` also compares the digest, if the index has
            one.
        key_rule: the rule with which the index was built, if it is not one of this package.
        storage_options: passed to a remote file system.
        limits: the limits for the shard, see `ReadLimits`.

    Raises:
        StaleSidecarError: the shard has changed.
        ShardError: the shard cannot be read.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "txt": "one"}])
        >>> index = build_index(url)
        >>> check_index(index, url, depth="headers")
        >>> _ = build_shard("a.tar", [{"__key__": "x", "txt": "other"}])
        >>> check_index(index, url, depth="headers")
        Traceback (most recent call last):
        wds_datapipes.errors.StaleSidecarError: a.tar has changed since its index was built: sample 0 ('x') ...
    """
    check_choice("depth", depth, Depth)
    path = os.fspath(url)
    if change := index.describe_change(
        origin_of(path, storage_options), file_facts(path, storage_options=storage_options)
    ):
        raise _stale(path, change)
    if depth == "size":
        return
    rule = key_rule or index.key_rule
    if rule is None:
        raise ValueError(f"The index was built with the rule {index.facts.key_rule}. Pass it as key_rule to check it")
    options = IndexOptions(
        key_rule=rule,
        lowercase=index.facts.lowercase,
        on_duplicate=index.facts.on_duplicate,  # type: ignore[arg-type]  # a recorded str
        digest=depth == "bytes" and index.facts.sha256 is not None,
        ignore_zeros=True,
        end_marker="optional",
        limits=limits,
    )
    reading: dict[str, Any] = {"on_repeated_key": "ignore", "storage_options": storage_options}
    try:
        now = build_index(path, options, **reading)
    except CorruptShardError:  # unless the index ends before data that belong to no archive
        now = build_index(path, replace(options, ignore_zeros=False, end_marker="final"), **reading)
        if not index.has_same_layout(now):
            raise
    if index.facts.bytes not in (None, now.facts.bytes):
        raise _stale(path, f"it has {now.facts.bytes} bytes, not {index.facts.bytes}")
    if not index.has_same_layout(now):
        raise _stale(path, _difference(index, now))
    if now.facts.sha256 is not None and now.facts.sha256 != index.facts.sha256:
        raise _stale(path, f"its SHA-256 is {now.facts.sha256}, not {index.facts.sha256}")


def _difference(then: ShardIndex, now: ShardIndex) -> str:
    """Describe the first difference between two indexes."""
    for number, (old, new) in enumerate(zip(then, now, strict=False)):
        if old != new:
            return f"sample {number} ({new.key!r}) is {new[1:]}, not {old.key!r}, {old[1:]}"
    return f"it has {plural(len(now), 'sample')} up to byte {now.end}, not {len(then):,} up to byte {then.end}"


def _stale(archive: str, found: str) -> StaleSidecarError:
    return StaleSidecarError(
        f"{redact(archive)} has changed since its index was built: {found}. Build the index again, or restore the shard"
    )
