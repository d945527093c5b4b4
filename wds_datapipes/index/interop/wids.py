"""JSON indexes of webdataset's ``wids`` and ``widsindex``: shards with their counts, sizes and digests."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from typing import Any, NamedTuple

from wds_datapipes.errors import CorruptSidecarError, StaleSidecarError, UnsafeInputError
from wds_datapipes.index.build import Depth, build_index
from wds_datapipes.index.manifest import Manifest, ManifestEntry
from wds_datapipes.io.openers import open_url, redact
from wds_datapipes.io.remote.range_reader import file_facts
from wds_datapipes.io.small_files import folder_of, join_name, read_sidecar, within, write_sidecar
from wds_datapipes.io.url_safety import check_url
from wds_datapipes.parallel.map_shards import Shards, map_shards, resolve_shards

__all__ = ["read_wids_index", "write_wids_index"]

KIND, VERSION = "wids-shard-index-v1", 1


class _ListedShard(NamedTuple):
    """A shard in an index of wids."""

    url: str
    samples: int
    bytes: int | None
    md5: str | None


def write_wids_index(
    urls: Shards,
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    digest: bool = True,
    executor: Executor | None = None,
    max_workers: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write the JSON file that ``wids.ShardListDataset`` reads, as ``widsindex create`` does.

    Args:
        urls: the shards in order, a pattern or an iterable of URLs.
        path: the file to write. Shards in or below its folder are named relative to it, as wids expects.
        name: the name of the dataset.
        digest: compute the MD5 of each shard, which reads all of it; wids does not need it.
        executor: any executor to read the shards; by default, processes on this host.
        max_workers: the number of processes.
        storage_options: passed to remote file systems.

    Returns:
        The shards with their counts and sizes.

    Raises:
        ShardError: a shard cannot be read.
        MissingSidecarError: the file cannot be written.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "txt": "one"}])
        >>> write_wids_index([url], "index.json", name="letters")
        <Manifest of 1 shards, 1 samples, 10240 bytes>
        >>> read_wids_index("index.json").urls
        ['a.tar']
    """
    shards = resolve_shards(urls)
    found: dict[int, _ListedShard] = {}
    for number, task in map_shards(
        _describe_shard, shards, (digest, storage_options), executor=executor, num_workers=max_workers
    ):
        found[number] = task.result()
    folder = folder_of(os.fspath(path))
    listed = [found[number] for number in sorted(found)]
    facts: dict[str, Any] = {"__kind__": KIND, "wids_version": VERSION}
    facts |= {"name": name} if name is not None else {}
    facts["shardlist"] = [
        {"url": within(folder, each.url), **({"md5sum": each.md5} if digest else {})}
        | {"nsamples": each.samples, "filesize": each.bytes}
        for each in listed
    ]
    write_sidecar(os.fspath(path), (json.dumps(facts, indent=2) + "\n").encode(), storage_options)
    return Manifest(ManifestEntry(each.url, each.samples, each.bytes or 0) for each in listed)


