"""The shards of a dataset and their numbers of samples, from a manifest or from indexes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from wds_datapipes.errors import StaleSidecarError
from wds_datapipes.index.build_many import build_indexes, find_index
from wds_datapipes.index.file_format import index_url
from wds_datapipes.index.manifest import Manifest
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.parallel.map_shards import resolve_shards

__all__ = ["shard_sizes"]


def shard_sizes(
    shards: Manifest | str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    indexes: Literal["build", "require"],
    folder: str | os.PathLike[str] | None,
    storage_options: Mapping[str, Any] | None,
    limits: ReadLimits = DEFAULT_LIMITS,
) -> list[tuple[str, int]]:
    """Return the shards and their numbers of samples, which costs no access to a shard if there is a manifest.

    Args:
        shards: a manifest, a pattern, or the URLs.
        indexes: build missing and stale indexes, or require valid ones.
        folder: the directory of the indexes; by default, that of the shards.
        storage_options: passed to remote file systems.
        limits: the limits for the shards.

    Raises:
        StaleSidecarError: a shard has no valid index.
        ShardError: a shard cannot be indexed.
    """
    if isinstance(shards, Manifest):
        return [(entry.url, entry.samples) for entry in shards.entries]
    urls = resolve_shards(shards)
    if indexes == "build":
        results = build_indexes(urls, folder=folder, storage_options=storage_options, limits=limits)
        return [(result.url, result.samples) for result in results]
    found = []
    for url in urls:
        path = index_url(url, folder)
        index = find_index(url, path, storage_options=storage_options)
        if index is None:
            raise StaleSidecarError(
                f"{redact(path)} is missing, damaged, stale or built with other options. Build it with "
                f'`wds-datapipes index`, or pass indexes="build"'
            )
        found.append((url, len(index)))
    return found
