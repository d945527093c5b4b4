"""Dataset manifest: the shards, their sizes and digests, and a fingerprint of the dataset."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from wds_datapipes.arguments import check_choice
from wds_datapipes.errors import CorruptSidecarError, ShardError, StaleSidecarError
from wds_datapipes.index.build import Depth, build_index
from wds_datapipes.index.options import IndexOptions
from wds_datapipes.io.openers import redact
from wds_datapipes.io.remote.range_reader import file_facts
from wds_datapipes.io.small_files import folder_of, join_name, read_sidecar, within, write_sidecar
from wds_datapipes.io.url_safety import check_url
from wds_datapipes.parallel.map_shards import map_shards

FORMAT, VERSION = "wds-datapipes manifest", 1
#: The number of concurrent requests for sizes.
THREADS = 16
#: The number of shards that a message names.
NAMED = 3


class DescribedShard(Protocol):
    """A description of a shard that was written or indexed, such as an `IndexResult`."""

    @property
    def url(self) -> str:
        """The path or URL of the shard."""

    @property
    def samples(self) -> int:
        """The number of samples."""

    @property
    def bytes(self) -> int:
        """The size in bytes."""

    @property
    def sha256(self) -> str | None:
        """The digest, if known."""


@dataclass(frozen=True)
class ManifestEntry:
    """A shard of a dataset.

    Attributes:
        url: the shard.
        samples: the number of samples.
        bytes: its size, or 0 if it is unknown.
        sha256: its digest in hexadecimal digits, or ``None``.
    """

    url: str
    samples: int
    bytes: int
    sha256: str | None = None


class Manifest:
    """The shards of a dataset in order, with their counts, sizes and digests.

    Args:
        shards: a description of each shard: the results of `build_indexes`, or the `ShardInfo` from a writer.

    Attributes:
        entries: the shards, each a `ManifestEntry`.

    Raises:
        ValueError: the name of a shard has a null character, or is not Unicode.

    Examples:
        >>> from wds_datapipes.index import Manifest, build_indexes
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
                    f"A Manifest is built from descriptions of shards, not from the name {redact(os.fspath(each))!r}. "
                    f"Pass the results of build_indexes"
                )
            try:
                is_name = b"\0" not in os.fsencode(each.url)
            except UnicodeEncodeError:
                is_name = False
            if not is_name:
                raise ValueError(f"no shard can have the name {each.url!r}")
            entries.append(ManifestEntry(each.url, each.samples, each.bytes, each.sha256 or None))
        self.entries = tuple(entries)

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self.entries)

    def __eq__(self, other: object) -> bool:
        """Whether two manifests have the same entries."""
        return self.entries == other.entries if isinstance(other, Manifest) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.entries)

    def __repr__(self) -> str:
        return f"<Manifest of {len(self)} shards, {self.samples} samples, {self.bytes} bytes>"

    @property
    def urls(self) -> list[str]:
        """The URLs of the shards."""
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
    """Write a manifest as JSON. Shards in or below its folder are named relative to it, so that both can be moved.

    Args:
        manifest: the manifest.
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
    allow_local_files: bool = True,
) -> Manifest:
    """Read a manifest.

    Args:
        url: the file, a path or a URL.
        storage_options: passed to a remote file system.
        allow_local_files: False allows only URLs of files on a network, including that of the manifest; see
            `ShardList`.

    Raises:
        MissingSidecarError: there is no such file.
        CorruptSidecarError: the file is damaged or not a manifest.
        UnsafeInputError: a manifest from another host names a command; or a URL is not that of a file on a network,
            and ``allow_local_files`` is False.
    """
    path = os.fspath(url)
    check_url(path, allow_local_files=allow_local_files)
    name = redact(path)
    content = read_sidecar(path, storage_options)
    folder = folder_of(path)
    try:
        facts = json.loads(content)
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise ValueError("it is JSON of another kind")
        if facts.get("version") != VERSION:
            raise ValueError(
                f"it has version {facts.get('version')!r}, but this version of wds-datapipes reads {VERSION}"
            )
        entries = [_entry(each) for each in facts["shards"]]
        manifest = Manifest(ManifestEntry(**{**vars(entry), "url": join_name(folder, entry.url)}) for entry in entries)
        recorded = (facts["fingerprint"], facts["samples"], facts["bytes"])
        if recorded != (manifest.fingerprint, manifest.samples, manifest.bytes):
            raise ValueError("its totals or its fingerprint do not match its shards")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CorruptSidecarError(f"{name} is not a manifest, or is damaged: {error}. Write it again") from error
    for shard in manifest.urls:
        check_url(shard, allow_local_files=allow_local_files, listed_in=path)
    return manifest


def check_manifest(
    manifest: Manifest,
    *,
    depth: Depth = "size",
    executor: Executor | None = None,
    num_workers: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Raise unless all shards exist and match a manifest.

    Args:
        manifest: the manifest.
        depth: ``"size"`` compares the sizes that are known; ``"headers"`` also counts the samples, by reading the
            headers; ``"bytes"`` also compares the digests, if the manifest has them.
        executor: any executor to read the shards; by default, processes on this host, or threads for ``"size"``.
        num_workers: the number of processes or threads; 0 reads the shards in this process.
        storage_options: passed to remote file systems.

    Raises:
        StaleSidecarError: shards differ or are missing; the message names some of them.
    """
    check_choice("depth", depth, Depth)
    urls = manifest.urls
    expected = {entry.url: entry for entry in manifest.entries}
    if len(expected) < len(set(manifest.entries)):
        raise StaleSidecarError("The manifest has contradictory entries for a shard. Write it again")
    differences: dict[int, str] = {}
    with ThreadPoolExecutor(num_workers or THREADS) as threads:
        used = executor or (threads if depth == "size" else None)
        work = (expected, depth, storage_options)
        for number, task in map_shards(_compare, urls, work, executor=used, num_workers=num_workers):
            if found := task.result():
                differences[number] = found
    if differences:
        named = "; ".join(differences[number] for number in sorted(differences)[:NAMED])
        raise StaleSidecarError(
            f"{len(differences)} of {len(urls)} shards do not match the manifest: {named}"
            f"{'; ...' if len(differences) > NAMED else ''}. Restore these shards, or write the manifest again"
        )


def _compare(
    url: str, expected: Mapping[str, ManifestEntry], depth: Depth, storage_options: Mapping[str, Any] | None
) -> str:
    """Return how a shard differs from its entry, or ""."""
    entry = expected[url]
    try:
        size = file_facts(url, storage_options=storage_options).bytes
        if size is not None and entry.bytes and size != entry.bytes:
            return f"{redact(url)} has {size} bytes, not {entry.bytes}"
        if depth == "size":
            return ""
        digest = depth == "bytes" and entry.sha256 is not None
        options = IndexOptions(on_duplicate="first", digest=digest)
        index = build_index(url, options, on_repeated_key="ignore", storage_options=storage_options)
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
    is_valid = type(entry.url) is str and all(type(number) is int and number >= 0 for number in numbers)
    if not is_valid or type(entry.sha256) not in (str, type(None)):
        raise ValueError(f"its entry {found!r} is not valid")
    return entry


def _base(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2]
