"""Dataset manifest: the shards, their sizes and digests, and a fingerprint of the dataset."""

from __future__ import annotations

import hashlib
import json
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wds_datapipes.errors import CorruptSidecarError, plural
from wds_datapipes.io.host_results import share_on_host
from wds_datapipes.io.openers import redact
from wds_datapipes.io.small_files import folder_of, join_name, read_sidecar, within, write_sidecar
from wds_datapipes.io.urls import check_url, local_path
from wds_datapipes.types import ShardInfo

FORMAT, VERSION = "wds-datapipes manifest", 2
#: How many entries, or bytes of a file, are converted at a time: a million entries would take 500 MB as objects.
ENTRIES, STEP_BYTES = 256, 1 << 14
#: The beginning of the list of shards in a file, and that of every shard but the first.
SHARDS, NEXT_SHARD = re.compile(rb'"shards"\s*:\s*\['), b",\n  ["
DIGEST = re.compile("[0-9a-f]{64}")


class Manifest:
    """The shards of a dataset in order, with their counts, sizes and digests.

    Args:
        shards: a description of each shard: the results of `build_indexes`, or the `ShardInfo` from a writer.

    Attributes:
        counts: the number of samples of each shard.
        sizes: the size of each shard in bytes, or 0 if unknown.
        fingerprint: the SHA-256 of the shards' base names, counts, sizes and digests, in order.

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
        left = map(_facts_of, shards)
        self._store(zip(*rows, strict=True) for rows in iter(lambda: list(islice(left, ENTRIES)), []))

    def _store(self, blocks: Iterable[Iterable[tuple[Any, ...]]]) -> None:
        """Store the facts of the shards, which come in blocks of columns."""
        counts, sizes, digests = array("q"), array("q"), [np.empty(0, "S1")]
        self._names, digest = list[str](), hashlib.sha256()
        for urls, samples, totals, sha256s in blocks:
            if not _are_valid(urls, samples + totals, sha256s):
                rows = zip(urls, samples, totals, sha256s, strict=True)
                invalid = next(row for row in rows if not _are_valid(row[:1], row[1:3], row[3:]))
                raise ValueError(f"its entry {ShardInfo(*invalid)._asdict()} is not valid")
            names = "\0".join(urls)
            digest.update(f"{_base_names(names, urls[0])}\0".encode("utf-8", "surrogatepass"))
            self._names.append(names)
            counts.extend(samples)
            sizes.extend(totals)
            has_digests = any(sha256s)
            digests.append(
                np.array([each or "" for each in sha256s], "S64") if has_digests else np.zeros(len(urls), "S1")
            )
        self.counts, self.sizes = np.frombuffer(counts, np.int64), np.frombuffer(sizes, np.int64)
        self._digests: npt.NDArray[np.bytes_] = np.concatenate(digests)
        for column in (self.counts.astype("<i8"), self.sizes.astype("<i8"), self._digests):
            digest.update(column.tobytes())
        self.fingerprint = digest.hexdigest()

    def append(self, shards: Iterable[Any]) -> Manifest:
        """Return a manifest with the shards of this one, followed by those of the given shards that it lacks.

        To train on the new shards in a run that has begun, load its state by ``load_state_dict(state, amend=True)``.
        The next epoch of the dataset reads them.

        Args:
            shards: descriptions of shards, as for a new manifest; some may be in this one.

        Raises:
            ValueError: a shard has changed.

        Examples:
            >>> old = Manifest([ShardInfo("a.tar", samples=3, bytes=10240)])
            >>> old.append([ShardInfo("b.tar", samples=2, bytes=10240), *old.entries]).urls
            ['a.tar', 'b.tar']
        """
        known, added = {_place_of(entry.url): entry for entry in self.entries}, list[Any]()
        for shard in shards:
            url, *facts, digest = _facts_of(shard)
            if (old := known.get(_place_of(url))) is None:
                added.append(shard)
            elif facts != [old.samples, old.bytes] or digest not in (None, old.sha256 or digest):
                before, now = (
                    f"{plural(samples, 'sample')} in {size} bytes" + (f" with the digest {sha256}" if sha256 else "")
                    for samples, size, sha256 in ((old.samples, old.bytes, old.sha256), (*facts, digest))
                )
                raise ValueError(f"{redact(url)} had {before} and now has {now}. Write new samples to new shards")
        return Manifest([*self.entries, *added])

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self.counts)

    def __eq__(self, other: object) -> bool:
        """Whether two manifests have the same entries."""
        if not isinstance(other, Manifest):
            return NotImplemented
        return self.fingerprint == other.fingerprint and self.urls == other.urls

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"<Manifest of {plural(len(self), 'shard')}, {plural(self.samples, 'sample')}, {self.bytes} bytes>"

    @property
    def entries(self) -> tuple[ShardInfo, ...]:
        """The shards as objects, which are created on each access."""
        return tuple(ShardInfo(url, samples, size, digest or "") for url, samples, size, digest in self._rows())

    @property
    def urls(self) -> list[str]:
        """The URLs of the shards."""
        return [url for names in self._names for url in names.split("\0")]

    def _rows(self) -> Iterator[tuple[str, int, int, str | None]]:
        digests = (each.decode() or None for each in self._digests)
        return zip(self.urls, self.counts.tolist(), self.sizes.tolist(), digests, strict=True)

    @property
    def samples(self) -> int:
        """The number of samples in all shards."""
        return _sum(self.counts)

    @property
    def bytes(self) -> int:
        """The total size of the shards in bytes."""
        return _sum(self.sizes)


def _facts_of(shard: Any) -> tuple[Any, Any, Any, Any]:
    """Return the facts of a description of a shard."""
    if isinstance(shard, str | os.PathLike):
        raise TypeError(
            f"A Manifest is built from descriptions of shards, not from the name {redact(os.fspath(shard))!r}. "
            f"Pass the results of build_indexes"
        )
    return shard.url, shard.samples, shard.bytes, shard.sha256 or None


def _base_names(names: str, first: str) -> str:
    """Return the last parts of URLs, which NUL bytes separate, given the first of them."""
    folder = first[: first.rfind("/") + 1]
    count = names.count("\0") + 1
    if names.count("/") == count * folder.count("/") and f"\0{names}".count(f"\0{folder}") == count:
        return f"\0{names}".replace(f"\0{folder}", "\0")[1:]  # faster, if they are in the same folder
    return "\0".join([url[url.rfind("/") + 1 :] for url in names.split("\0")])


def _sum(column: npt.NDArray[np.int64]) -> int:
    """Return the exact sum of a column, which may be larger than its numbers can be."""
    return (int((column >> 32).sum()) << 32) + int((column & 0xFFFFFFFF).sum())


def _place_of(url: str) -> str:
    path = local_path(url)
    return url if path is None else str(Path(path).absolute())


def _are_valid(urls: Sequence[Any], numbers: Sequence[Any], digests: Sequence[Any]) -> bool:
    """Whether the facts of several shards are valid; a missing digest is None."""
    are_counts = {*map(type, numbers)} == {int} and min(numbers) >= 0 and max(numbers) < 1 << 63
    are_digests = all(each is None or (type(each) is str and DIGEST.fullmatch(each)) for each in {*digests})
    return {*map(type, urls)} == {str} and "\0" not in "".join(urls) and are_counts and are_digests


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
        "shards": [],
    }
    before, after = json.dumps(facts, indent=1).rsplit("]", 1)
    rows = [
        json.dumps([within(folder, shard), *numbers], separators=(",", ":")) for shard, *numbers in manifest._rows()
    ]
    text = f"{before}\n  {NEXT_SHARD[:-1].decode().join(rows)}\n ]{after}\n"
    write_sidecar(os.fspath(url), text.encode(), storage_options)


def read_manifest(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, allow_local_files: bool = True
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
        UnsafeInputError: a manifest from another host names a command; or ``allow_local_files`` is False and a URL is
            not that of a file on a network.
    """
    path = os.fspath(url)
    check_url(path, allow_local_files=allow_local_files)
    name = redact(path)
    content = _read_on_host(path, storage_options)
    folder = folder_of(path)
    schemes: dict[str, str] = {}
    try:
        found = SHARDS.search(content)
        start, end = (found.end(), content.rfind(b"]")) if found else (len(content), len(content))
        facts = json.loads(content[:start] + content[end:])  # with an empty list of shards
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise ValueError("it is JSON of another kind")
        if facts.get("version") != VERSION:
            raise ValueError(
                f"it has version {facts.get('version')!r}, but this version of wds-datapipes reads {VERSION}"
            )
        manifest = Manifest.__new__(Manifest)
        manifest._store(_read_blocks(content, start, end, folder, schemes))
        recorded = (facts["shards"], facts["fingerprint"], facts["samples"], facts["bytes"])
        if recorded != ([], manifest.fingerprint, manifest.samples, manifest.bytes):
            raise ValueError("its totals or its fingerprint do not match its shards")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptSidecarError(f"{name} is not a manifest, or is damaged: {error}. Write it again") from error
    for shard in schemes.values() if allow_local_files else manifest.urls:
        check_url(shard, allow_local_files=allow_local_files, listed_in=path)
    return manifest


