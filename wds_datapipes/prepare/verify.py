"""The verification of shards: all that is wrong with each of them, and keys that several of them hold."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from wds_datapipes.codecs.decoding import DecoderChain, decode_samples
from wds_datapipes.errors import MissingSidecarError, ShardError, SidecarError, UnsafeCodecError
from wds_datapipes.index.build import check_index
from wds_datapipes.index.file_format import index_url, read_index
from wds_datapipes.index.manifest import ManifestEntry
from wds_datapipes.io.openers import redact, split_scheme
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.parallel.map_shards import each_shard
from wds_datapipes.prepare.shard_contents import ShardContents, ShardFault, outline_shard
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.shards.loading import ReadOptions, read_shards
from wds_datapipes.tar.headers import EndMarker

__all__ = ["Checks", "VerifiedShard", "common_keys", "verify_shards"]

PackedKeys: TypeAlias = bytes

#: How many faults of a kind are kept of a shard; the others are counted.
FAULTS_KEPT = 100
#: What separates keys that are packed.
BETWEEN = "\0"


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What is looked at, beside the headers and the end marker of a shard, its groups and its keys.

    Attributes:
        decode: decode every field. Codecs that can run code are not used.
        digest: form the SHA-256 of each shard, and compare it with its index and with ``manifest``.
        fields: fields that every sample has to have; ``"jpg;png"`` is one of them.
        index: look whether the index beside a shard, if there is one, tells what is in it.
        manifest: what is known of shards, by their URLs.
        key_rule: how the shards are read.
        end_marker: ``"optional"`` accepts shards without an end marker.
        storage_options: passed to remote file systems.
        limits: what shards and compressed fields may ask for; more is a fault.
    """

    decode: bool = False
    digest: bool = False
    fields: Sequence[str] = ()
    index: bool = True
    manifest: Mapping[str, ManifestEntry] | None = None
    key_rule: KeyRule = first_dot
    end_marker: EndMarker = "required"
    storage_options: Mapping[str, Any] | None = None
    limits: ReadLimits = DEFAULT_LIMITS


@dataclass
class VerifiedShard:
    """What was found out about a shard.

    Attributes:
        url: the shard.
        samples: how many samples it has.
        files: how many fields these have together.
        bytes: its size, or ``None`` if it could not be read to its end.
        faults: what is wrong, but only so many of a kind.
        counts: how many faults there are of each kind.
        notes: what is odd and no fault.
        has_index: whether there was an index to check.
        packed_keys: its keys, for `common_keys`.
    """

    url: str
    samples: int = 0
    files: int = 0
    bytes: int | None = None
    faults: list[ShardFault] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    has_index: bool = False
    packed_keys: PackedKeys = b""

    def found(self, faults: Iterable[ShardFault]) -> None:
        """Note faults."""
        for fault in faults:
            self.counts[fault.kind] += 1
            if self.counts[fault.kind] <= FAULTS_KEPT:
                self.faults.append(fault)


def verify_shards(
    urls: Sequence[str],
    checks: Checks,
    *,
    executor: Executor | None = None,
    max_workers: int | None = None,
    on_result: Callable[[VerifiedShard], object] | None = None,
) -> list[VerifiedShard]:
    """Look for faults in shards, each in one process, and in each to its end.

    Args:
        urls: the shards.
        checks: what is looked at.
        executor: who works; by default processes of this host.
        max_workers: how many.
        on_result: called with each shard as it is done, in any order.

    Returns:
        What was found out about each shard, in their order.

    Raises:
        UnknownSchemeError, MissingDependencyError: shards or fields of this kind cannot be read at all.
        WorkerDiedError: a process has ended without a result.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "cls": "1"}, {"__key__": "y", "cls": "one"}])
        >>> (shard,) = verify_shards([url], Checks(decode=True))
        >>> shard.samples, [(fault.kind, fault.key, fault.field) for fault in shard.faults]
        (2, [('DecodeError', 'y', 'cls')])
    """
    results: dict[int, VerifiedShard] = {}
    for number, task in each_shard(_verify_shard, urls, (checks,), executor=executor, max_workers=max_workers):
        results[number] = task.result()
        if on_result is not None:
            on_result(results[number])
    return [results[number] for number in range(len(urls))]


def common_keys(shards: Sequence[VerifiedShard]) -> Iterator[ShardFault]:
    """Yield a fault for each key that another shard holds, too, once for each further shard."""
    digests = [_digests(_unpack_keys(shard.packed_keys)) for shard in shards]
    values = np.sort(np.concatenate([*digests, np.empty(0, np.uint64)]))
    suspects = np.unique(values[1:][values[1:] == values[:-1]])
    if not len(suspects):
        return
    wanted = set(suspects.tolist())
    first: dict[str, str] = {}
    for shard, found in zip(shards, digests, strict=True):
        if not np.isin(found, suspects).any():
            continue
        for key in dict.fromkeys(_unpack_keys(shard.packed_keys)):
            if _digest(key) not in wanted:
                continue
            if first.setdefault(key, shard.url) != shard.url:
                text = f"{redact(shard.url)} holds the sample {key!r}, which {redact(first[key])} holds, too"
                yield ShardFault(redact(shard.url), "DuplicateKey", key, "", text)


