"""Shards of an indexed dataset: their numbers of samples, and access to samples by number."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Literal

import numpy as np

from wds_datapipes.errors import EmptySourceError, StaleSidecarError
from wds_datapipes.fingerprint.values import fingerprint
from wds_datapipes.index.batch_share import CHUNK
from wds_datapipes.index.build_many import build_indexes, find_index
from wds_datapipes.index.dataset_reader import DatasetReader
from wds_datapipes.index.file_format import index_url
from wds_datapipes.index.manifest import Manifest
from wds_datapipes.index.permutation import Numbers
from wds_datapipes.index.selection import Select, Selection
from wds_datapipes.io.openers import local_path, redact
from wds_datapipes.parallel.map_shards import resolve_shards
from wds_datapipes.types import Sample

__all__ = ["IndexedShards", "shard_sizes"]

#: About how many bytes of local and of remote shards, which are read concurrently, are read at a time.
LOCAL_BYTES, REMOTE_BYTES = 1 << 20, 16 << 20


class IndexedShards:
    """The shards of a dataset and their numbers of samples; each process has its own reader of them.

    Args:
        sizes: the URL of each shard, and its number of samples.
        select: which samples; by default all.
        options: those of `DatasetReader`.

    Attributes:
        urls: the URL of each shard.
        sizes: the number of selected samples in each shard.

    Raises:
        EmptySourceError: there are no samples, or none is selected.
    """

    def __init__(self, sizes: list[tuple[str, int]], *, select: Select | None = None, **options: Any) -> None:
        self.urls = [url for url, _ in sizes]
        self._all_sizes = self.sizes = np.array([size for _, size in sizes], np.int64)
        self._options = options
        self._reader: tuple[int, DatasetReader] | None = None
        self._selection: Selection | None = None
        if select is not None and self._all_sizes.any():
            with self.open() as reader:
                self._selection = Selection(select, self._all_sizes, read_index=reader.index_of)
            self.sizes = self._selection.sizes
            if not self.sizes.any():
                raise EmptySourceError(f"select chooses none of the {self._all_sizes.sum()} samples")
        self._ends = np.cumsum(self.sizes)
        is_local = all(local_path(url) is not None for url in self.urls)
        self._chunk_bytes = LOCAL_BYTES if is_local else REMOTE_BYTES
        if not len(self):
            raise EmptySourceError(f"There are no samples in {len(sizes)} shards. Check the pattern of the shards")

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reader": None}

    def open(self) -> DatasetReader:
        """Return a reader of all shards."""
        return DatasetReader(self.urls, self._all_sizes, **self._options)

    def numbers_in_shard(self, shards: Numbers, places: Numbers) -> Numbers:
        """Return the numbers of samples in their shards, from their places among the selected samples of the shards."""
        return places if self._selection is None else self._selection.find(shards, places)

    def step_after(self, count: int, size: int) -> int:
        """Return how many samples to read at a time, after ``count`` samples had a ``size`` in bytes."""
        return min(max(self._chunk_bytes * count // max(size, 1), 1), CHUNK)

    def sample(self, number: int) -> Sample:
        """Return a sample by its number in the order of the shards."""
        return self.samples([number])[0]

    def samples(self, numbers: list[int]) -> list[Sample]:
        """Return samples by their numbers in the order of the shards."""
        count = len(self)
        for number in numbers:
            if not -count <= number < count:
                raise IndexError(f"The dataset has {count} samples, so there is no sample {number}")
        wanted = np.array([number % count for number in numbers])
        shards = np.searchsorted(self._ends, wanted, "right")
        if self._reader is None or self._reader[0] != os.getpid():  # a forked process needs its own connections
            self._reader = os.getpid(), self.open()
        places = wanted - (self._ends - self.sizes)[shards]
        return self._reader[1].read(shards, self.numbers_in_shard(shards, places))

    def fingerprint(self) -> str:
        """Return the number of shards and samples, the first and last URL, and a digest of all."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        text = f"{len(self)} samples in {len(self.urls)} shards from {redact(self.urls[0])} to {redact(self.urls[-1])}"
        selection = [] if self._selection is None else [self._selection.fingerprint()]
        return f"{text} #{fingerprint([self.urls, self.sizes.tolist(), *selection])[:12]}"


def shard_sizes(
    shards: Manifest | str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    indexes: Literal["build", "require"],
    folder: str | os.PathLike[str] | None,
    storage_options: Mapping[str, Any] | None,
) -> list[tuple[str, int]]:
    """Return the shards and their numbers of samples, which costs no access to a shard if there is a manifest.

    Args:
        shards: a manifest, a pattern, or the URLs.
        indexes: build missing and stale indexes, or require valid ones.
        folder: the directory of the indexes; by default, that of the shards.
        storage_options: passed to remote file systems.

    Raises:
        StaleSidecarError: a shard has no valid index.
        ShardError: a shard cannot be indexed.
    """
    if isinstance(shards, Manifest):
        return [(entry.url, entry.samples) for entry in shards.entries]
    urls = resolve_shards(shards)
    if indexes == "build":
        results = build_indexes(urls, folder=folder, storage_options=storage_options)
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
