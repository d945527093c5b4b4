"""JSON indexes of webdataset's ``wids`` and ``widsindex``: shards with their counts, sizes and digests."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from typing import Any

from wds_datapipes.errors import CorruptSidecarError, UnsafeInputError
from wds_datapipes.index.build import Depth, build_index
from wds_datapipes.index.manifest import Manifest, ManifestEntry, check_manifest
from wds_datapipes.index.options import IndexOptions
from wds_datapipes.io.openers import redact
from wds_datapipes.io.small_files import folder_of, join_name, read_sidecar, within, write_sidecar
from wds_datapipes.io.url_safety import check_url
from wds_datapipes.parallel.map_shards import Shards, map_shards, resolve_shards

KIND, VERSION = "wids-shard-index-v1", 1


def write_wids_index(
    urls: Shards,
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    executor: Executor | None = None,
    num_workers: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write the JSON file that ``wids.ShardListDataset`` reads, as ``widsindex create`` does, without ``md5sum``.

    Args:
        urls: the shards in order, a pattern or an iterable of URLs.
        path: the file to write. Shards in or below its folder are named relative to it, as wids expects.
        name: the name of the dataset.
        executor: any executor to read the shards; by default, processes on this host.
        num_workers: the number of processes; 0 reads the shards in this process.
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
    found: dict[int, ManifestEntry] = {}
    work = (storage_options,)
    for number, task in map_shards(_describe_shard, shards, work, executor=executor, num_workers=num_workers):
        found[number] = task.result()
    folder = folder_of(os.fspath(path))
    listed = Manifest(found[number] for number in sorted(found))
    facts: dict[str, Any] = {"__kind__": KIND, "wids_version": VERSION}
    facts |= {"name": name} if name is not None else {}
    facts["shardlist"] = [
        {"url": within(folder, each.url), "nsamples": each.samples, "filesize": each.bytes} for each in listed.entries
    ]
    write_sidecar(os.fspath(path), (json.dumps(facts, indent=2) + "\n").encode(), storage_options)
    return listed


def read_wids_index(
    path: str | os.PathLike[str],
    *,
    depth: Depth = "headers",
    executor: Executor | None = None,
    num_workers: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Manifest:
    """Read the JSON file of wids, and verify it against the shards.

    Args:
        path: the file, a path or a URL. Names of shards are relative to its ``base``, or else to its folder.
        depth: ``"size"`` compares the sizes and trusts the counts; ``"headers"`` also counts the samples, by reading
            the headers, as `check_manifest` does.
        executor: any executor to read the shards; by default, processes on this host.
        num_workers: the number of processes; 0 reads the shards in this process.
        storage_options: passed to remote file systems.

    Raises:
        MissingSidecarError: the file, or one that it refers to, cannot be read.
        CorruptSidecarError: the file is damaged or not an index of wids.
        UnsafeInputError: a file from another host names a command as a shard.
        StaleSidecarError: the file does not match a shard, or a shard cannot be read.
    """
    manifest = Manifest(_list_shards(os.fspath(path), storage_options))
    reading: dict[str, Any] = {"executor": executor, "num_workers": num_workers, "storage_options": storage_options}
    check_manifest(manifest, depth=depth, **reading)
    return manifest


def _list_shards(path: str, storage_options: Mapping[str, Any] | None, depth: int = 0) -> Iterator[ManifestEntry]:
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


def _shards(found: list[dict[str, Any]], folder: str) -> Iterator[ManifestEntry]:
    for each in found:
        listed = ManifestEntry(join_name(folder, each["url"]), each["nsamples"], each.get("filesize") or 0)
        if any(type(number) is not int or number < 0 for number in (listed.samples, listed.bytes)):
            raise ValueError(f"its entry {each!r} is not valid")
        yield listed


def _describe_shard(url: str, storage_options: Mapping[str, Any] | None) -> ManifestEntry:
    options = IndexOptions(on_duplicate="first")
    index = build_index(url, options, on_repeated_key="ignore", storage_options=storage_options)
    return ManifestEntry(url, len(index), index.facts.bytes or 0)
