"""JSON indexes of webdataset's ``wids`` and ``widsindex``: shards with their counts, sizes and digests."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from typing import Any, NamedTuple

from wds_datapipes.errors import CorruptSidecarError, RefusedURLError, WrongSidecarError
from wds_datapipes.index.build import Depth, build_index
from wds_datapipes.index.manifest import Manifest, ManifestEntry
from wds_datapipes.io.openers import open_url, redact
from wds_datapipes.io.remote.range_reader import file_facts
from wds_datapipes.io.small_files import folder_of, join_name, read_sidecar, within, write_sidecar
from wds_datapipes.io.url_safety import refuse_commands
from wds_datapipes.parallel.map_shards import Shards, each_shard, listed_shards

__all__ = ["read_wids_index", "write_wids_index"]

KIND, VERSION = "wids-shard-index-v1", 1


class _Told(NamedTuple):
    """A shard as a file of wids describes it."""

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
    """Write the JSON file that ``wids.ShardListDataset`` takes, as ``widsindex create`` does.

    Args:
        urls: the shards, a pattern or an iterable of URLs; they stay in this order.
        path: the file to write. Shards in its folder or below it are named from there, as wids expects.
        name: what the dataset is called.
        digest: form the MD5 of each shard, for which all of it is read; wids does not need it.
        executor: who reads the shards; by default processes of this host.
        max_workers: how many.
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
    shards = listed_shards(urls)
    found: dict[int, _Told] = {}
    for number, task in each_shard(
        _describe_shard, shards, (digest, storage_options), executor=executor, max_workers=max_workers
    ):
        found[number] = task.result()
    folder = folder_of(os.fspath(path))
    told = [found[number] for number in sorted(found)]
    facts: dict[str, Any] = {"__kind__": KIND, "wids_version": VERSION}
    facts |= {"name": name} if name is not None else {}
    facts["shardlist"] = [
        {"url": within(folder, each.url), **({"md5sum": each.md5} if digest else {})}
        | {"nsamples": each.samples, "filesize": each.bytes}
        for each in told
    ]
    write_sidecar(os.fspath(path), (json.dumps(facts, indent=2) + "\n").encode(), storage_options)
    return Manifest(ManifestEntry(each.url, each.samples, each.bytes or 0) for each in told)


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
        path: the file, a path or a URL. The shards' names count from its ``base``, or else from its folder.
        depth: ``"size"`` compares sizes, and takes the counts for right; ``"headers"`` counts the samples by the
            headers too; ``"bytes"`` forms the digests too, where there are any.
        executor: who reads the shards; by default processes of this host.
        max_workers: how many.
        storage_options: passed to remote file systems.

    Raises:
        MissingSidecarError: it cannot be read, or a file that it refers to.
        CorruptSidecarError: it is none of wids, or is damaged.
        RefusedURLError: it is not a file of this host, and names a command as a shard.
        WrongSidecarError: it says something of a shard that is not so.
        ShardError: a shard cannot be read.
    """
    if depth not in ("size", "headers", "bytes"):
        raise ValueError(f'depth is "size", "headers" or "bytes", not {depth!r}')
    told = list(_listed_shards(os.fspath(path), storage_options))
    where = redact(os.fspath(path))
    entries: dict[int, ManifestEntry] = {}
    urls = [each.url for each in told]
    work = ({each.url: each for each in told}, depth, where, storage_options)
    for number, task in each_shard(_matching_shard, urls, work, executor=executor, max_workers=max_workers):
        entries[number] = task.result()
    return Manifest(entries[number] for number in sorted(entries))


def _listed_shards(path: str, storage_options: Mapping[str, Any] | None, depth: int = 0) -> Iterator[_Told]:
    """Yield the shards that a file lists, and then those of the files that it refers to."""
    where = redact(path)
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
                refuse_commands(other, path)
                shards += _listed_shards(other, storage_options, 1)
            else:
                shards += _shards(part["shardlist"], _base_folder(part.get("base", base), path))
        if not shards:
            raise ValueError("it names no shard")
        if len({each.url for each in shards}) < len(set(shards)):
            raise ValueError("it says different things of one shard")
        for each in shards:
            refuse_commands(each.url, path)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CorruptSidecarError | RefusedURLError):
            raise
        raise CorruptSidecarError(f"{where} is no index of wids, or is damaged: {error}") from error
    yield from shards


def _base_folder(base: str | None, path: str) -> str:
    """Return the folder that names are relative to."""
    return folder_of(path) if base is None else join_name(folder_of(path), base.rstrip("/") + "/")


def _shards(found: list[dict[str, Any]], folder: str) -> Iterator[_Told]:
    for each in found:
        told = _Told(join_name(folder, each["url"]), each["nsamples"], each.get("filesize"), each.get("md5sum"))
        numbers = [told.samples] if told.bytes is None else [told.samples, told.bytes]
        if any(type(number) is not int or number < 0 for number in numbers) or type(told.md5) not in (str, type(None)):
            raise ValueError(f"its entry {each!r} is not that of a shard")
        yield told


def _describe_shard(url: str, digest: bool, storage_options: Mapping[str, Any] | None) -> _Told:
    index = build_index(url, on_duplicate="first", on_repeated_key="ignore", storage_options=storage_options)
    return _Told(url, len(index), index.facts.bytes, _md5(url, storage_options) if digest else None)


def _matching_shard(
    url: str, expected: Mapping[str, _Told], depth: Depth, where: str, storage_options: Mapping[str, Any] | None
) -> ManifestEntry:
    """Return the facts about a shard, if it matches the file."""
    told = expected[url]
    size = file_facts(url, storage_options=storage_options).bytes
    if None not in (size, told.bytes) and size != told.bytes:
        raise WrongSidecarError(
            f"{where} says that {redact(url)} has {told.bytes} bytes, and it has {size}. Build it again"
        )
    if depth != "size":
        found = _describe_shard(url, depth == "bytes" and told.md5 is not None, storage_options)
        if found.samples != told.samples:
            raise WrongSidecarError(
                f"{where} says that {redact(url)} has {told.samples} samples, and it has {found.samples}. Build it "
                f"again"
            )
        if found.md5 is not None and found.md5 != told.md5:
            raise WrongSidecarError(
                f"{where} says that {redact(url)} has the MD5 {told.md5}, and it has {found.md5}. Build it again"
            )
        size = found.bytes
    return ManifestEntry(url, told.samples, size if size is not None else told.bytes or 0)


def _md5(url: str, storage_options: Mapping[str, Any] | None) -> str:
    options: dict[str, Any] = {} if storage_options is None else {"storage_options": storage_options}
    digest = hashlib.md5(usedforsecurity=False)
    with open_url(url, **options) as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
