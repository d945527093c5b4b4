"""Verification of shards: the faults of each shard, and keys that occur in several shards."""

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
from wds_datapipes.errors import MissingSidecarError, ShardError, SidecarError, UnsafeInputError
from wds_datapipes.index.build import check_index
from wds_datapipes.index.file_format import index_url, read_index
from wds_datapipes.index.manifest import ManifestEntry
from wds_datapipes.io.openers import redact, split_scheme
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.parallel.map_shards import map_shards
from wds_datapipes.prepare.shard_contents import ShardContents, ShardFault, read_contents
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.shards.loading import ReadOptions, read_shards
from wds_datapipes.tar.headers import EndMarker

__all__ = ["Checks", "VerifiedShard", "find_common_keys", "verify_shards"]

PackedKeys: TypeAlias = bytes

#: The most faults of a kind recorded for a shard; further ones are only counted.
MAX_FAULTS = 100
#: The separator of packed keys.
KEY_SEPARATOR = "\0"


@dataclass(frozen=True, kw_only=True)
class Checks:
    """Checks in addition to those of headers, end marker, groups and keys.

    Attributes:
        decode: decode every field, except with codecs that can run code.
        digest: compute the SHA-256 of each shard, and compare it with the index and the ``manifest``.
        fields: fields that every sample must have; ``"jpg;png"`` means either of them.
        index: compare each shard with the index next to it, if there is one.
        manifest: the expected facts of each shard, by URL.
        key_rule: splits member names into keys and fields.
        end_marker: ``"optional"`` accepts shards without an end marker.
        storage_options: passed to remote file systems.
        limits: the limits on memory and sizes; exceeding one is a fault.
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
    """The result of verifying a shard.

    Attributes:
        url: the shard.
        samples: the number of samples.
        files: the number of fields of all samples.
        bytes: the size, or ``None`` if the shard could not be read to the end.
        faults: the faults, up to `MAX_FAULTS` of each kind.
        counts: the number of faults of each kind.
        notes: remarks that are not faults.
        has_index: whether there is an index to check.
        packed_keys: the compressed keys, for `find_common_keys`.
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

    def add_faults(self, faults: Iterable[ShardFault]) -> None:
        """Record faults."""
        for fault in faults:
            self.counts[fault.kind] += 1
            if self.counts[fault.kind] <= MAX_FAULTS:
                self.faults.append(fault)


def verify_shards(
    urls: Sequence[str],
    checks: Checks,
    *,
    executor: Executor | None = None,
    max_workers: int | None = None,
    on_result: Callable[[VerifiedShard], object] | None = None,
) -> list[VerifiedShard]:
    """Verify shards in parallel, one process per shard.

    Args:
        urls: the shards.
        checks: the checks to run.
        executor: runs the tasks; by default local processes.
        max_workers: the number of parallel tasks.
        on_result: called with each result as it arrives, in any order.

    Returns:
        The result for each shard, in order.

    Raises:
        UnknownSchemeError, MissingDependencyError: shards or fields of this kind are not supported.
        WorkerDiedError: a process ended without a result.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "cls": "1"}, {"__key__": "y", "cls": "one"}])
        >>> (shard,) = verify_shards([url], Checks(decode=True))
        >>> shard.samples, [(fault.kind, fault.key, fault.field) for fault in shard.faults]
        (2, [('DecodeError', 'y', 'cls')])
    """
    results: dict[int, VerifiedShard] = {}
    for number, task in map_shards(_verify_shard, urls, (checks,), executor=executor, max_workers=max_workers):
        results[number] = task.result()
        if on_result is not None:
            on_result(results[number])
    return [results[number] for number in range(len(urls))]


def find_common_keys(shards: Sequence[VerifiedShard]) -> Iterator[ShardFault]:
    """Yield a fault for each further shard that contains the key of an earlier one."""
    digests = [_digests(_unpack_keys(shard.packed_keys)) for shard in shards]
    values = np.sort(np.concatenate([*digests, np.empty(0, np.uint64)]))
    suspects = np.unique(values[1:][values[1:] == values[:-1]])
    if not len(suspects):
        return
    suspect_set = set(suspects.tolist())
    first: dict[str, str] = {}
    for shard, found in zip(shards, digests, strict=True):
        if not np.isin(found, suspects).any():
            continue
        for key in dict.fromkeys(_unpack_keys(shard.packed_keys)):
            if _digest(key) not in suspect_set:
                continue
            if first.setdefault(key, shard.url) != shard.url:
                text = f"{redact(shard.url)} contains the sample {key!r}, as does {redact(first[key])}"
                yield ShardFault(redact(shard.url), "DuplicateKey", key, "", text)