def read_wids_index(
    path: str | os.PathLike[str],
    *,
    depth: Depth = "headers",
    executor: Executor | None = None,
    max_workers: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Manifest:
    """Read the JSON file of wids, and verify it against the shards.

    Args:
        path: the file, a path or a URL. Names of shards are relative to its ``base``, or else to its folder.
        depth: ``"size"`` compares the sizes and trusts the counts; ``"headers"`` also counts the samples, by reading
            the headers; ``"bytes"`` also compares the digests, if there are any.
        executor: any executor to read the shards; by default, processes on this host.
        max_workers: the number of processes.
        storage_options: passed to remote file systems.

    Raises:
        MissingSidecarError: the file, or one that it refers to, cannot be read.
        CorruptSidecarError: the file is damaged or not an index of wids.
        UnsafeInputError: a file from another host names a command as a shard.
        StaleSidecarError: the file does not match a shard.
        ShardError: a shard cannot be read.
    """
    if depth not in ("size", "headers", "bytes"):
        raise ValueError(f'depth must be "size", "headers" or "bytes", not {depth!r}')
    listed = list(_list_shards(os.fspath(path), storage_options))
    name = redact(os.fspath(path))
    entries: dict[int, ManifestEntry] = {}
    urls = [each.url for each in listed]
    work = ({each.url: each for each in listed}, depth, name, storage_options)
    for number, task in map_shards(_verify_shard, urls, work, executor=executor, num_workers=max_workers):
        entries[number] = task.result()
    return Manifest(entries[number] for number in sorted(entries))


def _list_shards(path: str, storage_options: Mapping[str, Any] | None, depth: int = 0) -> Iterator[_ListedShard]:
    """Yield the shards that a file lists, and then those of the files that it refers to."""
    name = redact(path)
    try:
        facts = json.loads(read_sidecar(path, storage_options))
        if not isinstance(facts, dict) or facts.get("wids_version", VERSION if depth else None) != VERSION:
            raise ValueError(f"it has no wids_version of {VERSION}")
        base = facts.get("base")
        shards = list(_shards(facts.get("shardlist", []), _base_folder(base, path)))
        for part in facts.get("datasets", []):
            if "source_url" in part:
                if depth:
                    raise ValueError("it refers to a file that refers to another one")
                other = join_name(folder_of(path), part["source_url"])
                check_url(other, listed_in=path)
                shards += _list_shards(other, storage_options, 1)
            else:
                shards += _shards(part["shardlist"], _base_folder(part.get("base", base), path))
        if not shards:
            raise ValueError("it lists no shards")
        if len({each.url for each in shards}) < len(set(shards)):
            raise ValueError("it has contradictory entries for a shard")
        for each in shards:
            check_url(each.url, listed_in=path)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CorruptSidecarError | UnsafeInputError):
            raise
        raise CorruptSidecarError(f"{name} is not an index of wids, or is damaged: {error}") from error
    yield from shards


def _base_folder(base: str | None, path: str) -> str:
    """Return the folder that names are relative to."""
    return folder_of(path) if base is None else join_name(folder_of(path), base.rstrip("/") + "/")


def _shards(found: list[dict[str, Any]], folder: str) -> Iterator[_ListedShard]:
    for each in found:
        listed = _ListedShard(
            join_name(folder, each["url"]), each["nsamples"], each.get("filesize"), each.get("md5sum")
        )
        numbers = [listed.samples] if listed.bytes is None else [listed.samples, listed.bytes]
        if any(type(number) is not int or number < 0 for number in numbers) or type(listed.md5) not in (
            str,
            type(None),
        ):
            raise ValueError(f"its entry {each!r} is not valid")
        yield listed


def _describe_shard(url: str, digest: bool, storage_options: Mapping[str, Any] | None) -> _ListedShard:
    index = build_index(url, on_duplicate="first", on_repeated_key="ignore", storage_options=storage_options)
    return _ListedShard(url, len(index), index.facts.bytes, _md5(url, storage_options) if digest else None)


def _verify_shard(
    url: str, expected: Mapping[str, _ListedShard], depth: Depth, name: str, storage_options: Mapping[str, Any] | None
) -> ManifestEntry:
    """Return the entry of a shard, or raise if it does not match the file."""
    listed = expected[url]
    size = file_facts(url, storage_options=storage_options).bytes
    if None not in (size, listed.bytes) and size != listed.bytes:
        raise StaleSidecarError(
            f"{name} says that {redact(url)} has {listed.bytes} bytes, but it has {size}. Build it again"
        )
    if depth != "size":
        found = _describe_shard(url, depth == "bytes" and listed.md5 is not None, storage_options)
        if found.samples != listed.samples:
            raise StaleSidecarError(
                f"{name} says that {redact(url)} has {listed.samples} samples, but it has {found.samples}. Build it "
                f"again"
            )
        if found.md5 is not None and found.md5 != listed.md5:
            raise StaleSidecarError(
                f"{name} says that {redact(url)} has the MD5 {listed.md5}, but it has {found.md5}. Build it again"
            )
        size = found.bytes
    return ManifestEntry(url, listed.samples, size if size is not None else listed.bytes or 0)


def _md5(url: str, storage_options: Mapping[str, Any] | None) -> str:
    options: dict[str, Any] = {} if storage_options is None else {"storage_options": storage_options}
    digest = hashlib.md5(usedforsecurity=False)
    with open_url(url, **options) as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
