"""Epoch reader: the samples at positions of an epoch, with others in the place of those that cannot be read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np

from wds_datapipes.errors import WdsError
from wds_datapipes.index.epoch_order import SampleOrder
from wds_datapipes.index.indexed_shards import IndexedShards, Reader
from wds_datapipes.index.permutation import Numbers
from wds_datapipes.on_error.policy import ErrorPolicy, note
from wds_datapipes.types import Sample

__all__ = ["EpochReader"]

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

    def read(self, chunks: Iterable[Numbers]) -> Iterator[tuple[int, Sample | None, bool]]:
        """Yield each position, its sample, and whether that is a substitute; None stands for an unreadable sample.

        Args:
            chunks: arrays of positions; those from the length of the epoch on start again.

        Raises:
            ShardError: a sample cannot be read, or no other in its place.
            SidecarError: an index is missing or damaged.
        """
        chunks, waiting = iter(chunks), deque[int]()
        while True:
            again = np.array(waiting, np.int64)
            waiting.clear()
            samples = self._shards.stream(self._reader, self._find(chain([again], chunks), waiting))
            try:
                for sample in samples:
                    self._policy.tried += 1
                    yield waiting.popleft(), sample, False
                return
            except (WdsError, OSError):
                if self._policy.always_raises:
                    raise
            # One of the samples that are read together cannot be read; it may come later.
            yield self._read_one(waiting.popleft())

    def _find(self, chunks: Iterable[Numbers], waiting: deque[int]) -> Iterator[tuple[Numbers, Numbers]]:
        """Yield where samples are, and append their positions to ``waiting``."""
        for chunk in chunks:
            waiting.extend(chunk.tolist())
            yield self._order.find(chunk % len(self._order))

    def _read_one(self, position: int) -> tuple[int, Sample | None, bool]:
        self._policy.tried += 1
        shards, places = self._order.find(np.array([position % len(self._order)]))
        try:
            return position, self._shards.read(self._reader, shards, places)[0], False
        except (WdsError, OSError) as error:
            if not self._policy.handle(error, url=self._shards.urls[shards[0]]):
                raise
            return position, self._substitute(position, error) if self._substitutes else None, True

    def _substitute(self, position: int, error: WdsError | OSError) -> Sample:
        """Return another sample of the epoch."""
        stride = round(len(self._order) * STRIDE) or 1
        for number in range(1, TRIES + 1):
            shards, places = self._order.find(np.array([(position + number * stride) % len(self._order)]))
            try:
                return self._shards.read(self._reader, shards, places)[0]
            except (WdsError, OSError):  # it is reported at its own position
                continue
        note(error, f"{TRIES} other samples of the epoch, which were tried in its place, could not be read either")
        raise error
