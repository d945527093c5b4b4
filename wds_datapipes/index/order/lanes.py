"""Lanes: equal parts of a dataset that contribute the same number of samples to each global batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.types import Instance
from wds_datapipes.user_warnings import warn_user

if TYPE_CHECKING:
    from wds_datapipes.index.order.indexed_shards import IndexedShards
    from wds_datapipes.index.order.sample_order import Order

#: A stage warns if it must sort more samples than this for each one that it yields; sorting 256 takes about 0.1 ms.
MANY_SORTED = 256


def lane_starts(count: int, lanes: int, *, passes: int = 0) -> Numbers:
    """Return how many of ``count`` samples are before each lane and in all lanes.

    In each pass, different lanes have one sample more than the others. Lanes from which equally many samples are drawn
    thus end their passes together, and all samples are drawn equally often.

    >>> lane_starts(11, 4).tolist(), lane_starts(11, 4, passes=1).tolist()
    ([0, 2, 5, 8, 11], [0, 3, 6, 9, 11])
    """
    starts: Numbers = np.arange(passes, passes + lanes + 1) * count // lanes - passes * count // lanes
    return starts


def check_lanes(lanes: int, batch: int | None, count: int) -> None:
    """Check that a dataset can have this number of lanes.

    Args:
        lanes: the number of lanes.
        batch: the number of samples in a global batch.
        count: the number of samples in an epoch.

    Raises:
        ValueError: the number of lanes does not divide the number of samples in a batch, or a lane would be empty.
    """
    if lanes > 1 and (batch or 1) % lanes:
        raise ValueError(
            f"Each of the {lanes} lanes must contribute the same number of samples to a global batch, but "
            f"global_batch_size={batch}. Choose a multiple of {lanes}, or lanes that divide it"
        )
    if count < lanes:
        if not count:
            raise ValueError("An epoch has no samples, so it cannot be divided into lanes. Choose shards with samples")
        raise ValueError(
            f"lanes={lanes} is too large, because each lane needs at least one sample of an epoch. Choose at most "
            f"{count}, the number of samples"
        )


def warn_of_costs(shards: IndexedShards, order: Order, lanes: int, window_shards: int, instance: Instance) -> None:
    """Warn if a worker sorts far more samples than it yields, or reads from more shards than it keeps open.

    Args:
        shards: the shards of an epoch.
        order: its order.
        lanes: the number of its lanes.
        window_shards: the number of shards in a window.
        instance: the rank and the worker.
    """
    ranks, others = instance.ranks, instance.count // lanes
    if shards.lengths is not None and others >= MANY_SORTED and ranks > lanes:
        warn_user(
            f"bucket_by sorts whole windows of a lane. With lanes={lanes}, a worker of {ranks} ranks sorts about "
            f"{others} samples for each one that it yields, which takes about {others / 2000:.1f} ms. Choose at least "
            f"lanes={ranks}"
        )
    own, most = -(-lanes // ranks), shards.most_open
    needed = own * min(window_shards, len(shards.sizes) // lanes + 1)
    if lanes > 1 and order == "window" and needed > most:
        warn_user(
            f"Each rank has {own} of {lanes} lanes, so its batches have samples of {needed} shards, but each of its "
            f"workers keeps {most} open: most samples open a shard again. Choose smaller windows with "
            f"EpochOptions(window_shards=), fewer lanes, or AccessOptions(open_shards={needed})"
        )


class Lanes:
    """Divides an epoch into lanes: each global batch has samples of the same lanes in the same slots.

    Slots ``[i * lane_batch, (i + 1) * lane_batch)`` of each batch are those of lane i, so a part of a batch has the
    same lanes in all batches. The remaining samples after the last full batch follow lane by lane. Padding, at
    positions from ``count`` on, repeats the first samples of each lane.

    Args:
        count: the number of samples in the epoch.
        batch: the number of samples in a global batch.
        lanes: the number of lanes.

    Attributes:
        lane_batch: the number of samples of each lane in a batch.
        whole: the number of samples of each lane in all full batches.
        starts: the number of samples before each lane if they are numbered lane by lane.

    Examples:
        >>> lanes = Lanes(11, batch=4, lanes=2)
        >>> lanes.starts.tolist(), lanes.locate(np.arange(12)).tolist()
        ([0, 5, 11], [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 0])
    """

    def __init__(self, count: int, batch: int = 1, lanes: int = 1) -> None:
        self.count, self.batch, self.lane_batch = count, batch, batch // lanes
        self.whole = count // batch * self.lane_batch
        self.starts = lane_starts(count, lanes)
        self._sizes = np.diff(self.starts)
        self._rests = lane_starts(count % batch, lanes)
        self._padding = np.arange(lanes + 1) * self.lane_batch - self._rests

    def __len__(self) -> int:
        """Return the number of lanes."""
        return len(self._sizes)

    def split(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the lanes of samples that are numbered lane by lane, and their numbers in these lanes."""
        lanes = np.searchsorted(self.starts[1:-1], numbers, "right")
        return lanes, numbers - self.starts[lanes]

    def locate(self, positions: Numbers) -> Numbers:
        """Return the numbers of the samples at some positions of the epoch if samples are numbered lane by lane."""
        batches, slots = np.divmod(positions, self.batch)
        lanes, numbers = np.divmod(slots, self.lane_batch)
        numbers += batches * self.lane_batch
        is_left = positions >= self.whole * len(self)
        if is_left.any():
            left = positions[is_left] - self.whole * len(self)
            more = left - self._rests[-1]
            own, padded = (
                np.searchsorted(starts[1:-1], at, "right")
                for starts, at in ((self._rests, left), (self._padding, more))
            )
            lanes[is_left] = np.where(more < 0, own, padded)
            again = (more - self._padding[padded]) % self._sizes[padded]
            numbers[is_left] = np.where(more < 0, self.whole + left - self._rests[own], again)
        return self.starts[lanes] + numbers
