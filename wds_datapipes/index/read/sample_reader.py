"""Sample reader: reads samples of many shards by number, in any order."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice, pairwise, repeat, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wds_datapipes.errors import ShardReadError, WdsError
from wds_datapipes.index.format.options import AccessOptions
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.sample_order import Chunk
from wds_datapipes.index.order.select import split_by_shards
from wds_datapipes.index.read.assemble import Item, PlannedSamples
from wds_datapipes.index.read.fetch import PlannedRanges
from wds_datapipes.index.read.open_shards import OpenShards
from wds_datapipes.index.read.plan import (
    ASCENDING_GROUPS,
    GROUPS,
    LOCAL,
    LONG_BYTES,
    REMOTE,
    plan_reading,
    sizes_of,
    split_by_size,
)
from wds_datapipes.io.read_ahead import ReadAhead
from wds_datapipes.io.request_threads import RequestThreads
from wds_datapipes.tar.headers import BLOCK

if TYPE_CHECKING:
    from typing_extensions import Self


class SampleGroup(NamedTuple):
    """Samples that are read together.

    Attributes:
        bytes: about how many bytes of them are held.
        shards: their shards; -1 if there are samples of no shard.
        begin: begins to read the samples of remote shards, and returns all samples.
    """

    bytes: int
    shards: set[int]
    begin: Callable[[], Iterator[Item]]


class SampleReader:
    """Reads samples of a dataset in any order, with a bounded number of open shards.

    A plan says which bytes of a shard are read for a group of samples, the open shards fetch them, ahead if they are
    remote, and the samples are assembled from them.

    Args:
        urls: the shards.
        read_index: returns the index of a shard.
        access: how shards are opened.
        fields: the fields to read, by default all.
        names: the value of the field ``__dataset__`` for each shard; by default, samples do not have this field.
        options: other arguments of `OpenShards`.

    Attributes:
        shards: the open shards.

    Examples:
        >>> from wds_datapipes.index import build_index
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "txt": "one"}, {"__key__": "y", "txt": "two"}])
        >>> indexes = [build_index(url)]
        >>> with SampleReader([url], indexes.__getitem__) as reader:
        ...     [sample["txt"] for sample in reader.stream([(np.array([0, 0]), np.array([1, 0]))])]
        [b'two', b'one']
    """

    def __init__(
        self,
        urls: Sequence[str],
        read_index: Callable[[int], ShardIndex],
        access: AccessOptions = AccessOptions(),  # noqa: B008  immutable
        *,
        fields: Collection[str] | None = None,
        names: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        self._access, self._fields, self._names = access, fields, names
        self.shards = OpenShards(urls, read_index, access, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all shards and abort the requests that read ahead."""
        self.shards.close()

    def stream(self, chunks: Iterable[Chunk]) -> Iterator[Item]:
        """Yield samples in the given order, with an error in place of each unreadable one.

        If any shard is remote, samples are read ahead by several concurrent requests; about ``read_ahead`` bytes are
        held, or `GROUPS` samples if these are larger. Samples of local shards are read when they are due, but small
        fields that are close together in a shard are read at once and held.

        Args:
            chunks: the samples; the next chunk is taken before its samples are due.
        """
        wholes = self._split(chunks)
        if not self.shards.is_local:
            return _in_process(self._read_ahead(wholes))
        return chain.from_iterable(group.begin() for whole in wholes for group in self._groups_of(*whole))

    def _split(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Split chunks so that all shards of a chunk can be open at the same time."""
        for shards, numbers in chunks:
            for own in split_by_shards(shards, self._access.open_shards):
                yield shards[own], numbers[own]

    def _read_ahead(self, chunks: Iterator[Chunk]) -> Iterator[Item]:
        begun = ReadAhead[tuple[set[int], Iterator[Item]]](self._access.read_ahead, least=GROUPS)
        chunk = next(chunks, None)
        while chunk is not None:
            (shards, numbers), needed = chunk, {*chunk[0].tolist()}
            # Close a shard to open another one only after its samples were read.
            while begun and len(needed.union(*(own for own, _ in begun))) > self._access.open_shards:
                yield from begun.take()[1]
            self.shards.open_soon(needed)
            chunk = next(chunks, None)
            if chunk is not None:
                following = {*chunk[0].tolist()}
                used = following.union(needed, *(own for own, _ in begun))
                self.shards.keep_only(used)
                if len(used) <= self._access.open_shards:
                    self.shards.open_soon(following)
            for group in self._groups_of(shards, numbers):
                while not begun.has_room(group.bytes):
                    yield from begun.take()[1]
                begun.add((group.shards, group.begin()), group.bytes)
        while begun:
            yield from begun.take()[1]

    def _groups_of(self, shards: Numbers, numbers: Numbers) -> Iterator[SampleGroup]:
        """Yield groups of the samples of a chunk whose shards can all be open."""
        sizes = np.full(len(shards), BLOCK)  # the default, also for a sample that does not exist
        is_ascending = np.all((shards[1:] != shards[:-1]) | (numbers[1:] > numbers[:-1]))
        most = self._access.read_ahead // (ASCENDING_GROUPS if is_ascending else GROUPS)
        below = LONG_BYTES if self.shards.is_local else None
        own = {shard: np.flatnonzero(shards == shard) for shard in dict.fromkeys(shards.tolist())}
        for shard, chosen in own.items():
            with suppress(WdsError, OSError):  # yielded when its first sample is due
                if shard >= 0:
                    sizes[chosen] = sizes_of(self.shards[shard].index, numbers[chosen], self._fields, below=below)
        stops = split_by_size(sizes, most)
        groups = np.repeat(np.arange(len(stops) - 1), np.diff(stops))
        plans, streams = dict[int, "PlannedSamples | None"](), dict[int, Iterator[Item]]()
        for shard, chosen in own.items():
            plans[shard] = None
            with suppress(WdsError, OSError):  # yielded when its first sample is due
                if shard >= 0:
                    plans[shard] = self._plan(shard, numbers[chosen], groups[chosen], self.shards.request_threads)
            streams[shard] = self._read_each(shard, numbers[chosen], groups[chosen], plans[shard])
        items = map(next, map(streams.__getitem__, shards.tolist())) if len(own) > 1 else streams[int(shards[0])]
        for group, (start, stop) in enumerate(pairwise(stops)):
            those = {*shards[start:stop].tolist()}
            begin = partial(_begin, group, [plans[shard] for shard in those], islice(items, stop - start))
            yield SampleGroup(int(sizes[start:stop].sum()), those, begin)

    def _plan(
        self, shard: int, numbers: Numbers, groups: Numbers, threads: RequestThreads | None = None
    ) -> PlannedSamples:
        """Plan to read samples of a shard.

        Args:
            shard: the shard.
            numbers: the numbers of the samples.
            groups: the group of each sample, in ascending order.
            threads: read ahead; by default, each sample is read when it is due.

        Raises:
            ShardError: it cannot be opened, or has changed since it was indexed.
        """
        ranges = self.shards[shard]
        ranges.keep_open()
        limit = REMOTE if ranges.path is None else LOCAL
        plan = plan_reading(ranges.index, numbers, self._fields, groups=groups, limit=limit)
        is_ascending = bool(np.all(numbers[1:] >= numbers[:-1]))
        planned = PlannedRanges(ranges, plan, threads, is_ascending=is_ascending)
        extra = {} if self._names is None else {"__dataset__": self._names[shard]}
        return PlannedSamples(plan, planned, ranges, self._access.limits, extra)

    def _read_each(
        self, shard: int, numbers: Numbers, groups: Numbers, planned: PlannedSamples | None
    ) -> Iterator[Item]:
        """Yield samples of a shard; an unreadable one does not affect those read together with it."""
        if shard < 0:
            yield from repeat(None, len(numbers))
            return
        done = 0
        while done < len(numbers):
            is_open = planned is not None
            try:
                planned = planned or self._plan(shard, numbers, groups)
                is_open = True
                for sample in planned.assemble(done):
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
            return next(self._plan(shard, number, np.zeros(1, np.int64)).assemble())
        except (WdsError, OSError) as error:
            return error


def _in_process(items: Iterator[Item]) -> Iterator[Item]:
    """Yield items; raise an error in a forked process, in which none of the threads runs that read ahead.

    Raises:
        ShardReadError: this process was forked since the first item.
    """
    process = os.getpid()
    for item in items:
        yield item
        if os.getpid() != process:
            raise ShardReadError(
                f"Samples of remote shards cannot be read on in a forked process, because threads of its parent (pid "
                f"{process}) read ahead. Begin to iterate in the process that reads"
            )


def _begin(group: int, plans: Iterable[PlannedSamples | None], items: Iterator[Item]) -> Iterator[Item]:
    for _ in zip_longest(*(each.planned.request(group) for each in plans if each is not None)):  # shards take turns
        pass
    return items