def _verify_shard(url: str, checks: Checks) -> VerifiedShard:
    """Look for faults in one shard."""
    outline = outline_shard(
        url,
        key_rule=checks.key_rule,
        end_marker=checks.end_marker,
        digest=checks.digest,
        storage_options=checks.storage_options,
        limits=checks.limits,
    )
    found = VerifiedShard(url, len(outline.samples), sum(len(sample.fields) for sample in outline.samples))
    found.bytes = outline.bytes
    found.found(outline.faults)
    found.packed_keys = zlib.compress(
        BETWEEN.join(sample.key for sample in outline.samples).encode("utf-8", "surrogateescape"), 1
    )
    found.found(_missing_fields(outline, checks.fields))
    if outline.strays:
        found.notes.append(
            f"{redact(url)}: {outline.strays:,} files belong to no sample, such as {outline.stray_names[0]!r}"
        )
    if outline.bytes is not None:
        if not outline.samples:
            found.notes.append(f"{redact(url)}: it has no samples")
        found.found(_wrong_for_manifest(outline, checks.manifest))
        if checks.index and split_scheme(url)[0] not in ("-", "pipe"):
            _check_index(found, checks)
    if checks.decode:
        _decode(found, checks)
    return found


def _missing_fields(outline: ShardContents, fields: Sequence[str]) -> Iterator[ShardFault]:
    for alternatives in fields:
        names = [name.strip().lower() for name in alternatives.split(";")]
        for sample in outline.samples:
            if not any(name in sample.fields for name in names):
                text = f"{redact(outline.url)} has no field {alternatives!r} in the sample {sample.key!r}"
                yield ShardFault(redact(outline.url), "MissingFieldError", sample.key, alternatives, text)


def _wrong_for_manifest(outline: ShardContents, manifest: Mapping[str, ManifestEntry] | None) -> Iterator[ShardFault]:
    """Hold a shard against the manifest."""
    if manifest is None:
        return
    archive, entry = redact(outline.url), manifest.get(outline.url)
    if entry is None:
        yield ShardFault(archive, "StaleSidecarError", "", "", f"{archive} is not in the manifest")
        return
    told = [("bytes", outline.bytes, entry.bytes), ("samples", len(outline.samples), entry.samples)]
    if outline.sha256 is not None and entry.sha256 is not None:
        told.append(("the SHA-256", outline.sha256, entry.sha256))  # type: ignore[arg-type]  # digests are compared, too
    for name, now, then in told:
        if now != then:
            text = f"{archive}: the manifest says {then} for {name}, and it is {now}"
            yield ShardFault(archive, "StaleSidecarError", "", "", text)


def _check_index(found: VerifiedShard, checks: Checks) -> None:
    place = index_url(found.url)
    try:
        index = read_index(place, storage_options=checks.storage_options)
    except MissingSidecarError:
        return
    except SidecarError as error:
        found.found([ShardFault(redact(found.url), type(error).__name__, "", "", str(error))])
        return
    found.has_index = True
    if index.key_rule is None:
        found.notes.append(f"{redact(place)}: it was built with the rule {index.facts.key_rule}, and is not checked")
        return
    try:
        check_index(
            index,
            found.url,
            depth="bytes" if checks.digest else "headers",
            storage_options=checks.storage_options,
            limits=checks.limits,
        )
    except (SidecarError, ShardError) as error:
        found.found([ShardFault(redact(found.url), type(error).__name__, "", "", str(error))])


def _decode(found: VerifiedShard, checks: Checks) -> None:
    """Decode every field of every sample, for itself."""
    chain = DecoderChain(["rgb8"], {}, limits=checks.limits)
    archive, refused, left = redact(found.url), Counter[str](), Counter[str]()
    faults: list[ShardFault] = []

    def wrong(error: Exception) -> bool:
        faults.append(ShardFault(archive, type(error).__name__, key, name, str(error)))
        return True

    def known(error: Exception) -> bool:
        kind = type(error).__name__
        if kind not in found.counts:  # or the headers have told it
            found.found([ShardFault(archive, kind, "", "", str(error))])
        return True

    shards = read_shards(
        [found.url],
        ReadOptions(
            end_marker=checks.end_marker, on_error=known, storage_options=checks.storage_options, limits=checks.limits
        ),
    )
    samples = group_samples(
        shards, key_rule=checks.key_rule, on_duplicate="first", on_repeated_key="ignore", on_error=known
    )
    for sample in samples:
        key = sample["__key__"]
        for name in [name for name in sample if name[:2] != "__"]:
            single = {"__key__": key, "__url__": sample["__url__"], name: sample[name]}
            try:
                left.update(name for decoded in decode_samples([single], chain, wrong) if type(decoded[name]) is bytes)
            except UnsafeCodecError:
                refused[name] += 1
        found.found(faults)
        faults.clear()
    for name, count in refused.items():
        found.notes.append(f"{archive}: {count:,} fields {name!r} were not decoded: decoding them can run code")
    for name, count in left.items():
        found.notes.append(f"{archive}: {count:,} fields {name!r} were read alone: nothing here decodes them")


def _unpack_keys(packed: bytes) -> list[str]:
    text = zlib.decompress(packed).decode("utf-8", "surrogateescape") if packed else ""
    return text.split(BETWEEN) if text else []


def _digests(keys: Iterable[str]) -> npt.NDArray[np.uint64]:
    return np.fromiter(map(_digest, dict.fromkeys(keys)), np.uint64)


def _digest(key: str) -> int:
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")
