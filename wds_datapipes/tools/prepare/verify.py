"""Verification of shards: the faults of each shard and keys that occur in several shards."""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from wds_datapipes.arguments import check_fields, checks_calls
from wds_datapipes.codecs.decoding import DecoderChain
from wds_datapipes.codecs.field_chain import convert_samples
from wds_datapipes.codecs.media import MediaVerifier
from wds_datapipes.errors import (
    MissingDependencyError,
    MissingSidecarError,
    ShardError,
    SidecarError,
    UnsafeInputError,
    plural,
)
from wds_datapipes.index.format.index_file import index_url, read_index
from wds_datapipes.index.format.manifest import Manifest
from wds_datapipes.index.format.validity import check_index
from wds_datapipes.io.openers import redact, split_scheme
from wds_datapipes.parallel.map_shards import Shards, collect_shards, resolve_shards
from wds_datapipes.redaction import hides_credentials
from wds_datapipes.signatures import spelled
from wds_datapipes.tools.prepare.read_options import DEFAULT_READING, ReadOptions, read_samples
from wds_datapipes.tools.prepare.repeated_keys import find_repeated_keys, hash_keys
from wds_datapipes.tools.prepare.shard_contents import ShardFault, read_contents
from wds_datapipes.types import ShardInfo

PackedKeys: TypeAlias = bytes

#: The maximum number of faults of each kind that are recorded for a shard; further faults are only counted.
MAX_FAULTS = 100
#: The separator of packed keys.
KEY_SEPARATOR = "\0"


@dataclass(frozen=True)
class Checks:
    """The arguments of `verify_shards` that apply to each shard."""

    reading: ReadOptions
    decode: bool = False
    digest: bool = False
    fields: Sequence[str] = ()
    index: bool = True
    entries: Mapping[str, ShardInfo] | None = None


