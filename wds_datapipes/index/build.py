"""Index construction: builds the index of a shard, and checks an index against its shard."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from wds_datapipes.arguments import check_choice
from wds_datapipes.errors import StaleSidecarError
from wds_datapipes.index.builder import index_members, index_scan
from wds_datapipes.index.options import IndexOptions
from wds_datapipes.index.shard_index import ShardFacts, ShardIndex
from wds_datapipes.index.user_columns import ComputeColumns, add_columns
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.io.remote.remote_file import FileFacts, file_facts
from wds_datapipes.samples.grouping import OnRepeatedKey
from wds_datapipes.samples.keys import KeyRule
from wds_datapipes.tar.scanner import ShardScan
from wds_datapipes.types import PlacedSample, Shard, ShardInfo

Depth: TypeAlias = Literal["size", "headers", "bytes"]
"""How much of a shard `check_index` reads."""


DEFAULT_OPTIONS = IndexOptions()


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

    Only the headers of a local shard are read, and of a remote shard if its store supports range requests. A compressed
    shard is read completely; its index has the keys, sizes and counts, but does not allow reading samples in any order.

    Args:
        url: the shard, a path or a URL.
        options: how it is indexed.
        columns: a function from a sample, with its fields as bytes, to a mapping of names to numbers, Boolean values or
            short text, such as ``lambda sample: {"label": int(sample["cls"])}``. They are arrays in ``index.columns``.
        fields: the fields that this function needs; by default all. Others are not read.
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
    rules: dict[str, Any] = {"on_duplicate": options.on_duplicate, "on_repeated_key": on_repeated_key}
    scan = ShardScan(
        path,
        digest=options.digest,
        ignore_zeros=options.ignore_zeros,
        end_marker=options.end_marker,
        storage_options=storage_options,
        limits=options.limits,
    )
    index = index_scan(scan, key_rule=options.key_rule, lowercase=options.lowercase, **rules)
    if columns is None:
        return index
    reading: dict[str, Any] = {"storage_options": storage_options, "limits": options.limits}
    return add_columns(index, path, columns, fields=fields, **reading)


def index_from_layout(
    layout: Iterable[PlacedSample],
    info: ShardInfo,
    *,
    end: int,
    compression: str | None = None,
    options: IndexOptions = DEFAULT_OPTIONS,
) -> ShardIndex:
    """Build the index of a shard that was just written, without reading it.

    It records no modification time, so that the same samples give the same index; it is valid while it is newer than
    the shard.

    Args:
        layout: the positions of the samples: ``layout`` of a `TarWriter`.
        info: facts about the finished shard: ``info`` of the writer.
        end: the size of the archive without its end marker: ``size`` of the writer.
        compression: the kind of compression, named as in `ShardFacts`.
        options: its ``key_rule`` and ``lowercase``, with which the shard will be read.

    Raises:
        DuplicateKeyError: a sample would have a field twice when it is read.

    Examples:
        >>> from wds_datapipes import TarWriter
        >>> with TarWriter("a.tar") as shard:
        ...     _ = shard.write({"__key__": "x", "txt": "one"})
        >>> index = index_from_layout(shard.layout, shard.info, end=shard.size)
        >>> index.has_same_layout(build_index("a.tar"))
        True
    """
    shard = Shard(info.url or "The shard", end=end, is_complete=True)
    placed: Any = (
        (shard, name, (name, field.offset, field.size), sample.offset)
        for sample in layout
        for field in sample.fields
        for name in [f"{sample.key}.{field.field}"]
    )
    index = index_members(placed, shard, key_rule=options.key_rule, lowercase=options.lowercase)
    index.facts = replace(index.facts, bytes=info.bytes, sha256=info.sha256 or None, compression=compression)
    return index


def check_index(
    index: ShardIndex,
    url: str | os.PathLike[str],
    *,
    depth: Depth = "size",
    key_rule: KeyRule | None = None,
    storage_options: Mapping[str, Any] | None = None,
    limits: ReadLimits = DEFAULT_LIMITS,
) -> None:
    """Raise unless an index matches the current state of a shard.

    Args:
        index: the index.
        url: the shard.
        depth: ``"size"`` compares the size of the shard, and its ETag if it has one; ``"headers"`` reads all headers
            and compares the positions of all samples; ``"bytes"`` compares the digest too, if the index has one.
        key_rule: the rule that the index was built with, if it is not one of this package.
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
    _check_facts(index.facts, file_facts(path, storage_options=storage_options), redact(path))
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


def _check_facts(then: ShardFacts, now: FileFacts, archive: str) -> None:
    if None not in (then.bytes, now.bytes) and then.bytes != now.bytes:
        raise _stale(archive, f"it has {now.bytes} bytes, not {then.bytes}")
    if None not in (then.etag, now.etag) and then.etag != now.etag:
        raise _stale(archive, f"its ETag is {now.etag!r}, not {then.etag!r}")


def _difference(then: ShardIndex, now: ShardIndex) -> str:
    """Describe the first difference of two indexes."""
    for number, (old, new) in enumerate(zip(then, now, strict=False)):
        if old != new:
            return f"sample {number} ({new.key!r}) is {new[1:]}, not {old.key!r}, {old[1:]}"
    return f"it has {len(now)} samples up to byte {now.end}, not {len(then)} up to byte {then.end}"


def _stale(archive: str, found: str) -> StaleSidecarError:
    return StaleSidecarError(
        f"{redact(archive)} has changed since its index was built: {found}. Build the index again, or restore the shard"
    )
