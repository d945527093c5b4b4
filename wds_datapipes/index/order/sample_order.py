"""Orders of the samples of an epoch: each finds a sample by its position, without storing the order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count as count_from
from math import gcd
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from wds_datapipes.index.order.lanes import Lanes, lane_starts
from wds_datapipes.index.order.permutation import Numbers, Permutation, permute
from wds_datapipes.seeds import derived_seed

Order: TypeAlias = Literal["global", "window", "sequential"]
"""``"global"`` shuffles all samples, ``"window"`` the shards and then those of a few shards at a time."""
Chunk: TypeAlias = "tuple[Numbers, Numbers]"
"""The shards of some samples, or -1 for no sample, and their numbers in these shards."""

#: The maximum number of window permutations that are kept.
KEPT = 1 << 14
#: The number of other samples tried in place of an unreadable one.
TRIES = 100
#: The distance between them as a fraction of the epoch: multiples of the golden ratio are spread evenly.
STRIDE = 0.6180339887498949


class SampleOrder(Protocol):
    """Finds the samples of an epoch by their positions in it."""

    def __len__(self) -> int:
        """Return the number of samples in the epoch."""

    def find(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shard of the sample at each position of the epoch, and the number of the sample in it."""


class LaneOrder:
    """Finds the samples of an epoch in an order whose lanes follow one another.

    Args:
        order: the other order.
        lanes: the lanes, which contribute the same number of samples to each batch.
        later: positions at which the batch size changes, with the lanes of the samples from there on.

    Examples:
        >>> order = LaneOrder(EpochOrder([5, 6], "sequential", seed=0, lanes=2), Lanes(11, batch=4, lanes=2))
        >>> order.find(np.arange(8))[0].tolist()
        [0, 0, 1, 1, 0, 0, 1, 1]
    """

    def __init__(self, order: SampleOrder, lanes: Lanes, later: Sequence[tuple[int, Lanes]] = ()) -> None:
        self._order, self._lanes, self._later = order, lanes, later

    def __len__(self) -> int:
        """Return the number of samples in the epoch."""
        return len(self._order)

    def find(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shard of the sample at each position of the epoch, and the number of the sample in it.

        Args:
            positions: positions in the epoch; those from ``len(order)`` on are padding.
        """
        found = self._lanes.locate(positions)
        for start, lanes in self._later:
            own = positions >= start
            which, numbers = lanes.split(lanes.locate(positions[own] - start))
            found[own] = self._lanes.starts[which] + start // len(lanes) + numbers
        return self._order.find(found)

    def substitutes(self, positions: Numbers, number: int) -> Numbers:
        """Return the positions of other samples to try in place of some.

        Args:
            positions: the positions of the samples to replace.
            number: the number of the try, up to `TRIES`. The first half yields samples of the same lane.
        """
        step = self._lanes.batch if len(self._lanes) > 1 and number <= TRIES // 2 else 1
        count = max(len(self) // step, 1)
        stride = next(each for each in count_from(round(count * STRIDE) or 1) if gcd(each, count) == 1)
        return (positions + number * stride * step) % (count * step)


class EpochOrder:
    """The order of the samples in an epoch: a function of a seed and the sizes of the shards.

    Its memory grows with the number of shards, not with the number of samples. Lanes are equal parts of the dataset,
    the same for each seed. Each lane has its own order, and the lanes follow one another.

    Args:
        sizes: the number of samples in each shard.
        order: ``"global"``, ``"window"`` or ``"sequential"``.
        seed: the seed of the epoch.
        window_shards: the number of shards that ``"window"`` shuffles together.
        lanes: the number of lanes.
        passes: the number of earlier passes of the lanes over the dataset; see `lane_starts`.
        numbers: the numbers of the shards, by default from 0.

    Examples:
        >>> order = EpochOrder([2, 3], "sequential", seed=0)
        >>> [each.tolist() for each in order.find(np.arange(5))]
        [[0, 0, 1, 1, 1], [0, 1, 0, 1, 2]]
    """

    def __init__(
        self,
        sizes: Sequence[int] | Numbers,
        order: Order,
        *,
        seed: int,
        window_shards: int = 16,
        lanes: int = 1,
        passes: int = 0,
        numbers: Numbers | None = None,
    ) -> None:
        counts = np.asarray(sizes, np.int64)
        shards = np.arange(len(counts))
        if lanes > 1 and order != "sequential":
            shards = Permutation(len(counts), seed=derived_seed("lanes"))(shards)
        ends = np.cumsum(counts[shards])
        starts = ends - counts[shards]
        self._size = int(ends[-1]) if len(counts) else 0
        cuts = lane_starts(self._size, lanes, passes=passes)
        # Lanes begin within shards, so some shards have pieces in two or more lanes.
        pieces = np.sort(np.concatenate([starts, cuts[1:-1]]))
        owners = np.minimum(np.searchsorted(ends, pieces, "right"), len(counts) - 1)  # empty shards may be at the end
        firsts = np.searchsorted(pieces, cuts[:-1])  # the first piece of each lane
        own_lanes = np.repeat(np.arange(lanes, dtype=np.min_scalar_type(lanes)), np.diff(firsts, append=len(pieces)))
        shuffled = np.arange(len(pieces))
        if order == "window":
            shuffled = Permutation(len(pieces), seed=derived_seed("shards", seed))(shuffled)
            shuffled = shuffled[np.argsort(own_lanes[shuffled], kind="stable")]
        lengths = np.diff(pieces, append=self._size)[shuffled]
        self._ends = np.cumsum(lengths)
        self._shards = shards[owners[shuffled]]
        if numbers is not None:
            self._shards = numbers[self._shards]
        #: The difference between the number of a sample in its shard and its number in the order of the pieces.
        self._offsets = (pieces - starts[owners])[shuffled] - (self._ends - lengths)
        self._seed, self._order = seed, order
        self._permutations: dict[int, Permutation] = {}
        #: The positions at which windows begin and end; without windows, each lane is one.
        self._window_ends = cuts[1:]
        if order == "window":
            counted = np.arange(1, len(pieces) + 1) - firsts[own_lanes]
            is_last = (counted % window_shards == 0) | (np.diff(own_lanes, append=lanes) != 0)
            self._window_ends = self._ends[is_last]
        self._window_starts = np.concatenate(([0], self._window_ends[:-1]))

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._size

    def find(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shard of the sample at each position of the epoch, and the number of the sample in it.

        Args:
            positions: positions from 0 to ``len(order) - 1``.
        """
        if self._order != "sequential":
            positions = self._shuffle(positions)
        pieces = np.searchsorted(self._ends, positions, "right")
        return self._shards[pieces], positions + self._offsets[pieces]

    def _shuffle(self, positions: Numbers) -> Numbers:
        """Return the position to which each position is moved inside its window."""
        windows, which = np.unique(np.searchsorted(self._window_ends, positions, "right"), return_inverse=True)
        starts = self._window_starts[windows][which]
        return permute(positions - starts, which, [self._permutation(window) for window in windows.tolist()]) + starts

    def _permutation(self, window: int) -> Permutation:
        """Return the permutation of a window; the most recently used ones are kept."""
        if window not in self._permutations:
            if len(self._permutations) == KEPT:
                self._permutations.clear()
            size = int(self._window_ends[window] - self._window_starts[window])
            self._permutations[window] = Permutation(size, seed=derived_seed("window", self._seed, window))
        return self._permutations[window]


class LengthOrder:
    """Sorts the samples of another order by length within windows and shuffles the batches of each window.

    It moves samples only within their window and within their lane: each lane has its shortest samples in the same
    batches. The samples after the last full batch of the epoch stay at its end, so they are chosen independently of
    their length.

    Args:
        order: the other order.
        lengths: the length of each sample, in the order of the shards.
        starts: the number of the first sample of each shard.
        lanes: the lanes, which contribute the same number of samples to each batch.
        window: the number of batches in a window.
        seed: the seed of the epoch; None keeps the batches sorted.

    Examples:
        >>> lengths = np.array([5, 1, 4, 2, 9, 3, 6])
        >>> order = EpochOrder([7], "sequential", seed=0)
        >>> sorted_order = LengthOrder(order, lengths, np.array([0]), lanes=Lanes(7, batch=2), window=3, seed=None)
        >>> lengths[sorted_order.find(np.arange(7))[1]].tolist()
        [1, 2, 3, 4, 5, 9, 6]
    """

    def __init__(
        self, order: SampleOrder, lengths: Numbers, starts: Numbers, *, lanes: Lanes, window: int, seed: int | None
    ) -> None:
        self._order, self._lengths, self._starts = order, lengths, starts
        self._lanes, self._size, self._seed = lanes, window * lanes.lane_batch, seed
        #: The positions in the other order for each block of the most recently used windows.
        self._sorted: dict[int, Numbers] = {}

    def __len__(self) -> int:
        """Return the number of samples in the epoch."""
        return len(self._order)

    def find(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shard of the sample at each position of the epoch, and the number of the sample in it."""
        lanes, numbers = self._lanes.split(positions)
        windows, numbers = np.divmod(numbers, self._size)
        inside = numbers < self._lanes.whole - windows * self._size
        blocks, which = np.unique(windows[inside] * len(self._lanes) + lanes[inside], return_inverse=True)
        self._sort(blocks)
        rows = [self._sorted[block] for block in blocks.tolist()]
        starts = np.cumsum([0, *map(len, rows)])[which]
        moved = positions.copy()
        moved[inside] = np.concatenate([moved[:0], *rows])[starts + numbers[inside]]
        return self._order.find(moved)

    def _sort(self, blocks: Numbers) -> None:
        """Find the positions of blocks, which are lanes of windows, in the other order; discard earlier blocks."""
        count = len(self._lanes)
        oldest = int(blocks[0]) // count * count if len(blocks) else 0
        self._sorted = {block: row for block, row in self._sorted.items() if block >= oldest}
        new = np.array([block for block in blocks.tolist() if block not in self._sorted], np.int64)
        sizes = np.minimum(self._lanes.whole - new // count * self._size, self._size)
        for size in np.unique(sizes).tolist():  # a block of the last window may be smaller
            windows, lanes = np.divmod(new[sizes == size], count)
            positions = (self._lanes.starts[lanes] + windows * self._size)[:, None] + np.arange(size)
            shards, samples = self._order.find(positions.ravel())
            lengths = self._lengths[self._starts[shards] + samples].reshape(positions.shape)
            by_length = np.take_along_axis(positions, np.argsort(lengths, axis=1, kind="stable"), axis=1)
            batches = by_length.reshape(len(positions), -1, self._lanes.lane_batch)
            orders = self._orders_of_batches(windows, batches.shape[1])
            batches = np.take_along_axis(batches, orders[:, :, None], axis=1)
            self._sorted.update(zip(new[sizes == size].tolist(), batches.reshape(positions.shape), strict=True))

    def _orders_of_batches(self, windows: Numbers, count: int) -> Numbers:
        """Return the order of the batches of each window, which all lanes share."""
        known, which = np.unique(windows, return_inverse=True)
        numbers = np.tile(np.arange(count), len(known))
        if self._seed is not None:
            seeds = [derived_seed("batches by length", self._seed, window) for window in known.tolist()]
            permutations = [Permutation(count, seed=seed) for seed in seeds]
            numbers = permute(numbers, np.repeat(np.arange(len(known)), count), permutations)
        found: Numbers = numbers.reshape(len(known), count)[which]
        return found


def check_lengths(lengths: Any, count: int, owner: str) -> Numbers:
    """Return lengths as an array.

    Args:
        lengths: the lengths.
        count: the required number of lengths.
        owner: the dataset or selection that messages name.

    Raises:
        TypeError: the lengths are not integers.
        ValueError: there are more or fewer lengths, or one is negative.
    """
    found = np.asarray(lengths)
    if found.shape != (count,):
        raise ValueError(f"bucket_by needs {count} lengths, one per sample of {owner}, not the shape {found.shape}")
    if not np.issubdtype(found.dtype, np.integer) and count:
        raise TypeError(f"bucket_by must have integers as lengths, not {found.dtype}")
    found = found.astype(np.int64)
    if count and found.min() < 0:
        raise ValueError(f"bucket_by has the length {found.min()} for the sample {found.argmin()} of {owner}")
    return found
