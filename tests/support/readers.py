"""What tests read: the bytes of a file, and the keys and fields of samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from wds_datapipes import ShardList
from wds_datapipes.io.openers import open_url
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.shards.loading import read_shards


def bytes_of(url: str, **options: Any) -> bytes:
    """Return the bytes of a file, which is read in small parts."""
    with open_url(url, **options) as stream:
        return b"".join(iter(lambda: stream.read(1000), b""))


def keys_of(samples: Iterable[dict[str, Any]]) -> list[str]:
    return [sample["__key__"] for sample in samples]


def keys_in(urls: str | list[str], **options: Any) -> list[str]:
    """Return the keys of the samples in shards, which are read with some options."""
    return keys_of(ShardList(urls).load_wds_shards(**options).group_samples())


def samples_in(*urls: str) -> list[dict[str, Any]]:
    """Return the samples in shards, with their keys and fields only."""
    samples = group_samples(read_shards(urls))
    return [{f: v for f, v in sample.items() if f == "__key__" or f[:2] != "__"} for sample in samples]
