"""Dataset manifest: the shards, their sizes and digests, and a fingerprint of the dataset."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from wds_datapipes.errors import CorruptSidecarError, ShardError, StaleSidecarError
from wds_datapipes.index.build import Depth, build_index
from wds_datapipes.io.openers import redact
from wds_datapipes.io.remote.range_reader import file_facts
from wds_datapipes.io.small_files import folder_of, join_name, read_sidecar, within, write_sidecar
from wds_datapipes.io.url_safety import refuse_commands, refuse_unsafe
from wds_datapipes.parallel.map_shards import each_shard

__all__ = [
    "DescribedShard",
    "Manifest",
    "ManifestEntry",
    "check_manifest",
    "read_manifest",
    "write_manifest",
]

FORMAT, VERSION = "wds-datapipes manifest", 1
#: How many requests are under way at once while sizes are asked for.
THREADS = 16
#: How many shards a message names.
NAMED = 3


class DescribedShard(Protocol):
    """The description of a shard that was written or indexed, such as an `IndexResult`."""

    @property
    def url(self) -> str:
        """Return the shard."""

    @property
    def samples(self) -> int:
        """Return how many samples it has."""

    @property
    def bytes(self) -> int:
        """Return its size."""

    @property
    def sha256(self) -> str | None:
        """Return its digest, if that is known."""


@dataclass(frozen=True)
class ManifestEntry:
    """A shard of a dataset.

    Attributes:
        url: the shard.
        samples: how many samples it has.
        bytes: its size.
        sha256: its digest in hexadecimal digits, or ``None``.
    """

    url: str
    samples: int
    bytes: int
    sha256: str | None = None


class Manifest:
    """The shards of a dataset in order, with their counts, sizes and digests.

    Args:
        shards: what is known of each shard: what `build_indexes` returned, or each `ShardInfo` of a writer.

    Attributes:
        entries: the shards, each a `ManifestEntry`.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> for name in "ab":
        ...     _ = build_shard(f"{name}.tar", [{"__key__": name, "txt": "one"}])
        >>> manifest = Manifest(build_indexes("{a,b}.tar"))
        >>> manifest.urls, manifest.samples, manifest.bytes
        (['a.tar', 'b.tar'], 2, 20480)
        >>> write_manifest(manifest, "manifest.json")
        >>> read_manifest("manifest.json") == manifest
        True
    """

    def __init__(self, shards: Iterable[DescribedShard]) -> None:
        entries = []
        for each in shards:
            if isinstance(each, str | os.PathLike):
                raise TypeError(
                    f"A Manifest is made of what is known of shards, and got the name {os.fspath(each)!r}. Pass what "
                    f"build_indexes returns"
                )
            entries.append(ManifestEntry(each.url, each.samples, each.bytes, each.sha256 or None))
        self.entries = tuple(entries)

    def __len__(self) -> int:
        """How many shards there are."""
        return len(self.entries)

    def __eq__(self, other: object) -> bool:
        """Whether two manifests say the same."""
        return self.entries == other.entries if isinstance(other, Manifest) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.entries)

    def __repr__(self) -> str:
        return f"<Manifest of {len(self)} shards, {self.samples} samples, {self.bytes} bytes>"

    @property
    def urls(self) -> list[str]:
        """The shards."""
        return [entry.url for entry in self.entries]

    @property
    def samples(self) -> int:
        """The number of samples in all shards."""
        return sum(entry.samples for entry in self.entries)

    @property
    def bytes(self) -> int:
        """The total size of the shards in bytes."""
        return sum(entry.bytes for entry in self.entries)

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the shards' base names, counts, sizes and digests, in order."""
        facts = [[_base(entry.url), entry.samples, entry.bytes, entry.sha256] for entry in self.entries]
        return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode()).hexdigest()


