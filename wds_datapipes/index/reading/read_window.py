"""Read window: some consecutive samples of an epoch that threads read ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np

from wds_datapipes.errors import WdsError
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.types import Sample

__all__ = ["ReadWindow", "cancel_windows", "keep_windows"]


class ReadWindow:
    """Samples that are being read.

    Args:
        shards: the shard of each sample.
        numbers: the number of each sample in its shard.
        begin: begins to read samples of a shard.
        read_alone: reads one sample.

    Attributes:
        streams: the samples of each shard.
        futures: the ranges that are read.
        done: the number of samples that were yielded, or could not be read.
    """

    def __init__(
        self,
        shards: Numbers,
        numbers: Numbers,
        begin: Callable[[int, Numbers, list[Future[bytes]]], Iterator[Sample]],
        read_alone: Callable[[int, int], Sample],
    ) -> None:
        self._shards, self._numbers, self._read_alone = shards, numbers, read_alone
        self.futures, self.done = list[Future[bytes]](), 0
        self.streams: dict[int, Iterator[Sample] | None] = {
            shard: begin(shard, numbers[shards == shard], self.futures) for shard in dict.fromkeys(shards.tolist())
        }

    def __len__(self) -> int:
        """Return the number of samples that are left."""
        return len(self._shards) - self.done

    def __iter__(self) -> Iterator[Sample]:
        while self.done < len(self._shards):
            shard, number = int(self._shards[self.done]), int(self._numbers[self.done])
            self.done += 1
            yield self._next(shard, number)

    def _next(self, shard: int, number: int) -> Sample:
        if (stream := self.streams[shard]) is not None:
            try:
                return next(stream)
            except (WdsError, OSError) as error:
                if getattr(error, "concerns_all", False):
                    raise
                self.streams[shard] = None  # another sample in the same range may be at fault
        return self._read_alone(shard, number)

    def begins(self, shards: Numbers, numbers: Numbers) -> bool:
        """Whether samples begin with those that are left."""
        count = len(self)
        return np.array_equal(self._shards[self.done :], shards[:count]) and np.array_equal(
            self._numbers[self.done :], numbers[:count]
        )


def keep_windows(begun: deque[ReadWindow], shards: Numbers, numbers: Numbers) -> int:
    """Keep the samples that were read ahead and come first, cancel others, and return how many are kept."""
    kept = deque[ReadWindow]()
    count = 0
    while begun and begun[0].begins(shards[count:], numbers[count:]):
        kept.append(begun.popleft())
        count += len(kept[-1])
    cancel_windows(begun)
    begun.extend(kept)
    return count


def cancel_windows(begun: deque[ReadWindow]) -> None:
    """Cancel what is being read ahead."""
    while begun:
        for future in begun.pop().futures:
            future.cancel()
