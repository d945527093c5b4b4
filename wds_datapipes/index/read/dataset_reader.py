"""Dataset reader: reads samples with the fields of all joined datasets, in an epoch or by number."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import tee
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from wds_datapipes.counters import Counters
from wds_datapipes.errors import plural
from wds_datapipes.index.order.indexed_shards import IndexedShards
from wds_datapipes.index.order.sample_order import Chunk
from wds_datapipes.index.read.assemble import Item, join_fields
from wds_datapipes.index.read.sample_reader import SampleReader
from wds_datapipes.io.process_lock import ProcessLock
from wds_datapipes.shard_cache.eviction import Passes
from wds_datapipes.types import Sample

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class DatasetReader:
    """Reads samples of indexed shards, with the fields of their counterparts in joined datasets.

    Args:
        shards: the shards.
        options: arguments of `OpenShards`.
    """

    def __init__(self, shards: IndexedShards, **options: Any) -> None:
        self._shards = shards
        self._readers = [
            SampleReader(
                each.urls, each.read_index, each.access, fields=each.fields, names=each.dataset_names, **options
            )
            for each in self._datasets()
        ]
        self._first, self._lock = self._readers[0].shards, ProcessLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all shards and abort the requests that read ahead."""
        with self._lock:  # threads that read several datasets may all wait for it
            for reader in reversed(self._readers):
                reader.close()

    @property
    def is_closed(self) -> bool:
        """Whether a reader was closed, for example to make space for the copies of another epoch."""
        return any(reader.shards.is_closed for reader in self._readers)

    @property
    def has_copies(self) -> bool:
        """Whether remote shards are copied."""
        return self._first.cache is not None

    def url_of(self, shard: int) -> str:
        """Return the URL of a shard of the first dataset."""
        return self._shards.urls[shard]

    def start(self, function: Callable[[], T]) -> Future[T]:
        """Call a function in a thread if there are remote shards, otherwise now."""
        return self._first.start(function)

    def begin(self, counters: Counters) -> None:
        """Begin an epoch."""
        for reader in self._readers:
            reader.shards.begin(counters)

    def open_next(self, following: DatasetReader, chunk: Chunk, passes: Passes) -> None:
        """Let the reader of the next epoch begin to open the shards of its first samples."""
        for each, reader, other, (found, _) in zip(
            self._datasets(), self._readers, following._readers, self._chunks(chunk), strict=True
        ):
            shards, cache = [*dict.fromkeys(found[found >= 0].tolist())][: each.most_open], reader.shards.cache
            passes.expect([] if cache is None else map(cache.entry, [each.urls[shard] for shard in shards]))
            reader.shards.open_next(other.shards, shards, following.close)

    def stream(self, chunks: Iterable[Chunk]) -> Iterator[Item]:
        """Yield samples with the fields of all joined datasets, with an error in place of each unreadable one.

        A sample without a counterpart in another dataset lacks that dataset's fields. If two datasets have the same
        field, the error is a `DuplicateKeyError`.

        Args:
            chunks: the shards of some samples, or -1, and the samples' numbers in these shards.
        """
        own, *copies = tee(chunks, len(self._readers))
        first, *others = self._readers
        samples = first.stream(own)
        if not copies:
            return samples
        joined = [
            reader.stream(map(join.find, some))
            for reader, join, some in zip(others, self._shards.joins, copies, strict=True)
        ]
        return map(join_fields, samples, zip(*joined, strict=True))

    def _datasets(self) -> list[IndexedShards]:
        return [self._shards, *(join.other for join in self._shards.joins)]

    def _chunks(self, chunk: Chunk) -> list[Chunk]:
        """Return the samples of each dataset for some samples of the first one."""
        return [chunk, *(join.find(chunk) for join in self._shards.joins)]


class ProcessReaders:
    """The readers of a process: for an epoch, for the next epoch, and for access by number.

    Args:
        shards: the shards.
    """

    def __init__(self, shards: IndexedShards) -> None:
        self.shards = shards
        #: The readers for access by number and for the next epoch, with the processes that have opened them.
        self._by_number: tuple[int, DatasetReader] | None = None
        self._ahead: tuple[int, DatasetReader] | None = None
        self._close_ahead: Any = None  # called when this object is deleted
        self._passes = Passes()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_by_number": None, "_ahead": None, "_close_ahead": None}

    @contextmanager
    def open(self, counters: Counters) -> Iterator[DatasetReader]:
        """Open a reader for an epoch."""
        if self.shards.access.cache_dir is not None:
            self._passes.begin(Path(self.shards.access.cache_dir))
        (process, reader), self._ahead = self._ahead or (0, None), None
        if self._close_ahead is not None:
            self._close_ahead.detach()
        if reader is None or process != os.getpid() or reader.is_closed:
            if reader is not None:
                reader.close()
            reader = self._open(counters)
        with reader:
            reader.begin(counters)
            yield reader

    def open_ahead(self, reader: DatasetReader, chunk: Chunk, counters: Counters) -> None:
        """Begin to open the shards of the first samples of the next epoch, for which `open` is called later.

        Args:
            reader: the reader of this epoch.
            chunk: the shards of the samples, and their positions among the selected samples of the shards.
            counters: the counters of the pipeline.
        """
        self._ahead = os.getpid(), (following := self._open(counters))
        self._close_ahead = weakref.finalize(self, following.close)
        reader.open_next(following, self.shards.find(chunk), self._passes)

    def _open(self, counters: Counters) -> DatasetReader:
        return DatasetReader(self.shards, priority=self._passes.priority, counters=counters)

    def read(self, numbers: list[int]) -> list[Sample]:
        """Return samples by their numbers in the order of the shards."""
        count = len(self.shards)
        for number in numbers:
            if not hasattr(number, "__index__"):  # a slice has none
                raise TypeError(
                    f"The number of a sample must be an integer, not {number!r:.100}. For several samples, use "
                    "torch.utils.data.Subset(samples.map_style(), numbers)"
                )
            if not -count <= number < count:
                raise IndexError(f"The dataset has {plural(count, 'sample')}, so there is no sample {number}")
        wanted = np.array([number % count for number in numbers])
        if self._by_number is None or self._by_number[0] != os.getpid():  # a forked process needs its own connections
            self._by_number = os.getpid(), DatasetReader(self.shards)
        samples = []
        for item in self._by_number[1].stream([self.shards.find(self.shards.locate(wanted))]):
            if isinstance(item, Exception):
                raise item
            samples.append(item)
        return [sample for sample in samples if sample is not None]