def write_manifest(
    manifest: Manifest, url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Write a manifest as JSON. Shards in or below its folder are relative to it, so that both may move.

    Args:
        manifest: what to write.
        url: the file, a path or a URL.
        storage_options: passed to a remote file system.

    Raises:
        MissingSidecarError: the file cannot be written.
    """
    folder = folder_of(os.fspath(url))
    facts = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": manifest.fingerprint,
        "samples": manifest.samples,
        "bytes": manifest.bytes,
        "shards": [{**vars(entry), "url": within(folder, entry.url)} for entry in manifest.entries],
    }
    write_sidecar(os.fspath(url), (json.dumps(facts, indent=1) + "\n").encode(), storage_options)


def read_manifest(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    safe: bool = False,
    allow_commands: bool = False,
) -> Manifest:
    """Read a manifest.

    Args:
        url: the file, a path or a URL.
        storage_options: passed to a remote file system.
        safe: take no URLs but those of files on a network, that of the manifest included; see `ShardList`.
        allow_commands: let a manifest that is not a file of this host name commands (``pipe:``) as shards.

    Raises:
        MissingSidecarError: there is no such file.
        CorruptSidecarError: it is damaged, or is something else.
        RefusedURLError: it names a command and is not a file of this host; or, with ``safe``, something is no file on a
            network.
    """
    place = os.fspath(url)
    if safe:
        refuse_unsafe(place)
    where = redact(place)
    content = read_sidecar(place, storage_options)
    folder = folder_of(place)
    try:
        facts = json.loads(content)
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise ValueError("it is JSON of something else")
        if facts.get("version") != VERSION:
            raise ValueError(
                f"it has version {facts.get('version')!r}, and this version of wds-datapipes reads {VERSION}"
            )
        entries = [_entry(each) for each in facts["shards"]]
        manifest = Manifest(ManifestEntry(**{**vars(entry), "url": join_name(folder, entry.url)}) for entry in entries)
        told = (facts["fingerprint"], facts["samples"], facts["bytes"])
        if told != (manifest.fingerprint, manifest.samples, manifest.bytes):
            raise ValueError("its sums or its fingerprint are not those of its shards")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CorruptSidecarError(f"{where} is no manifest, or is damaged: {error}. Write it again") from error
    for shard in manifest.urls:
        if safe:
            refuse_unsafe(shard)
        elif not allow_commands:
            refuse_commands(shard, place)
    return manifest


def check_manifest(
    manifest: Manifest,
    *,
    depth: Depth = "size",
    executor: Executor | None = None,
    max_workers: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Raise unless all shards exist and match a manifest.

    Args:
        manifest: what `read_manifest` returned.
        depth: ``"size"`` asks for the sizes; ``"headers"`` counts the samples too, by the headers; ``"bytes"`` forms
            the digests too, if the manifest has them.
        executor: who reads the shards; by default processes of this host, and threads where only sizes are asked for.
        max_workers: how many.
        storage_options: passed to remote file systems.

    Raises:
        StaleSidecarError: shards differ, or are not there; the message names some of them.
    """
    if depth not in ("size", "headers", "bytes"):
        raise ValueError(f'depth is "size", "headers" or "bytes", not {depth!r}')
    urls = manifest.urls
    expected = {entry.url: entry for entry in manifest.entries}
    if len(expected) < len(set(manifest.entries)):
        raise StaleSidecarError("The manifest says different things of one shard. Write it again")
    wrong: dict[int, str] = {}
    threads = ThreadPoolExecutor(min(max_workers or THREADS, max(len(urls), 1))) if depth == "size" else None
    try:
        work = (expected, depth, storage_options)
        for number, task in each_shard(_wrong, urls, work, executor=executor or threads, max_workers=max_workers):
            if found := task.result():
                wrong[number] = found
    finally:
        if threads is not None:
            threads.shutdown()
    if wrong:
        named = "; ".join(wrong[number] for number in sorted(wrong)[:NAMED])
        raise StaleSidecarError(
            f"{len(wrong)} of {len(urls)} shards are not what the manifest says: {named}"
            f"{'; ...' if len(wrong) > NAMED else ''}. Fetch these shards again, or write the manifest again"
        )


def _wrong(
    url: str, expected: Mapping[str, ManifestEntry], depth: Depth, storage_options: Mapping[str, Any] | None
) -> str:
    """Return what is wrong with a shard, or nothing."""
    entry = expected[url]
    try:
        size = file_facts(url, storage_options=storage_options).bytes
        if size is not None and size != entry.bytes:
            return f"{redact(url)} has {size} bytes, not {entry.bytes}"
        if depth == "size":
            return ""
        digest = depth == "bytes" and entry.sha256 is not None
        index = build_index(
            url, on_duplicate="first", on_repeated_key="ignore", digest=digest, storage_options=storage_options
        )
    except ShardError as error:
        return str(error)
    if len(index) != entry.samples:
        return f"{redact(url)} has {len(index)} samples, not {entry.samples}"
    if digest and index.facts.sha256 != entry.sha256:
        return f"{redact(url)} has the SHA-256 {index.facts.sha256}, not {entry.sha256}"
    return ""


def _entry(found: Mapping[str, Any]) -> ManifestEntry:
    entry = ManifestEntry(**found)
    numbers = (entry.samples, entry.bytes)
    is_right = type(entry.url) is str and all(type(number) is int and number >= 0 for number in numbers)
    if not is_right or type(entry.sha256) not in (str, type(None)):
        raise ValueError(f"its entry {found!r} is not that of a shard")
    return entry


def _base(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2]
