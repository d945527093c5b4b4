"""The cache of a host in a plan: the eviction of the real one, for copies that have a size but no file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.shard_cache.eviction import LeastRecentlyUsed, Passes, free_space


@dataclass(slots=True)
class PlannedCopy:
    """A copy of a shard, without its data.

    Attributes:
        shard: the number of the shard.
        bytes: its size.
        used: when it was last used, counted in uses of all copies.
        pins: how many workers keep it open.
    """

    shard: int
    bytes: int
    used: int = 0
    pins: int = 0

    @property
    def digest(self) -> str:
        """What identifies the shard."""
        return str(self.shard)

    def last_use(self) -> int:
        """Return when it was last used."""
        return self.used


class PlannedCache:
    """The copies on a host that `CacheFolder` keeps for the `OpenShards` of each worker.

    A worker pins the copies of the shards that it is reading and of those that it has just read. The others are evicted
    in the order of `Passes`, as files are.

    Args:
        sizes: the sizes of all shards in bytes.
        max_bytes: the maximum total size of the copies, in bytes.
        open_shards: the maximum number of shards that a worker keeps open.

    Examples:
        >>> cache = PlannedCache([5, 5], max_bytes=5, open_shards=1)
        >>> cache.read_epoch([(0, [0, 1])]), cache.read_epoch([(0, [1, 0])])
        ([0, 1], [0])
    """

    def __init__(self, sizes: Sequence[int] | Numbers, max_bytes: int, open_shards: int) -> None:
        self._sizes, self._max_bytes, self._open_shards = sizes, max_bytes, open_shards
        self._copies: dict[int, PlannedCopy] = {}
        self._bytes = self._uses = 0
        self._passes = Passes()
        #: The copies that no worker keeps open, by their priority, the first to be evicted first.
        self._queue: list[tuple[tuple[int, int], int]] = []

    def read_epoch(self, runs: Iterable[tuple[int, Sequence[int]]]) -> list[int]:
        """Return the shards downloaded in an epoch, including those read from the store for lack of space.

        Args:
            runs: each worker with the shards that it reads one after the other, in the order of all workers.
        """
        self._passes.begin_after(self._uses)
        self._queue = [(self._passes.priority(copy), shard) for shard, copy in self._copies.items()]
        heapify(self._queue)
        for each in self._copies.values():
            each.pins = 0
        opened = defaultdict[int, LeastRecentlyUsed[int, PlannedCopy | None]](
            lambda: LeastRecentlyUsed(self._open_shards, lambda _, copy: self._unpin(copy))
        )
        before = defaultdict[int, set[int]](set)
        downloads: list[int] = []
        unstored = set[int]()
        for worker, shards in runs:
            own = opened[worker]
            for closed in own.keys() - {*shards} - before[worker]:
                self._unpin(own.pop(closed))
            before[worker] = {*shards}
            for shard in shards:
                if shard in own:
                    own.use(shard)
                    continue
                own.make_space()  # before another one is opened
                cached = self._copies.get(shard)
                copy = cached or self._add(shard)
                if copy is not cached:
                    downloads.append(shard)
                if copy is None:
                    unstored.add(shard)
                else:
                    self._uses += 1
                    copy.used = self._uses
                    copy.pins += 1
                own.add(shard, copy)
        return [*downloads, *sorted(unstored)]

    def _unpin(self, copy: PlannedCopy | None) -> None:
        """Close a shard in one worker."""
        if copy is not None:
            copy.pins -= 1
            if not copy.pins:
                heappush(self._queue, (self._passes.priority(copy), copy.shard))

    def _add(self, shard: int) -> PlannedCopy | None:
        """Evict copies until another one fits and add it; return None if it does not fit."""
        size = int(self._sizes[shard])
        if size > self._max_bytes:
            return None
        self._bytes = free_space(self._bytes, size, self._max_bytes, self._evictable(), self._evict)
        if self._bytes + size > self._max_bytes:
            return None
        self._bytes += size
        copy = self._copies[shard] = PlannedCopy(shard, size)
        return copy

    def _evictable(self) -> Iterator[PlannedCopy]:
        """Yield the copies that no worker keeps open, in the order of their eviction."""
        while self._queue:
            priority, shard = heappop(self._queue)
            copy = self._copies.get(shard)
            if copy is not None and not copy.pins and self._passes.priority(copy) == priority:  # not used since
                yield copy

    def _evict(self, copy: PlannedCopy) -> int:
        del self._copies[copy.shard]
        return copy.bytes
