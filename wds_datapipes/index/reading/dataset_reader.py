"""Dataset reader: random access to the samples of many shards by their indexes."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, BinaryIO
from weakref import WeakSet

import numpy as np

from wds_datapipes.errors import ChangedShardError, CorruptSidecarError, MissingSidecarError, WdsError
from wds_datapipes.index.build_many import build_missing_index
from wds_datapipes.index.file_format import index_url, read_index
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.reading.read_plan import sizes_of
from wds_datapipes.index.reading.read_window import ReadWindow, cancel_windows, keep_windows
from wds_datapipes.index.reading.sample_reader import SampleReader
from wds_datapipes.index.shard_index import ShardFacts, ShardIndex
from wds_datapipes.io.local import local_path
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.samples.keys import first_dot
from wds_datapipes.shard_cache.download import CacheFullError, DownloadRequest
from wds_datapipes.shard_cache.store import CacheFolder
from wds_datapipes.types import Sample

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DatasetReader"]

LOGGER = logging.getLogger("wds_datapipes")

#: The number of threads that read remote shards concurrently.
THREADS = 32
#: At most this many parts of an epoch, each of about this many bytes, are read ahead.
WINDOWS, WINDOW_BYTES = 4, 8 << 20
#: Seconds for which closing waits for responses that are no longer needed.
GRACE_S = 2.0


class DatasetReader:
    """Reads samples of a dataset in any order. A bounded number of shards is open at a time.

    Args:
        urls: the shards.
        sizes: the number of samples in each; an index with another number is an error.
        folder: the directory of the indexes; by default, that of the shards.
        fields: the fields to read; by default all.
        open_shards: the most shards that are kept open, with their indexes.
        build: build missing and damaged indexes when their shards are first opened, and write them; those that cannot
            be written are kept in memory.
        cache_dir: a folder for copies of remote shards, which are read instead.
        cache_bytes: the most bytes of all copies in it; None is limited only by the disk.
        storage_options: passed to remote file systems.
        limits: the limits for the shards.

    Examples:
        >>> from wds_datapipes.index import build_indexes
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "txt": "one"}, {"__key__": "y", "txt": "two"}])
        >>> _ = build_indexes([url])
        >>> with DatasetReader([url], [2]) as reader:
        ...     [sample["txt"] for sample in reader.read([0, 0], [1, 0])]
        [b'two', b'one']
    """

    def __init__(
        self,
        urls: Sequence[str],
        sizes: Sequence[int] | Numbers,
        *,
        folder: str | os.PathLike[str] | None = None,
        fields: Collection[str] | None = None,
        open_shards: int = 64,
        build: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        limits: ReadLimits = DEFAULT_LIMITS,
    ) -> None:
        self._urls, self._sizes, self._folder = urls, sizes, folder
        self._fields, self._build = fields, build
        self._unwritten: dict[int, ShardIndex] = {}
        self._is_local = all(local_path(url) is not None for url in urls)
        self._open_shards, self._storage_options, self._limits = open_shards, storage_options, limits
        self._readers = OrderedDict[int, SampleReader]()  # the one that was used last is at the end
        self._opening: dict[int, Future[SampleReader]] = {}
        self._begun: deque[ReadWindow] = deque()
        self._cache = None if cache_dir is None else CacheFolder(cache_dir, cache_bytes)
        self._is_closed = False
        self._pool: ThreadPoolExecutor | None = None
        self._futures = WeakSet[Future[bytes]]()
        self._process = os.getpid()
        self._closed_bytes = 0  # read by readers that were closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bytes_read(self) -> int:
        """How many bytes of shards have been read."""
        return self._closed_bytes + sum(reader.bytes_read for reader in self._readers.values())

    def read(self, shards: Sequence[int] | Numbers, numbers: Sequence[int] | Numbers) -> list[Sample]:
        """Return samples.

        Args:
            shards: the shard of each sample.
            numbers: the number of each sample in its shard.

        Raises:
            ShardError: a shard cannot be read, or has changed since it was indexed.
            SidecarError: an index is missing or damaged.
        """
        chunks = self._split([(np.asarray(shards, np.int64), np.asarray(numbers, np.int64))])
        return list(self._read_when_due(chunks) if self._is_local else self._read_ahead(chunks, deque()))

    def stream(self, chunks: Iterable[tuple[Numbers, Numbers]]) -> Iterator[Sample]:
        """Yield samples in the given order.

        Samples of local shards are read when they are due. If there are remote shards, samples are read ahead, in
        `THREADS` threads; about `WINDOWS * WINDOW_BYTES` are held, or `WINDOWS` samples that are larger. After an
        error, a new stream of the samples that follow takes what was read ahead.

        Args:
            chunks: the shards of some samples, and their numbers in them; taken ahead as well.

        Raises:
            ShardError: a shard cannot be read, or has changed since it was indexed.
            SidecarError: an index is missing or damaged.
        """
        chunks = self._split(chunks)
        return self._read_when_due(chunks) if self._is_local else self._read_ahead(chunks, self._begun)

    def _read_when_due(self, chunks: Iterable[tuple[Numbers, Numbers]]) -> Iterator[Sample]:
        for shards, numbers in chunks:
            if np.all(shards == shards[0]):
                yield from self._reader(int(shards[0])).stream(numbers, self._fields)
                continue
            streams: dict[int, Iterator[Sample]] = {}
            for shard in shards.tolist():
                if shard not in streams:
                    streams[shard] = self._reader(shard).stream(numbers[shards == shard], self._fields)
                yield next(streams[shard])

    def _read_ahead(self, chunks: Iterator[tuple[Numbers, Numbers]], begun: deque[ReadWindow]) -> Iterator[Sample]:
        try:
            chunk = next(chunks, None)
            if chunk is not None:
                kept = keep_windows(begun, *chunk)
                chunk = chunk[0][kept:], chunk[1][kept:]
            while chunk is not None:
                (shards, numbers), needed = chunk, {*chunk[0].tolist()}
                # A shard is closed to open another one, but not before its samples were read.
                while begun and len(needed.union(*(window.streams for window in begun))) > self._open_shards:
                    yield from begun[0]
                    begun.popleft()
                self._open_in_threads(needed)
                chunk = next(chunks, None)
                if chunk is not None:
                    following = {*chunk[0].tolist()}
                    if len(following.union(needed, *(window.streams for window in begun))) <= self._open_shards:
                        self._open_in_threads(following)
                for part in self._windows(shards, numbers):
                    if len(begun) == WINDOWS:
                        yield from begun[0]
                        begun.popleft()
                    begun.append(ReadWindow(shards[part], numbers[part], self._begin, self._read_alone))
            while begun:
                yield from begun[0]
                begun.popleft()
        except GeneratorExit:
            cancel_windows(begun)
            raise

    def _windows(self, shards: Numbers, numbers: Numbers) -> Iterator[slice]:
        """Yield parts of a chunk of about `WINDOW_BYTES`."""
        sizes = np.zeros(len(shards), np.int64)
        for shard in np.unique(shards).tolist():
            with suppress(WdsError, OSError):  # raised when its first sample is due
                own = shards == shard
                sizes[own] = sizes_of(self._reader(shard).index, numbers[own], self._fields)
        ends = np.cumsum(sizes)
        start = 0
        while start < len(ends):
            before = int(ends[start - 1]) if start else 0
            stop = max(int(np.searchsorted(ends, before + WINDOW_BYTES, "right")), start + 1)
            yield slice(start, stop)
            start = stop

    def _begin(self, shard: int, numbers: Numbers, futures: list[Future[bytes]]) -> Iterator[Sample]:
        """Begin to read samples of a shard; an error is raised when the first one is due."""

        def submit(read: Callable[[], bytes]) -> Future[bytes]:
            futures.append(self._threads().submit(read))
            self._futures.add(futures[-1])
            return futures[-1]

        try:
            return self._reader(shard).read_ahead(numbers, self._fields, submit)
        except (WdsError, OSError) as error:
            return _failing(error)

    def _read_alone(self, shard: int, number: int) -> Sample:
        return next(self._reader(shard).stream(np.array([number]), self._fields))

    def _open_in_threads(self, shards: Iterable[int]) -> None:
        """Begin to open shards, whose indexes are read."""
        for shard in shards:
            if shard not in self._readers and shard not in self._opening:
                while self._readers and len(self._readers) + len(self._opening) >= self._open_shards:
                    self._close(self._readers.popitem(last=False)[1])
                self._opening[shard] = self._threads().submit(self._open, shard)

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "wds-read-ahead")
        return self._pool

    def _split(self, chunks: Iterable[tuple[Numbers, Numbers]]) -> Iterator[tuple[Numbers, Numbers]]:
        """Split chunks so that all shards of each can be open at a time."""
        for shards, numbers in chunks:
            while len(shards):
                firsts = np.sort(np.unique(shards, return_index=True)[1])
                stop = int(firsts[self._open_shards]) if len(firsts) > self._open_shards else len(shards)
                yield shards[:stop], numbers[:stop]
                shards, numbers = shards[stop:], numbers[stop:]

    def close(self) -> None:
        """Close all shards, and abort the requests that read ahead."""
        self._is_closed = True
        cancel_windows(self._begun)
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        with ExitStack() as stack:
            for reader in self._readers.values():
                stack.callback(self._close, reader)
            for opening in self._opening.values():
                if not opening.cancel():
                    opening.add_done_callback(_close_opened)
            self._readers, self._opening = OrderedDict(), {}
        if pool is not None and os.getpid() == self._process:  # the threads of a forked process run in its parent
            _, pending = wait([future for future in self._futures if not future.done()], GRACE_S)
            pool.shutdown(wait=not pending)

    def _close(self, reader: SampleReader) -> None:
        self._closed_bytes += reader.bytes_read
        reader.close()

    def _reader(self, shard: int) -> SampleReader:
        reader = self._readers.pop(shard, None)
        if reader is None:
            opening = self._opening.pop(shard, None)
            if len(self._readers) + len(self._opening) >= self._open_shards and self._readers:
                self._close(self._readers.popitem(last=False)[1])
            reader = self._open(shard) if opening is None else opening.result()
        self._readers[shard] = reader
        return reader

    def index_of(self, shard: int) -> ShardIndex:
        """Return the index of a shard, which is built if it is missing and `DatasetReader` was told so.

        Raises:
            ChangedShardError: it has another number of samples than the dataset was opened with.
            SidecarError: it is missing or damaged, or its shard is compressed.
            ShardError: it is missing, and cannot be built.
        """
        path = index_url(self._urls[shard], self._folder)
        index = self._unwritten.get(shard)
        if index is None:
            try:
                index = read_index(path, storage_options=self._storage_options)
            except (MissingSidecarError, CorruptSidecarError):
                if not self._build:
                    raise
                index = self._build_index(shard, path)
        index.check_random_access()
        if len(index) != self._sizes[shard]:
            raise ChangedShardError(
                f"The index {redact(path)} has {len(index)} samples, and the dataset was opened with "
                f"{self._sizes[shard]}. The shard was replaced, or its manifest is that of another one: write the "
                "manifest again, if there is one, and open the dataset again"
            )
        return index

    def _build_index(self, shard: int, path: str) -> ShardIndex:
        options: dict[str, Any] = {"storage_options": self._storage_options, "limits": self._limits}
        index, failure = build_missing_index(self._urls[shard], path, create_folder=self._folder is not None, **options)
        if failure is not None:
            if not self._unwritten:
                LOGGER.warning(
                    "%s. Such indexes are kept in memory, so each process reads the headers of each shard again. Pass "
                    "index_folder=, a directory that can be written, or build the indexes in advance",
                    failure,
                )
            self._unwritten[shard] = index
        return index

    def _open(self, shard: int) -> SampleReader:
        url, index = self._urls[shard], self.index_of(shard)
        options: dict[str, Any] = {"storage_options": self._storage_options, "limits": self._limits}
        options["key_rule"] = index.key_rule or first_dot  # samples are read by their offsets, so it does not matter
        if self._cache is not None and local_path(url) is None:
            options["copy"] = self._open_copy(self._cache, url, index.facts)
            options["copy_path"] = str(self._cache.entry(url).path)
        return SampleReader(url, index, **options)

    def _open_copy(self, cache: CacheFolder, url: str, facts: ShardFacts) -> BinaryIO | None:
        """Return the copy of a shard, which is downloaded if needed; None if there is no space for it."""
        options = {"storage_options": self._storage_options}
        request = DownloadRequest(url, facts.bytes, facts.sha256, options)
        try:
            return cache.open(request, should_continue=lambda: not self._is_closed)
        except CacheFullError:
            cache.warn_cache_full(request.name)
            return None


def _close_opened(opening: Future[SampleReader]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _failing(error: Exception) -> Iterator[Sample]:
    """Raise an error when the first sample is due."""
    raise error
    yield
