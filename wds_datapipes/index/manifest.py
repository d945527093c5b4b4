"""Dataset manifest: the shards, their sizes and digests, and a fingerprint of the dataset."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from wds_datapipes.errors import CorruptSidecarError
from wds_datapipes.io.openers import redact
from wds_datapipes.io.small_files import folder_of, join_name, read_sidecar, within, write_sidecar
from wds_datapipes.io.urls import check_url

FORMAT, VERSION = "wds-datapipes manifest", 1


@dataclass(frozen=True)
class ManifestEntry:
    """A shard of a dataset.

    Attributes:
        url: the shard.
        samples: the number of samples.
        bytes: its size, or 0 if it is unknown.
        sha256: its digest in hexadecimal digits, or ``None``.

    Raises:
        ValueError: a value is invalid, as in a damaged file.
    """

    url: str
    samples: int
    bytes: int
    sha256: str | None = None

    def __post_init__(self) -> None:
        is_valid = type(self.url) is str and all(type(each) is int and each >= 0 for each in (self.samples, self.bytes))
        if not is_valid or type(self.sha256) not in (str, type(None)):
            raise ValueError(f"its entry {vars(self)} is not valid")


class Manifest:
    """The shards of a dataset in order, with their counts, sizes and digests.

    Args:
        shards: a description of each shard: the results of `build_indexes`, or the `ShardInfo` from a writer.

    Attributes:
        entries: the shards, each a `ManifestEntry`.

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

    def __init__(self, shards: Iterable[Any]) -> None:
        entries = []
        for each in shards:
            if isinstance(each, str | os.PathLike):
                raise TypeError(
                    f"A Manifest is built from descriptions of shards, not from the name {redact(os.fspath(each))!r}. "
                    f"Pass the results of build_indexes"
                )
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
        facts = [
            [entry.url.rstrip("/").rpartition("/")[2], entry.samples, entry.bytes, entry.sha256]
            for entry in self.entries
        ]
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
        entries = [ManifestEntry(**each) for each in facts["shards"]]
        manifest = Manifest(replace(entry, url=join_name(folder, entry.url)) for entry in entries)
        recorded = (facts["fingerprint"], facts["samples"], facts["bytes"])
        if recorded != (manifest.fingerprint, manifest.samples, manifest.bytes):
            raise ValueError("its totals or its fingerprint do not match its shards")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CorruptSidecarError(f"{name} is not a manifest, or is damaged: {error}. Write it again") from error
    for shard in manifest.urls:
        check_url(shard, allow_local_files=allow_local_files, listed_in=path)
    return manifest
