"""Simulate a host's cache: which copies of shards it downloads and evicts, by the rules of the loader's cache."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence

from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.shard_cache.entry import STALE_PASSES


class PlannedCache:
    """The copies on a host that `CacheFolder` keeps for the `DatasetReader` of each worker.

    A worker pins the copies of the shards that it is reading and of those that it has just read. Of the other copies,
    those not used in the last passes are evicted first, then those used in this pass, as `Passes` describes; in each
    group, the least recently opened one comes first.

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
        self._free = max_bytes
        #: The copies in the order of their last use, with the pass of that use: before the current pass, and in it.
        self._earlier, self._used = OrderedDict[int, int](), OrderedDict[int, int]()
        self._pass = 0

    def read_epoch(self, runs: Iterable[tuple[int, Sequence[int]]]) -> list[int]:
        """Return the shards downloaded in an epoch, including those read from the store for lack of space.

        Args:
            runs: each worker with the shards that it reads one after the other, in the order of all workers.
        """
        self._earlier.update(self._used)
        self._used.clear()
        self._pass += 1
        opened = defaultdict[int, OrderedDict[int, bool]](OrderedDict)  # per worker; whether from a copy
        pins, before = Counter[int](), defaultdict[int, set[int]](set)
        downloads, unstored = [], set[int]()
        for worker, shards in runs:
            own = opened[worker]
            for closed in own.keys() - {*shards} - before[worker]:
                pins[closed] -= own.pop(closed)
            before[worker] = {*shards}
            for shard in shards:
                if shard not in own:
                    if len(own) >= self._open_shards:
                        closed, is_copy = own.popitem(last=False)
                        pins[closed] -= is_copy
                    is_copy = self._earlier.pop(shard, None) is not None or shard in self._used
                    if not is_copy and (is_copy := self._reserve(int(self._sizes[shard]), pins)):
                        downloads.append(shard)
                    if is_copy:
                        self._used[shard] = self._pass
                        self._used.move_to_end(shard)
                        pins[shard] += 1
                    else:
                        unstored.add(shard)
                    own[shard] = is_copy
                own.move_to_end(shard)
        return [*downloads, *sorted(unstored)]

    def _reserve(self, size: int, pins: Counter[int]) -> bool:
        """Evict copies until another one fits and reserve its space; return whether that succeeded."""
        if size > self._max_bytes:
            return False
        while self._free < size:
            oldest = next(iter(self._earlier.values()), self._pass)
            copies = (self._used, self._earlier) if oldest >= self._pass - STALE_PASSES else (self._earlier, self._used)
            found = next(((some, shard) for some in copies for shard in some if not pins[shard]), None)
            if found is None:
                return False
            some, shard = found
            del some[shard]
            self._free += int(self._sizes[shard])
        self._free -= size
        return True
