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
import numpy.typing as npt

from wds_datapipes.arguments import check_choice, checks_calls
from wds_datapipes.errors import DuplicateKeyError, StaleSidecarError, plural
from wds_datapipes.fingerprint import fingerprint
from wds_datapipes.index.options import IndexOptions
from wds_datapipes.index.origin import origin_of
from wds_datapipes.index.reading.sample_reader import SampleReader, ShardRanges
from wds_datapipes.index.shard_index import COLUMNS, MAX_VALUE_BYTES, RULES, ShardFacts, ShardIndex, rule_name
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.io.remote.remote_file import file_facts
from wds_datapipes.on_error.policy import note
from wds_datapipes.samples.fields import describe_sample
from wds_datapipes.samples.grouping import OnRepeatedKey, SampleGrouping
from wds_datapipes.samples.keys import KeyRule
from wds_datapipes.shards.position import Progress
from wds_datapipes.tar.scanner import ShardScan
from wds_datapipes.types import MemberTuple, Sample, Shard

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
    columns: ComputeColumns | None = None,
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
            short text, such as ``lambda sample: {"label": int(sample["cls"])}``. They are arrays in ``index.columns``.
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
    if columns is not None and not callable(columns):
        raise TypeError(f"columns must be a function of a sample that returns a mapping, not {columns!r:.200}")
    scan = ShardScan(
        path,
        digest=options.digest,
        ignore_zeros=options.ignore_zeros,
        end_marker=options.end_marker,
        storage_options=storage_options,
        limits=options.limits,
    )
    index = index_scan(scan, options=options, on_repeated_key=on_repeated_key)
    if columns is None:
        return index
    return add_columns(index, path, columns, fields=fields, storage_options=storage_options, limits=options.limits)


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
    now = build_index(path, options, on_repeated_key="ignore", storage_options=storage_options)
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


Value: TypeAlias = "bool | int | float | str"
ComputeColumns: TypeAlias = Callable[[Sample], Mapping[str, Value]]
"""A function from a sample, with its fields as bytes, to a value for each column."""


def add_columns(
    index: ShardIndex,
    url: str,
    compute: ComputeColumns,
    *,
    fields: Collection[str] | None,
    storage_options: Mapping[str, Any] | None = None,
    limits: ReadLimits = DEFAULT_LIMITS,
) -> ShardIndex:
    """Return an index with columns that a function computes from the samples.

    Raises:
        UnsupportedSidecarError: the shard is compressed.
        ShardError: the shard cannot be read.
        TypeError: the function returns anything other than a mapping from names to values of one type.
        ValueError: it returns different names for different samples, or a name or a value that cannot be stored.
    """
    index.check_random_access()
    reader = SampleReader(ShardRanges(url, index, storage_options), limits=limits)
    found: dict[str, list[Value]] = {}
    try:
        for sample in reader.stream(np.arange(len(index)), fields):
            try:
                values = compute(sample)
            except Exception as error:
                note(error, f"raised in the function for columns, for {describe_sample(sample)}")
                raise
            _check_names(values, found, sample)
            for name, value in values.items():
                found.setdefault(name, []).append(value)
    finally:
        reader.close()
    columns = {name: _column(name, values, redact(url)) for name, values in found.items()}
    layout = {name: index.columns[name] for name in COLUMNS}
    by = columns_fingerprint(compute, fields)
    return ShardIndex(index.facts, {**layout, **columns}, columns_by=by, name=f"The index of {redact(url)}")


def columns_fingerprint(compute: ComputeColumns, fields: Collection[str] | None) -> str:
    """Return a digest of a function and the fields that it receives."""
    return fingerprint(compute, None if fields is None else sorted(fields))


def _check_names(values: object, found: Mapping[str, Any], sample: Sample) -> None:
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise TypeError(
            f"the function for columns must return a mapping from names to values, not {values!r:.100}, for "
            f"{describe_sample(sample)}"
        )
    if found and values.keys() != found.keys():
        raise ValueError(
            f"the function for columns returned {sorted(values)} for {describe_sample(sample)}, but {sorted(found)} "
            "for those before. Return the same names for all, and nan or an empty string if there is no value"
        )
    if reserved := values.keys() & COLUMNS.keys():
        raise ValueError(f"every index already has a column {min(reserved)!r}. Choose another name")


def _column(name: str, values: list[Value], archive: str) -> npt.NDArray[Any]:
    """Return values as an array of one type."""
    plain = [value.item() if isinstance(value, np.generic) else value for value in values]
    types = {type(value) for value in plain}
    if types == {bool}:
        return np.array(plain, np.bool_)
    if types <= {int, float}:
        try:
            return np.array(plain, np.int64 if types == {int} else np.float64)
        except OverflowError:
            raise ValueError(f"the column {name!r} of {archive} has integers of more than 64 bits") from None
    if types != {str}:
        names = ", ".join(sorted(each.__name__ for each in types))
        raise TypeError(
            f"the column {name!r} of {archive} has values of the types {names}. Return numbers, or text, or Boolean "
            "values, for all samples"
        )
    column = np.array(plain)
    if column.dtype.itemsize > MAX_VALUE_BYTES or column.tolist() != plain:
        raise ValueError(
            f"the column {name!r} of {archive} has a text of more than {MAX_VALUE_BYTES // 4} characters, or one that "
            "ends with a null character. Store a shorter one, such as its length or a category"
        )
    return column.astype("<U1") if column.dtype.itemsize == 0 else column