def _verify_shard(url: str, checks: Checks) -> VerifiedShard:
    """Verify one shard."""
    contents = read_contents(
        url,
        key_rule=checks.key_rule,
        end_marker=checks.end_marker,
        digest=checks.digest,
        storage_options=checks.storage_options,
        limits=checks.limits,
    )
    found = VerifiedShard(url, len(contents.samples), sum(len(sample.fields) for sample in contents.samples))
    found.bytes = contents.bytes
    found.add_faults(contents.faults)
    found.packed_keys = zlib.compress(
        KEY_SEPARATOR.join(sample.key for sample in contents.samples).encode("utf-8", "surrogateescape"), 1
    )
    found.add_faults(_missing_fields(contents, checks.fields))
    if contents.strays:
        found.notes.append(
            f"{redact(url)}: {contents.strays:,} files belong to no sample, such as {contents.stray_names[0]!r}"
        )
    if contents.bytes is not None:
        if not contents.samples:
            found.notes.append(f"{redact(url)}: the shard has no samples")
        found.add_faults(_compare_manifest(contents, checks.manifest))
        if checks.index and split_scheme(url)[0] not in ("-", "pipe"):
            _check_index(found, checks)
    if checks.decode:
        _decode(found, checks)
    return found


def _missing_fields(contents: ShardContents, fields: Sequence[str]) -> Iterator[ShardFault]:
    for alternatives in fields:
        names = [name.strip().lower() for name in alternatives.split(";")]
        for sample in contents.samples:
            if not any(name in sample.fields for name in names):
                text = f"{redact(contents.url)} has no field {alternatives!r} in the sample {sample.key!r}"
                yield ShardFault(redact(contents.url), "MissingFieldError", sample.key, alternatives, text)


def _compare_manifest(contents: ShardContents, manifest: Mapping[str, ManifestEntry] | None) -> Iterator[ShardFault]:
    """Compare a shard with the manifest."""
    if manifest is None:
        return
    archive, entry = redact(contents.url), manifest.get(contents.url)
    if entry is None:
        yield ShardFault(archive, "StaleSidecarError", "", "", f"{archive} is not in the manifest")
        return
    facts = [
        ("the size in bytes", contents.bytes, entry.bytes),
        ("the number of samples", len(contents.samples), entry.samples),
    ]
    if contents.index.facts.sha256 is not None and entry.sha256 is not None:
        facts.append(("the SHA-256", contents.index.facts.sha256, entry.sha256))  # type: ignore[arg-type]
    for name, now, then in facts:
        if now != then:
            text = f"{archive}: {name} is {now}, but {then} in the manifest"
            yield ShardFault(archive, "StaleSidecarError", "", "", text)


def _check_index(found: VerifiedShard, checks: Checks) -> None:
    location = index_url(found.url)
    try:
        index = read_index(location, storage_options=checks.storage_options)
    except MissingSidecarError:
        return
    except SidecarError as error:
        found.add_faults([ShardFault(redact(found.url), type(error).__name__, "", "", str(error))])
        return
    found.has_index = True
    if index.key_rule is None:
        found.notes.append(f"{redact(location)}: not checked, as it was built with the key rule {index.facts.key_rule}")
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
        found.add_faults([ShardFault(redact(found.url), type(error).__name__, "", "", str(error))])


def _decode(found: VerifiedShard, checks: Checks) -> None:
    """Decode every field of every sample separately."""
    chain = DecoderChain(["rgb8"], {}, limits=checks.limits)
    archive, unsafe, undecoded = redact(found.url), Counter[str](), Counter[str]()
    faults: list[ShardFault] = []

    def record(error: Exception) -> bool:
        faults.append(ShardFault(archive, type(error).__name__, key, name, str(error)))
        return True

    def record_once(error: Exception) -> bool:
        kind = type(error).__name__
        if kind not in found.counts:  # otherwise the headers have reported it
            found.add_faults([ShardFault(archive, kind, "", "", str(error))])
        return True

    shards = read_shards(
        [found.url],
        ReadOptions(
            end_marker=checks.end_marker,
            on_error=record_once,
            storage_options=checks.storage_options,
            limits=checks.limits,
        ),
    )
    samples = group_samples(
        shards, key_rule=checks.key_rule, on_duplicate="first", on_repeated_key="ignore", on_error=record_once
    )
    for sample in samples:
        key = sample["__key__"]
        for name in [name for name in sample if name[:2] != "__"]:
            single = {"__key__": key, "__url__": sample["__url__"], name: sample[name]}
            try:
                undecoded.update(
                    name for decoded in decode_samples([single], chain, record) if type(decoded[name]) is bytes
                )
            except UnsafeInputError:
                unsafe[name] += 1
        found.add_faults(faults)
        faults.clear()
    for name, count in unsafe.items():
        found.notes.append(f"{archive}: {count:,} fields {name!r} were not decoded, as decoding them can run code")
    for name, count in undecoded.items():
        found.notes.append(f"{archive}: {count:,} fields {name!r} were read but not decoded, as they have no codec")


def _unpack_keys(packed: bytes) -> list[str]:
    text = zlib.decompress(packed).decode("utf-8", "surrogateescape") if packed else ""
    return text.split(KEY_SEPARATOR) if text else []


def _digests(keys: Iterable[str]) -> npt.NDArray[np.uint64]:
    return np.fromiter(map(_digest, dict.fromkeys(keys)), np.uint64)


def _digest(key: str) -> int:
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")
