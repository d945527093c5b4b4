"""Epoch reader: the samples at positions of an epoch, with others in the place of those that cannot be read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from wds_datapipes.index.order.epoch_order import SampleOrder
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.reading.dataset_reader import Chunk
from wds_datapipes.index.reading.indexed_shards import IndexedShards, Reader
from wds_datapipes.on_error.policy import ErrorPolicy, note
from wds_datapipes.types import Sample

#: How many other samples are tried in the place of one that cannot be read.
TRIES = 100
#: The distance between them, as a part of the epoch: multiples of the golden ratio are spread evenly.
STRIDE = 0.6180339887498949


class EpochReader:
    """Reads the samples at positions of an epoch.

    If the policy skips errors, the place of a sample that cannot be read is taken by another sample of the epoch, which
    the position determines. So nothing shifts, for any number of ranks and workers.

    Args:
        shards: the shards.
        reader: reads their samples.
        order: the order of the epoch.
        policy: the policy for errors.
        substitutes: whether to read another sample in the place of one that cannot be read.
    """

    def __init__(
        self, shards: IndexedShards, reader: Reader, order: SampleOrder, *, policy: ErrorPolicy, substitutes: bool
    ) -> None:
        self._shards, self._reader, self._order = shards, reader, order
        self._policy, self._substitutes = policy, substitutes
        self._begun = 0  # the number of positions that were looked up

    def read(self, chunks: Iterable[Numbers]) -> Iterator[tuple[Sample | None, int, bool]]:
        """Yield each sample, its position, and whether it is a substitute; None stands for an unreadable sample.

        The epoch ends at the first error for which a handler returns False.

        Args:
            chunks: arrays of positions; those from the length of the epoch on start again.

        Raises:
            ShardError: a sample cannot be read, or no other in its place.
            SidecarError: an index is missing or damaged.
        """
        waiting = deque[int]()  # the positions of the samples that are being read
        take = waiting.popleft
        for item in self._shards.stream(self._reader, self._find(chunks, waiting)):
            position = take()
            if not isinstance(item, Exception):
                yield item, position, False
                continue
            self._policy.tried = self._begun - len(waiting)
            shards, _ = self._order.find(np.array([position % len(self._order)]))
            if not self._policy.handle(item, url=self._shards.urls[shards[0]]):
                return
            yield self._substitute(position, item) if self._substitutes else None, position, True
            del item  # its frames refer to this one

    def _find(self, chunks: Iterable[Numbers], waiting: deque[int]) -> Iterator[Chunk]:
        """Yield where samples are, and append their positions to ``waiting``."""
        for chunk in chunks:
            waiting.extend(chunk.tolist())
            self._begun += len(chunk)
            yield self._order.find(chunk % len(self._order))

    def _substitute(self, position: int, error: Exception) -> Sample:
        """Return another sample of the epoch."""
        stride = round(len(self._order) * STRIDE) or 1
        for number in range(1, TRIES + 1):
            place = self._order.find(np.array([(position + number * stride) % len(self._order)]))
            for item in self._shards.stream(self._reader, [place]):
                if isinstance(item, dict):
                    return item  # the errors of others are reported at their own positions
        note(error, f"{TRIES} other samples of the epoch, which were tried in its place, could not be read either")
        raise error
