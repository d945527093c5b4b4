"""Validity of an index: whether it still matches its shard."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from wds_datapipes.arguments import check_choice, checks_calls
from wds_datapipes.errors import CorruptShardError, CorruptSidecarError, MissingSidecarError, StaleSidecarError, plural
from wds_datapipes.index.format.builder import DEFAULT_OPTIONS, build_index
from wds_datapipes.index.format.index_file import read_index
from wds_datapipes.index.format.options import IndexOptions
from wds_datapipes.index.format.origin import origin_of
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.io.openers import local_path, redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.io.remote.remote_file import file_facts
from wds_datapipes.samples.keys import KeyRule

LOGGER = logging.getLogger("wds_datapipes")
#: The shard about whose server this process has warned.
_warned: list[str] = []
Depth: TypeAlias = Literal["size", "headers", "bytes"]
"""How much of a shard `check_index` reads."""


def find_index(
    url: str,
    path: str,
    options: IndexOptions = DEFAULT_OPTIONS,
    *,
    columns_by: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ShardIndex | None:
    """Return the index of a shard if a valid one with these options exists."""
    try:
        index = read_index(path, storage_options=storage_options)
    except (MissingSidecarError, CorruptSidecarError):
        return None
    if columns_by not in (None, index.columns_by):
        return None
    then, now = index.facts, file_facts(url, storage_options=storage_options)
    if then.rules != options.rules:
        return None
    if then.bytes is None or then.bytes != now.bytes or (options.digest and then.sha256 is None):
        return None
    if None not in (then.etag, now.etag):
        return index if then.etag == now.etag else None
    if None not in (then.mtime_ns, now.mtime_ns):
        return index if then.mtime_ns == now.mtime_ns else None
    if (now.etag, now.mtime_ns) == (None, None) and not _warned:
        _warned.append(url)
        LOGGER.warning(
            "The index of %s is built again although it may be valid, as are those of other shards there: the server "
            "reports neither ETag nor Last-Modified. Configure it to send one of them, or write a manifest: its "
            "indexes are used as they are and compared with the shards as samples are read",
            redact(url),
        )
    file = local_path(path)
    is_newer = file is not None and now.mtime_ns is not None and Path(file).stat().st_mtime_ns >= now.mtime_ns
    return index if is_newer else None


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