def _read_on_host(path: str, storage_options: Mapping[str, Any] | None) -> bytes:
    """Return the content of a file, which one rank of each host requests from a store."""
    if local_path(path) is not None:
        return read_sidecar(path, storage_options)

    def read(_: object) -> str:
        return read_sidecar(path, storage_options).decode("latin-1")  # any bytes

    return share_on_host(f"reads {redact(path)}", read, path, storage_options).encode("latin-1")


def _read_blocks(
    content: bytes, start: int, end: int, folder: str, schemes: dict[str, str]
) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the columns of the shards that a file lists in blocks, joined to a folder; collect a URL of each scheme."""
    while start < end:
        cut = content.find(NEXT_SHARD, start + STEP_BYTES, end)  # JSON has no line breaks inside strings
        cut = end if cut < 0 else cut
        if not (rows := json.loads(b"[%b]" % content[start:cut])):
            return
        urls, *facts = zip(*rows, strict=True)
        # `split_scheme` only considers the text before the first colon and two characters after it.
        first, last = min(urls), max(urls)
        are_alike = ":" in first[:-2] and last.startswith(first[: first.find(":") + 3])
        heads = {url[: url.find(":") + 3]: url for url in ([first] if are_alike else urls)}
        are_relative = {join_name("/", head) != head for head in heads}
        if True in are_relative:
            urls = tuple([folder + url if False not in are_relative else join_name(folder, url) for url in urls])
        schemes.update({head: join_name(folder, url) for head, url in heads.items()})
        yield [urls, *facts]
        start = cut + 1
