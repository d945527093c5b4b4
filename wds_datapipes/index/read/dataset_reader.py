"""Dataset reader: random access to the samples of many shards by their indexes."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import chain, islice, pairwise, repeat
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeAlias, TypeVar

import numpy as np

from wds_datapipes.counters import Counters
from wds_datapipes.errors import CacheError, ChangedShardError, MissingSidecarError, WdsError, plural
from wds_datapipes.index.format.index_copies import IndexCopies
from wds_datapipes.index.format.index_file import index_url
from wds_datapipes.index.format.options import AccessOptions
from wds_datapipes.index.format.origin import origin_of
from wds_datapipes.index.format.shard_facts import ShardFacts
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.read.fetch import ShardRanges
from wds_datapipes.index.read.plan import sizes_of
from wds_datapipes.index.read.sample_reader import LONG_BYTES, PlannedReads, SampleReader
from wds_datapipes.io.daemon_threads import close_result, set_result
from wds_datapipes.io.openers import local_path, redact
from wds_datapipes.io.remote.remote_file import FileFacts
from wds_datapipes.io.remote.request_steps import RequestThreads
from wds_datapipes.shard_cache.download import CacheFullError, DownloadRequest, UncachedError
from wds_datapipes.shard_cache.entry import Entry, stamp
from wds_datapipes.shard_cache.eviction import Priority
from wds_datapipes.shard_cache.store import CacheFolder
from wds_datapipes.tar.headers import BLOCK
from wds_datapipes.types import Sample

if TYPE_CHECKING:
    from typing_extensions import Self


Item: TypeAlias = "Sample | WdsError | OSError | None"
"""A sample, an error in its place, or None if there is no sample."""
Chunk: TypeAlias = "tuple[Numbers, Numbers]"
"""The shards of some samples, or -1 for no sample, and their numbers in these shards."""

T = TypeVar("T")

#: The maximum number of concurrent requests for remote shards.
THREADS = 64
#: By how much ``read_ahead`` is divided for a part, whose samples are read together. Smaller parts suffice for samples
#: in the order of their shards, whose neighbors are in the same part anyway.
PARTS, ASCENDING_PARTS = 2, 4


class Part(NamedTuple):
    """Samples that are read together.

    Attributes:
        bytes: about how many bytes of them are held.
        shards: their shards; -1 if there are samples of no shard.
        begin: begins to read the samples of remote shards, and returns all samples.
    """

    bytes: int
    shards: set[int]
    begin: Callable[[], Iterator[Item]]


class DatasetReader:
    """Reads samples of a dataset in any order, with a bounded number of open shards.

    Args:
        urls: the shards.
        sizes: the number of samples in each shard; an index with a different number is an error.
        access: where the indexes are, and how shards are opened.
        fields: the fields to read, by default all.
        names: the value of the field ``__dataset__`` for each shard; by default, samples do not have this field.
        priority: the order in which copies are evicted.
        counters: the counters of the pipeline.
        indexes: reads the indexes; by default, new ones.

    Examples:
        >>> from wds_datapipes.index import build_indexes
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "txt": "one"}, {"__key__": "y", "txt": "two"}])
        >>> _ = build_indexes([url])
        >>> with DatasetReader([url], [2]) as reader:
        ...     [sample["txt"] for sample in reader.stream([(np.array([0, 0]), np.array([1, 0]))])]
        [b'two', b'one']
    """

    def __init__(
        self,
        urls: Sequence[str],
        sizes: Sequence[int] | Numbers,
        access: AccessOptions = AccessOptions(),  # noqa: B008  immutable
        *,
        fields: Collection[str] | None = None,
        names: Sequence[str] | None = None,
        priority: Priority = Entry.last_use,
        counters: Counters | None = None,
        indexes: IndexCopies | None = None,
    ) -> None:
        self._urls, self._sizes, self._access = urls, sizes, access
        self._copies = indexes or IndexCopies(access)
        self.counters = counters or Counters()
        self._fields, self._names = fields, names
        self._is_local = all(local_path(url) is not None for url in urls)
        self._readers = OrderedDict[int, Future[SampleReader]]()  # the most recently used one is at the end
        self.cache = (
            None if access.cache_dir is None else CacheFolder(access.cache_dir, access.cache_bytes, priority=priority)
        )
        self._is_ahead = False
        self._next: DatasetReader | None = None
        self._next_lock = threading.Lock()
        self.is_closed = False
        self._threads = RequestThreads(THREADS, "wds-read-ahead")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stream(self, chunks: Iterable[Chunk]) -> Iterator[Item]:
        """Yield samples in the given order, with an error in place of each unreadable one.

        If any shard is remote, samples are read ahead by up to `THREADS` requests; about ``read_ahead`` bytes are held,
        or `PARTS` samples if these are larger. Samples of local shards are read when they are due, but small fields
        that are close together in a shard are read at once and held.

        Args:
            chunks: the samples; the next chunk is taken before its samples are due.
        """
        wholes = self._split(chunks)
        if not self._is_local:
            return self._read_ahead(wholes)
        return chain.from_iterable(part.begin() for whole in wholes for part in self._parts_of(*whole))

    def _split(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Split chunks so that all shards of a chunk can be open at the same time."""
        for shards, numbers in chunks:
            for part in split_by_shards(shards, self._access.open_shards):
                yield shards[part], numbers[part]

    def _read_ahead(self, chunks: Iterator[Chunk]) -> Iterator[Item]:
        begun = deque[tuple[set[int], int, Iterator[Item]]]()
        most = self._access.read_ahead
        chunk = next(chunks, None)
        while chunk is not None:
            (shards, numbers), needed = chunk, {*chunk[0].tolist()}
            # Close a shard to open another one only after its samples were read.
            while begun and len(needed.union(*(own for own, *_ in begun))) > self._access.open_shards:
                yield from begun.popleft()[2]
            self._open_soon(needed)
            chunk = next(chunks, None)
            if chunk is not None:
                following = {*chunk[0].tolist()}
                used = following.union(needed, *(own for own, *_ in begun))
                if self._access.cache_bytes is not None:  # an open shard pins its copy
                    self._close_shards(self._readers.keys() - used)
                if len(used) <= self._access.open_shards:
                    self._open_soon(following)
            for part in self._parts_of(shards, numbers):
                while len(begun) >= PARTS and part.bytes + sum(other for _, other, _ in begun) > most:
                    yield from begun.popleft()[2]
                begun.append((part.shards, part.bytes, part.begin()))
        while begun:
            yield from begun.popleft()[2]

    def _parts_of(self, shards: Numbers, numbers: Numbers) -> Iterator[Part]:
        """Yield parts of a chunk whose shards can all be open."""
        sizes = np.full(len(shards), BLOCK)  # the default, also for a sample that does not exist
        is_ascending = np.all((shards[1:] != shards[:-1]) | (numbers[1:] > numbers[:-1]))
        most = self._access.read_ahead // (ASCENDING_PARTS if is_ascending else PARTS)
        below = LONG_BYTES if self._is_local else None
        own = {shard: np.flatnonzero(shards == shard) for shard in dict.fromkeys(shards.tolist())}
        for shard, places in own.items():
            with suppress(WdsError, OSError):  # yielded when its first sample is due
                if shard >= 0:
                    sizes[places] = sizes_of(self._reader(shard).index, numbers[places], self._fields, below=below)
        ends = np.cumsum(sizes)
        stops, parts = [0], np.zeros(len(ends), np.int64)
        while stops[-1] < len(ends):
            before = int(ends[stops[-1] - 1]) if stops[-1] else 0
            parts[stops[-1] :] = len(stops) - 1
            stops.append(max(int(np.searchsorted(ends, before + most, "right")), stops[-1] + 1))
        plans = {shard: self._plan(shard, numbers[places], parts[places]) for shard, places in own.items()}
        streams = {
            shard: self._read_each(shard, numbers[places], parts[places], plans[shard]) for shard, places in own.items()
        }
        items = map(next, map(streams.__getitem__, shards.tolist())) if len(own) > 1 else streams[int(shards[0])]
        for part, (start, stop) in enumerate(pairwise(stops)):
            those = {*shards[start:stop].tolist()}
            begin = partial(_begin, part, [plans[shard] for shard in those], islice(items, stop - start))
            yield Part(int(sizes[start:stop].sum()), those, begin)

    def _plan(self, shard: int, numbers: Numbers, parts: Numbers) -> PlannedReads | None:
        """Plan to read samples of a shard; None if it cannot be opened, or does not exist."""
        with suppress(WdsError, OSError):  # yielded when its first sample is due
            submit = None if self._is_local else self._threads.submit_steps
            return self._reader(shard).plan(numbers, self._fields, parts, submit) if shard >= 0 else None
        return None

    def _read_each(self, shard: int, numbers: Numbers, parts: Numbers, plan: PlannedReads | None) -> Iterator[Item]:
        """Yield samples of a shard; an unreadable one does not affect those read together with it."""
        if shard < 0:
            yield from repeat(None, len(numbers))
            return
        done = 0
        while done < len(numbers):
            is_open = plan is not None
            try:
                plan = plan or self._reader(shard).plan(numbers, self._fields, parts)
                is_open = True
                for sample in plan.samples(done):
                    done += 1
                    yield sample
            except (WdsError, OSError) as error:
                item: Item = error
            else:
                continue
            yield self._read_alone(shard, numbers[done : done + 1]) if is_open else item
            del item  # its frames refer to this one
            done += 1

    def _read_alone(self, shard: int, number: Numbers) -> Item:
        """Return a sample or its error: another sample in the same range may be at fault."""
        try:
            return next(self._reader(shard).stream(number, self._fields))
        except (WdsError, OSError) as error:
            return error

    def start(self, function: Callable[[], T]) -> Future[T]:
        """Call a function in a thread if there are remote shards, otherwise now."""
        if self._is_local:
            done = Future[T]()
            set_result(done, function)
            return done
        return self._threads.submit(function)

    def _open_soon(self, shards: Iterable[int]) -> None:
        """Begin to open shards and read their indexes; close the least recently used shards."""
        for shard in shards:
            if shard >= 0 and shard not in self._readers:
                self._close_shards([*self._readers][: max(len(self._readers) + 1 - self._access.open_shards, 0)])
                self._readers[shard] = self.start(partial(self._open, shard))

    def _close_shards(self, shards: Iterable[int]) -> None:
        for shard in shards:
            self._readers.pop(shard).add_done_callback(close_result)

    def _reader(self, shard: int) -> SampleReader:
        self._open_soon([shard])
        opened = self._readers.pop(shard)
        reader = opened.result()
        self._readers[shard] = opened
        return reader

    def open_next(self, following: DatasetReader, shards: Iterable[int]) -> None:
        """Let the reader of the next epoch begin to open some shards and to download their copies.

        A shard that cannot be opened now is opened when it is due. If this reader needs the space of the copies, it
        closes the other reader.
        """
        following._is_ahead = True
        with self._next_lock:
            self._next = following
            following._open_soon(shards)

    def begin(self, counters: Counters) -> None:
        """Begin an epoch, and record the use of the copies of shards that were opened ahead."""
        self.counters, self._is_ahead = counters, False
        for shard, opened in [*self._readers.items()]:
            if opened.done() and (opened.cancelled() or opened.exception() is not None):
                del self._readers[shard]
            elif self.cache is not None:
                with suppress(OSError):  # there is no copy of a local shard
                    stamp(self.cache.path, self.cache.entry(self._urls[shard]).facts_path)

    def close(self) -> None:
        """Close all shards and abort the requests that read ahead."""
        self.is_closed, self._next = True, None
        self._threads.stop()
        self._close_shards([*self._readers])
        self._threads.close()

    def index_of(self, shard: int) -> ShardIndex:
        """Return the index of a shard.

        Raises:
            ChangedShardError: its number of samples differs from when the dataset was opened.
            SidecarError: it is missing or damaged, or its shard is compressed.
        """
        path = index_url(self._urls[shard], self._access.index_dir)
        try:
            index = self._copies.read(path)
        except MissingSidecarError as error:
            raise MissingSidecarError(f"{error}. Build the indexes of the dataset first, with build_indexes") from None
        index.check_random_access()
        if len(index) != self._sizes[shard]:
            raise ChangedShardError(
                f"The index {redact(path)} has {plural(len(index), 'sample')}, but the dataset was opened with "
                f"{self._sizes[shard]:,}. The shard was replaced, or the manifest belongs to other shards: write the "
                "manifest again, if there is one, and open the dataset again"
            )
        return index

    def _open(self, shard: int) -> SampleReader:
        url, index, access = self._urls[shard], self.index_of(shard), self._access
        options: dict[str, Any] = {"counters": self.counters}
        if self.cache is not None and local_path(url) is None:
            known = index.facts.at(origin_of(url, access.storage_options))
            options["copy"] = self._open_copy(self.cache, url, known)
            options["copy_path"] = str(self.cache.path_of(url))
        extra = {} if self._names is None else {"__dataset__": self._names[shard]}
        ranges = ShardRanges(url, index, access.storage_options, **options)
        if ranges.path is None:
            ranges.keep_open()
        return SampleReader(ranges, limits=access.limits, extra=extra)

    def _open_copy(self, cache: CacheFolder, url: str, facts: ShardFacts, *, is_last: bool = False) -> BinaryIO | None:
        """Return the copy of a shard, downloading it if needed; None if there is no space for it."""
        options = {"storage_options": self._access.storage_options, "counters": self.counters}
        request = DownloadRequest(url, FileFacts(facts.bytes, None, facts.etag), facts.sha256, options)
        is_ahead = self._is_ahead  # read now, because the epoch may begin during the download
        try:
            return cache.open(request, should_continue=lambda: not self.is_closed)
        except CacheFullError as error:
            if is_ahead:
                raise CacheError(f"The cache has no space for {request.name} yet") from None
            with self._next_lock:
                following = self._next
            if following is not None and not is_last:
                following.close()
                return self._open_copy(cache, url, facts, is_last=True)
            cache.warn_uncached(request, error)
        except UncachedError as error:
            cache.warn_uncached(request, error)
        return None


def _begin(part: int, plans: Iterable[PlannedReads | None], items: Iterator[Item]) -> Iterator[Item]:
    for plan in filter(None, plans):
        plan.request(part)
    return items


def split_by_shards(shards: Numbers, most: int) -> Iterator[slice]:
    """Yield parts of a list of shards with at most ``most`` shards each."""
    start = 0
    while start < len(shards):
        firsts = np.sort(np.unique(shards[start:], return_index=True)[1])
        stop = start + int(firsts[most]) if len(firsts) > most else len(shards)
        yield slice(start, stop)
        start = stop
