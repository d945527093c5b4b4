"""Dataset manifest: the shards, their sizes and digests, and a fingerprint of the dataset."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wds_datapipes.arguments import check_path, checks_calls
from wds_datapipes.errors import CorruptSidecarError, plural
from wds_datapipes.io.magic_numbers import BEGINNING, describe_kind
from wds_datapipes.io.once_per_host import share_on_host
from wds_datapipes.io.openers import redact
from wds_datapipes.io.sidecars import folder_of, join_name, read_sidecar, within, write_sidecar
from wds_datapipes.io.urls import check_url, local_path
from wds_datapipes.types import ShardInfo

FORMAT, VERSION = "wds-datapipes manifest", 2
#: How many entries, or bytes of a file, are converted at a time: a million entries would take 500 MB as objects.
ENTRIES, STEP_BYTES = 256, 1 << 14
#: The beginning of the list of shards in a file, and that of every shard but the first.
SHARDS, NEXT_SHARD = re.compile(rb'"shards"\s*:\s*\['), b",\n  ["
DIGEST = re.compile("[0-9a-f]{64}")


@checks_calls
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
        self._store((zip(*rows, strict=True) for rows in iter(lambda: list(islice(left, ENTRIES)), [])), _split_folder)

    def _store(self, blocks: Iterable[Any], split: Callable[[Sequence[str]], tuple[str, str]]) -> None:
        """Store the facts of the shards, which come in blocks of columns, given how to split their URLs."""
        numbers, digests = [np.empty((2, 0), np.int64)], [np.empty(0, "S1")]
        self._names, digest = list[tuple[str, str]](), hashlib.sha256()
        for urls, samples, totals, sha256s in blocks:
            if (found := _valid_numbers(urls, samples + totals, sha256s)) is None:
                rows = zip(urls, samples, totals, sha256s, strict=True)
                invalid = next(row for row in rows if _valid_numbers(row[:1], row[1:3], row[3:]) is None)
                raise ValueError(f"its entry {ShardInfo(*invalid)._asdict()} is not valid")
            folder, names = split(urls)
            self._names.append((folder, names))
            if "/" in names:
                names = "\0".join([name[name.rfind("/") + 1 :] for name in names.split("\0")])
            digest.update(f"{names}\0".encode("utf-8", "surrogatepass"))
            numbers.append(found.reshape(2, -1))
            empty = np.zeros(len(urls), "S1")
            digests.append(np.array([each or "" for each in sha256s], "S64") if any(sha256s) else empty)
        self.counts, self.sizes = np.concatenate(numbers, axis=1)
        self._digests: npt.NDArray[np.bytes_] = np.concatenate(digests)
        for column in (self.counts.astype("<i8", copy=False), self.sizes.astype("<i8", copy=False), self._digests):
            digest.update(column.data)
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
        return [folder + name for folder, names in self._names for name in names.split("\0")]

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
    try:
        return shard.url, shard.samples, shard.bytes, shard.sha256 or None
    except AttributeError:
        raise TypeError(
            f"A Manifest is built from descriptions of shards, not from {shard!r:.200}. Pass the results of "
            "build_indexes"
        ) from None


def _split_folder(urls: Sequence[str]) -> tuple[str, str]:
    """Return the folder of the first of some URLs, if all begin with it, and the rest of each, with NUL bytes between.

    If they are in different folders, the folder is "".
    """
    folder, names = urls[0][: urls[0].rfind("/") + 1], "\0".join(urls)
    rests = "\0".join(map(str.removeprefix, urls, repeat(folder)))
    return (folder, rests) if len(names) - len(rests) == len(folder) * len(urls) else ("", names)


def _sum(column: npt.NDArray[np.int64]) -> int:
    """Return the exact sum of a column, which may be larger than its numbers can be."""
    return (int((column >> 32).sum()) << 32) + int((column & 0xFFFFFFFF).sum())


def _place_of(url: str) -> str:
    path = local_path(url)
    return url if path is None else str(Path(path).absolute())


def _valid_numbers(urls: Sequence[Any], numbers: Sequence[Any], digests: Sequence[Any]) -> npt.NDArray[np.int64] | None:
    """Return the numbers of several shards, or None if any of their facts is invalid; a missing digest is None."""
    with suppress(TypeError, struct.error):  # names that are no strings, and numbers that are none or too large
        are_digests = digests.count(None) == len(digests) or all(map(DIGEST.fullmatch, {*digests} - {None}))
        found = np.frombuffer(struct.pack(f"{len(numbers)}q", *numbers), np.int64)  # faster than np.array
        least = found[found.argmin()]  # if that of integers is more than 1, none is a bool
        if are_digests and "\0" not in "".join(urls) and least >= 0 and (least > 1 or bool not in map(type, numbers)):
            return found
    return None


@checks_calls
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
    totals = {name: getattr(manifest, name) for name in ("fingerprint", "samples", "bytes")}
    facts = {"format": FORMAT, "version": VERSION, **totals, "shards": []}
    before, after = json.dumps(facts, indent=1).rsplit("]", 1)
    rows = [json.dumps([within(folder, shard), *rest], separators=(",", ":")) for shard, *rest in manifest._rows()]
    text = f"{before}\n  {NEXT_SHARD[:-1].decode().join(rows)}\n ]{after}\n"
    write_sidecar(os.fspath(url), text.encode(), storage_options)


@checks_calls
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
    path = check_path("url", url)
    check_url(path, allow_local_files=allow_local_files)
    name = redact(path)
    content = _read_on_host(path, storage_options)
    known: dict[str, tuple[str, str]] = {}
    try:
        found = SHARDS.search(content)
        start, end = (found.end(), content.rfind(b"]")) if found else (len(content), len(content))
        facts = json.loads(content[:start] + content[end:])  # with an empty list of shards
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise ValueError("it is JSON of another kind")
        if (version := facts.get("version")) != VERSION:
            raise ValueError(f"it has version {version!r}, but this version of wds-datapipes reads {VERSION}")
        manifest = Manifest.__new__(Manifest)
        manifest._store(_read_blocks(content, start, end), partial(_locate, folder_of(path), known))
        recorded = (facts["shards"], facts["fingerprint"], facts["samples"], facts["bytes"])
        if recorded != ([], manifest.fingerprint, manifest.samples, manifest.bytes):
            raise ValueError("its totals or its fingerprint do not match its shards")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        kind = describe_kind(content[:BEGINNING], may_be_text=True)
        raise CorruptSidecarError(
            f"{name} is not a manifest, or is damaged: {error}. {f'{kind}. ' if kind else ''}Write it again"
        ) from error
    for shard in map("".join, known.values()) if allow_local_files else manifest.urls:
        check_url(shard, allow_local_files=allow_local_files, listed_in=path)
    return manifest


def _read_on_host(path: str, storage_options: Mapping[str, Any] | None) -> bytes:
    """Return the content of a file, which one rank of each host requests from a store."""
    if local_path(path) is not None:
        return read_sidecar(path, storage_options)

    def read(_: object) -> str:
        return read_sidecar(path, storage_options).decode("latin-1")  # any bytes

    return share_on_host(f"reads {redact(path)}", read, path, storage_options).encode("latin-1")


def _read_blocks(content: bytes, start: int, end: int) -> Iterator[Iterable[tuple[Any, ...]]]:
    """Yield the columns of the shards that a file lists, in blocks."""
    while start < end:
        cut = content.find(NEXT_SHARD, start + STEP_BYTES, end)  # JSON has no line breaks inside strings
        cut = end if cut < 0 else cut
        if not (rows := json.loads(f"[{content[start:cut].decode('utf-8', 'surrogatepass')}]")):
            return
        yield zip(*rows, strict=True)
        start = cut + 1


def _locate(folder: str, known: dict[str, tuple[str, str]], urls: Sequence[str]) -> tuple[str, str]:
    """Join URLs to a folder and split them; for the head of each scheme, collect what is put before it, and a URL."""
    own, names = _split_folder(urls)
    shared = own or os.path.commonprefix(urls)  # noqa: RUF071  characters are meant
    # `split_scheme` only considers the head: the text before the first colon and two characters after it.
    are_alike = ":" in shared[:-2] or (shared != "" and ":" not in own + names and "-" not in urls)
    heads = [url[: url.find(":") + 3] for url in (urls[:1] if are_alike else urls)]
    for head, url in zip(heads, urls, strict=False):
        if head not in known:
            known[head] = join_name(folder, head).removesuffix(head), url
    if are_alike:
        return known[heads[0]][0] + own, names
    return _split_folder([known[head][0] + url for head, url in zip(heads, urls, strict=True)])
