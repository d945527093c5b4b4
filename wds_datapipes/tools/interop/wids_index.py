"""Indexes of wids: the JSON file with the shards of a dataset that ``wids.ShardListDataset`` reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from wds_datapipes.arguments import checks_calls
from wds_datapipes.errors import CorruptSidecarError, UnsafeInputError
from wds_datapipes.index.format.manifest import Manifest
from wds_datapipes.io.openers import redact
from wds_datapipes.io.sidecars import folder_of, join_name, read_sidecar, within, write_sidecar
from wds_datapipes.io.urls import check_url
from wds_datapipes.types import ShardInfo

WIDS_KIND, WIDS_VERSION = "wids-shard-index-v1", 1


@checks_calls
def write_wids_index(
    manifest: Manifest,
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write the JSON file that ``wids.ShardListDataset`` reads, as ``widsindex create`` does, without ``md5sum``.

    Args:
        manifest: the shards with their counts and sizes.
        path: the file to write. Shards in or below its folder are named relative to it, as wids expects.
        name: the name of the dataset.
        storage_options: passed to remote file systems.

    Raises:
        MissingSidecarError: the file cannot be written.

    Examples:
        >>> from wds_datapipes.index import build_indexes
        >>> from wds_datapipes.testing import build_shard
        >>> _ = build_shard("a.tar", [{"__key__": "x", "txt": "one"}])
        >>> write_wids_index(Manifest(build_indexes("a.tar")), "index.json", name="letters")
        >>> read_wids_index("index.json").urls
        ['a.tar']
    """
    folder = folder_of(os.fspath(path))
    facts: dict[str, Any] = {"__kind__": WIDS_KIND, "wids_version": WIDS_VERSION}
    facts |= {"name": name} if name is not None else {}
    facts["shardlist"] = [
        {"url": within(folder, each.url), "nsamples": each.samples, "filesize": each.bytes} for each in manifest.entries
    ]
    write_sidecar(os.fspath(path), (json.dumps(facts, indent=2) + "\n").encode(), storage_options)


@checks_calls
def read_wids_index(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Manifest:
    """Read the JSON file of wids. Its counts are compared with the indexes of the shards when these are opened.

    Args:
        path: the file, a path or a URL. Names of shards are relative to its ``base``, or else to its folder.
        storage_options: passed to remote file systems.

    Raises:
        MissingSidecarError: the file, or one that it refers to, cannot be read.
        CorruptSidecarError: the file is damaged or not an index of wids.
        UnsafeInputError: a file from another host names a command as a shard.
    """
    return Manifest(_list_shards(os.fspath(path), storage_options))


def _list_shards(path: str, storage_options: Mapping[str, Any] | None, depth: int = 0) -> Iterator[ShardInfo]:
    """Yield the shards that a wids file lists, then those of the files that it refers to."""
    try:
        facts = json.loads(read_sidecar(path, storage_options))
        if not isinstance(facts, dict) or facts.get("wids_version", WIDS_VERSION if depth else None) != WIDS_VERSION:
            raise ValueError(f"it has no wids_version of {WIDS_VERSION}")
        folder, base = folder_of(path), facts.get("base")
        shards = list(_entries(facts.get("shardlist", []), folder, base))
        for part in facts.get("datasets", []):
            if "source_url" in part:
                if depth:
                    raise ValueError("it refers to a file that refers to another one")
                other = join_name(folder, part["source_url"])
                check_url(other, listed_in=path)
                shards += _list_shards(other, storage_options, 1)
            else:
                shards += _entries(part["shardlist"], folder, part.get("base", base))
        if not shards:
            raise ValueError("it lists no shards")
        if len({each.url for each in shards}) < len(set(shards)):
            raise ValueError("it has contradictory entries for a shard")
        Manifest(shards)  # checks them
        for each in shards:
            check_url(each.url, listed_in=path)
    except (CorruptSidecarError, UnsafeInputError):
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptSidecarError(f"{redact(path)} is not an index of wids, or is damaged: {error}") from error
    yield from shards


def _entries(found: list[dict[str, Any]], folder: str, base: str | None) -> Iterator[ShardInfo]:
    """Yield the shards of a list, whose names are relative to a base, or to the folder of the file."""
    if base is not None:
        folder = join_name(folder, base.rstrip("/") + "/")
    for each in found:
        yield ShardInfo(join_name(folder, each["url"]), each["nsamples"], each.get("filesize") or 0)