@hides_credentials
@dataclass
class VerifiedShard:
    """The result of verifying a shard.

    Attributes:
        url: the shard.
        samples: the number of samples.
        files: the number of fields of all samples.
        bytes: the size, or ``None`` if the shard could not be read to the end.
        faults: the faults, up to 100 of each kind.
        counts: the number of faults of each kind.
        notes: remarks that are not faults.
        has_index: whether the shard has an index.
        packed_keys: the compressed keys, for finding keys that occur in several shards.
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

    def add_fault(self, kind: str, message: str, key: str = "", field: str = "") -> None:
        """Record a fault."""
        self.counts[kind] += 1
        if self.counts[kind] <= MAX_FAULTS:
            self.faults.append(ShardFault(redact(self.url), kind, key, field, spelled(verify_shards, message)))

    def add_error(self, error: Exception) -> None:
        """Record an error that concerns the whole shard."""
        self.add_fault(type(error).__name__, str(error))


@checks_calls
def verify_shards(
    shards: Shards,
    *,
    decode: bool = False,
    digest: bool = False,
    fields: Sequence[str] = (),
    index: bool = True,
    manifest: Manifest | None = None,
    shared_keys: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    num_workers: int | None = None,
    progress: bool = True,
    options: ReadOptions = DEFAULT_READING,
) -> list[VerifiedShard]:
    """Check headers, end markers, samples and keys of shards in parallel, one process per shard.

    Args:
        shards: a pattern as in `ShardList`, but without variables, or an iterable of URLs, such as a `ShardList`.
        decode: decode every field, images, video and audio completely, except with codecs that can run code. The notes
            name the fields that were not decoded.
        digest: compute the SHA-256 of each shard and compare it with the index and the ``manifest``.
        fields: fields that every sample must have; ``"jpg;png"`` means either of them.
        index: compare each shard with its sidecar index, if any.
        manifest: the manifest with the expected size, number of samples and SHA-256 of each shard.
        shared_keys: allow the same key in several shards.
        storage_options: options for the file system of the shards, in place of those of ``options``.
        num_workers: the number of worker processes, by default one per CPU; 0 works in this process.
        progress: show a progress bar if standard error is a terminal and rich is installed.
        options: how shards are read; a shard that exceeds their limits has a fault.

    Returns:
        The result for each shard, in order.

    Raises:
        UnknownSchemeError, MissingDependencyError: shards of this kind are not supported.
        WorkerDiedError: a process exited without returning a result.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "cls": "1"}, {"__key__": "y", "cls": "one"}])
        >>> (shard,) = verify_shards(url, decode=True)
        >>> shard.samples, [(fault.kind, fault.key, fault.field) for fault in shard.faults]
        (2, [('DecodeError', 'y', 'cls')])
    """
    entries = None if manifest is None else {entry.url: entry for entry in manifest.entries}
    check_fields(fields)
    if storage_options is not None:
        options = replace(options, storage_options=storage_options)
    checks = Checks(options, decode=decode, digest=digest, fields=fields, index=index, entries=entries)
    found = collect_shards(
        partial(_verify_shard, checks=checks),
        resolve_shards(shards),
        label="Verifying",
        measure=lambda shard: (shard.samples, shard.bytes),
        num_workers=num_workers,
        progress=progress,
    )
    if not shared_keys:
        _add_common_keys(found)
    return found


def _add_common_keys(shards: Sequence[VerifiedShard]) -> None:
    """Add a fault to each shard for every key that also occurs in an earlier shard."""
    hashes = [np.unique(hash_keys(_unpack_keys(shard.packed_keys))) for shard in shards]
    owners = np.repeat(np.arange(len(shards)), [*map(len, hashes)])
    together = np.concatenate([*hashes, np.empty(0, np.int64)])
    for owner, key, first in find_repeated_keys(together, owners, lambda n: _unpack_keys(shards[n].packed_keys)):
        text = f"{redact(shards[owner].url)} contains the sample {key!r}, as does {redact(shards[first].url)}"
        shards[owner].add_fault("DuplicateKey", text, key)


def _verify_shard(url: str, checks: Checks) -> VerifiedShard:
    """Verify one shard."""
    contents = read_contents(url, checks.reading, digest=checks.digest)
    found = VerifiedShard(url, len(contents.samples), sum(len(sample.fields) for sample in contents.samples))
    found.bytes = contents.bytes
    for fault in contents.faults:
        found.add_fault(fault.kind, fault.message, fault.key, fault.field)
    found.packed_keys = zlib.compress(
        KEY_SEPARATOR.join(sample.key for sample in contents.samples).encode("utf-8", "surrogateescape"), 1
    )
    for alternatives in checks.fields:
        names = [name.strip().lower() for name in alternatives.split(";")]
        for sample in contents.samples:
            if not any(name in sample.fields for name in names):
                text = f"{redact(url)} has no field {alternatives!r} in the sample {sample.key!r}"
                found.add_fault("MissingFieldError", text, sample.key, alternatives)
    if contents.strays:
        found.notes.append(
            f"{redact(url)}: {contents.strays:,} of {contents.strays + found.files:,} files outside any sample, "
            f"such as {contents.stray_names[0]!r}"
        )
    if contents.bytes is not None:
        if not contents.samples:
            found.notes.append(f"{redact(url)}: the shard has no samples")
        if checks.entries is not None:
            _compare_manifest(found, contents.index.facts.sha256, checks.entries.get(url))
        if checks.index and split_scheme(url)[0] not in ("-", "pipe"):
            _check_index(found, checks)
    if checks.decode:
        _decode(found, checks)
    return found


def _compare_manifest(found: VerifiedShard, sha256: str | None, entry: ShardInfo | None) -> None:
    """Compare a shard with its entry in the manifest."""
    if entry is None:
        found.add_fault("StaleSidecarError", f"{redact(found.url)} is not in the manifest")
        return
    facts: list[tuple[str, object, object]] = [
        ("the size in bytes", found.bytes, entry.bytes),
        ("the number of samples", found.samples, entry.samples),
    ]
    if sha256 and entry.sha256:
        facts.append(("the SHA-256", sha256, entry.sha256))
    for name, now, then in facts:
        if now != then:
            found.add_fault("StaleSidecarError", f"{redact(found.url)}: {name} is {now}, but {then} in the manifest")


def _check_index(found: VerifiedShard, checks: Checks) -> None:
    location = index_url(found.url)
    try:
        index = read_index(location, storage_options=checks.reading.storage_options)
        found.has_index = True
        if index.key_rule is None:
            rule = index.facts.key_rule
            found.notes.append(f"{redact(location)}: not checked because it was built with the key rule {rule}")
            return
        check_index(
            index,
            found.url,
            depth="bytes" if checks.digest else "headers",
            storage_options=checks.reading.storage_options,
            limits=checks.reading.limits,
        )
    except MissingSidecarError:
        return
    except (SidecarError, ShardError) as error:
        found.add_error(error)


def _decode(found: VerifiedShard, checks: Checks) -> None:
    """Decode every field of every sample separately."""
    chain = DecoderChain(["rgb8", MediaVerifier("video"), MediaVerifier("audio")], {}, limits=checks.reading.limits)
    #: The fields that were not decoded, each with the reason.
    skipped = Counter[tuple[str, str]]()

    def record(error: Exception) -> bool:
        found.add_fault(type(error).__name__, str(error), key, name)
        return True

    def record_once(error: Exception) -> bool:
        if type(error).__name__ not in found.counts:  # otherwise, already found in the headers
            found.add_error(error)
        return True

    for sample in read_samples(
        [found.url], checks.reading, on_error=record_once, on_duplicate="first", on_repeated_key="ignore"
    ):
        key = sample["__key__"]
        for name in [name for name in sample if name[:2] != "__"]:
            if not chain.has_decoder(name):
                skipped[name, "because there is no decoder for it"] += 1
                continue
            single = {"__key__": key, "__url__": sample["__url__"], name: sample[name]}
            try:
                deque(convert_samples([single], chain, record), maxlen=0)
            except UnsafeInputError:
                skipped[name, "because that could run code"] += 1
            except MissingDependencyError as error:
                skipped[name, f"because a package is missing: {error}"] += 1
    for (name, reason), count in skipped.items():
        where = f"{count:,} of {plural(found.samples, 'sample')}"
        found.notes.append(f"{redact(found.url)}: {name!r} not decoded in {where}, {reason}")


def _unpack_keys(packed: bytes) -> list[str]:
    text = zlib.decompress(packed).decode("utf-8", "surrogateescape") if packed else ""
    return text.split(KEY_SEPARATOR) if text else []
