"""Building the index of a shard, and checking an index against its shard."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

from wds_datapipes.errors import StaleSidecarError
from wds_datapipes.index.builder import IndexBuilder
from wds_datapipes.index.shard_index import ShardFacts, ShardIndex
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.io.remote.range_reader import FileFacts, file_facts
from wds_datapipes.samples.grouping import OnDuplicate, OnRepeatedKey
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.tar.scanner import scan_shard
from wds_datapipes.types import PlacedSample, ShardInfo

__all__ = ["Depth", "build_index", "check_index", "written_index"]

Depth: TypeAlias = Literal["size", "headers", "bytes"]
"""How much of a shard `check_index` looks at."""


def build_index(
    url: str | os.PathLike[str],
    *,
    key_rule: KeyRule = first_dot,
    lowercase: bool = True,
    on_duplicate: OnDuplicate = "raise",
    on_repeated_key: OnRepeatedKey = "warn",
    digest: bool = False,
    ignore_zeros: bool = False,
    end_marker: EndMarker = "required",
    storage_options: Mapping[str, Any] | None = None,
    limits: ReadLimits = DEFAULT_LIMITS,
) -> ShardIndex:
    """Build the index of a shard.

    Only the headers are read of a local shard, and of a remote one where its store gives parts of it. A compressed
    shard is read as a whole; its index tells the keys, sizes and counts, and that samples cannot be read by it in any
    order.

    Args:
        url: the shard, a path or a URL.
        key_rule: splits the members' names.
        lowercase: call fields by their lower-case names.
        on_duplicate: ``"raise"``, or which of two members counts that are the same field of one sample, ``"first"`` or
            ``"last"``.
        on_repeated_key: ``"warn"``, ``"raise"`` or ``"ignore"`` a key that comes back after other samples.
        digest: form the SHA-256 of the shard too, for which all of it is read.
        ignore_zeros: continue after an end marker, to read archives that were concatenated.
        end_marker: ``"optional"`` accepts an archive without the two blocks of zeros at its end.
        storage_options: passed to a remote file system.
        limits: what the shard may ask for, see `ReadLimits`.

    Raises:
        ShardError: the shard cannot be read to its end, or asks for more than its limits.
        SampleError: a field occurs twice, or a key comes back.
        StaleSidecarError: the shard has changed meanwhile.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> index = build_index(build_shard("a.tar", [{"__key__": "x", "txt": "one"}]), digest=True)
        >>> index[0], index.facts.bytes, len(index.facts.sha256)
        (IndexedSample(key='x', offset=0, end=1024, entries=(IndexEntry(field='txt', offset=512, size=3),)), 10240, 64)
    """
    path = os.fspath(url)
    builder = IndexBuilder(
        key_rule=key_rule,
        lowercase=lowercase,
        on_duplicate=on_duplicate,
        on_repeated_key=on_repeated_key,
        archive=redact(path),
    )
    scan = scan_shard(
        path,
        builder.add,
        digest=digest,
        ignore_zeros=ignore_zeros,
        end_marker=end_marker,
        storage_options=storage_options,
        limits=limits,
    )
    facts = ShardFacts(scan.bytes, scan.sha256, scan.mtime_ns, scan.etag, scan.compression)
    return builder.finish(end=scan.end, facts=facts)


def written_index(
    layout: Iterable[PlacedSample],
    info: ShardInfo,
    *,
    end: int,
    compression: str | None = None,
    key_rule: KeyRule = first_dot,
    lowercase: bool = True,
) -> ShardIndex:
    """Return the index of a shard that was just written, without reading it.

    It knows no time, so that the same samples give the same index; it holds as long as it is newer than the shard.

    Args:
        layout: where each sample is: ``layout`` of a `TarWriter`.
        info: what the finished shard is: its ``info``.
        end: where the archive ends, without its end marker: its ``size``.
        compression: how it is compressed, by the names of `ShardFacts`.
        key_rule: how the shard will be read.
        lowercase: call fields by their lower-case names.

    Raises:
        DuplicateFieldError: a field occurs twice in a sample, when it is read.

    Examples:
        >>> from wds_datapipes import TarWriter
        >>> with TarWriter("a.tar") as shard:
        ...     _ = shard.write({"__key__": "x", "txt": "one"})
        >>> index = written_index(shard.layout, shard.info, end=shard.size)
        >>> index.places_equal(build_index("a.tar"))
        True
    """
    builder = IndexBuilder(key_rule=key_rule, lowercase=lowercase, archive=redact(info.url) or "The shard")
    for sample in layout:
        for field in sample.fields:
            builder.add(f"{sample.key}.{field.field}", sample.offset, field.offset, field.size)
    facts = ShardFacts(bytes=info.bytes, sha256=info.sha256 or None, compression=compression)
    return builder.finish(end=end, facts=facts)


def check_index(
    index: ShardIndex,
    url: str | os.PathLike[str],
    *,
    depth: Depth = "size",
    key_rule: KeyRule | None = None,
    storage_options: Mapping[str, Any] | None = None,
    limits: ReadLimits = DEFAULT_LIMITS,
) -> None:
    """Raise unless an index belongs to a shard as it is now.

    Args:
        index: what `read_index` or `build_index` returned.
        url: the shard.
        depth: ``"size"`` asks for the size of the shard, and for the version that its store tells; ``"headers"`` reads
            all headers, and compares all that the index says of samples; ``"bytes"`` forms the digest too, if the index
            has one.
        key_rule: the rule that the index was built with, if it is none of this package.
        storage_options: passed to a remote file system.
        limits: what the shard may ask for, see `ReadLimits`.

    Raises:
        StaleSidecarError: the shard is another one now.
        ShardError: it cannot be read.

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
    if depth not in ("size", "headers", "bytes"):
        raise ValueError(f'depth is "size", "headers" or "bytes", not {depth!r}')
    path = os.fspath(url)
    _check_facts(index.facts, file_facts(path, storage_options=storage_options), redact(path))
    if depth == "size":
        return
    rule = key_rule or index.key_rule
    if rule is None:
        raise ValueError(f"The index was built with the rule {index.facts.key_rule}. Pass it as key_rule to check it")
    now = build_index(
        path,
        key_rule=rule,
        lowercase=index.facts.lowercase,
        on_duplicate=index.facts.on_duplicate,  # type: ignore[arg-type]  # a word, as it was when it was built
        on_repeated_key="ignore",
        digest=depth == "bytes" and index.facts.sha256 is not None,
        ignore_zeros=True,
        end_marker="optional",
        storage_options=storage_options,
        limits=limits,
    )
    if index.facts.bytes not in (None, now.facts.bytes):
        raise _stale(path, f"it has {now.facts.bytes} bytes, and had {index.facts.bytes}")
    if not index.places_equal(now):
        raise _stale(path, _difference(index, now))
    if now.facts.sha256 is not None and now.facts.sha256 != index.facts.sha256:
        raise _stale(path, f"its SHA-256 is {now.facts.sha256}, and was {index.facts.sha256}")


def _check_facts(then: ShardFacts, now: FileFacts, archive: str) -> None:
    if None not in (then.bytes, now.bytes) and then.bytes != now.bytes:
        raise _stale(archive, f"it has {now.bytes} bytes, and had {then.bytes}")
    if None not in (then.etag, now.etag) and then.etag != now.etag:
        raise _stale(archive, f"its store calls it {now.etag!r}, and called it {then.etag!r}")


def _difference(then: ShardIndex, now: ShardIndex) -> str:
    """Describe the first difference of two indexes."""
    for number, (old, new) in enumerate(zip(then, now, strict=False)):
        if old != new:
            return f"sample {number} ({new.key!r}) is {new[1:]}, and was {old.key!r}, {old[1:]}"
    return f"it has {len(now)} samples up to byte {now.end}, and had {len(then)} up to byte {then.end}"


def _stale(archive: str, found: str) -> StaleSidecarError:
    return StaleSidecarError(
        f"{redact(archive)} has changed since its index was built: {found}. Build the index again, or fetch the shard "
        f"that belongs to it"
    )
