"""Orders of the samples of an epoch: each finds a sample by its position, without storing the order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.samples.mixing import check_weights
from wds_datapipes.seeds import derived_seed

Numbers: TypeAlias = "npt.NDArray[np.int64]"
Order: TypeAlias = Literal["global", "window", "sequential"]
"""``"global"`` shuffles all samples, ``"window"`` the shards and then those of a few shards at a time."""
Lengths: TypeAlias = npt.ArrayLike | Callable[[ShardIndex], npt.ArrayLike]
"""The length of each sample, or a function that returns those of a shard from its index."""

#: The number of rounds. In small networks, fewer than 24 leave some permutations more likely than others.
ROUNDS, MANY_ROUNDS, FEW_BITS = 8, 24, 10
#: The multipliers of the finalizer of MurmurHash3.
FACTORS = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
HALF = np.uint64(33)
#: The most draws in a period of a mixture; weights that need more are rounded.
MAX_PERIOD = 1 << 16


class Permutation:
    """A random permutation of ``range(size)``, in constant memory.

    It is a Feistel network on as many bits as ``size`` needs. Each round adds a hash of one half of the bits to the
    other half, so it is invertible, and a permutation of a power of two. Numbers that it maps beyond ``size`` are
    mapped again until they are not (cycle walking), which leaves a permutation of ``range(size)``; fewer than two
    steps are needed on average. The result depends on nothing but the arguments, on all platforms.

    Args:
        size: how many numbers there are.
        seed: selects the permutation.

    Examples:
        >>> Permutation(5, seed=0)(np.arange(5)).tolist()
        [4, 0, 3, 1, 2]
    """

    def __init__(self, size: int, *, seed: int) -> None:
        if not 0 <= size <= 1 << 62:
            raise ValueError(f"a permutation has a size from 0 to 2**62, not {size}")
        self.size = size
        bits = max(size - 1, 0).bit_length()
        self._low, self._high = (bits + 1) // 2, bits // 2
        rounds = MANY_ROUNDS if bits <= FEW_BITS else ROUNDS
        self._keys = [np.uint64(derived_seed("permutation", seed, size, number)) for number in range(rounds)]

    def __call__(self, numbers: Numbers) -> Numbers:
        """Return where each of the numbers is mapped to."""
        found = numbers.astype(np.uint64)
        pending = np.arange(len(found))
        while len(pending):
            moved = found[pending] = self._encrypt(found[pending])
            pending = pending[moved >= np.uint64(self.size)]
        return found.astype(np.int64)

    def _encrypt(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        shift, mask = np.uint64(self._low), np.uint64((1 << self._low) - 1)
        high_mask = np.uint64((1 << self._high) - 1)
        low, high = numbers & mask, numbers >> shift
        for number, key in enumerate(self._keys):
            if number % 2:
                high ^= hash_numbers(low ^ key) & high_mask
            else:
                low ^= hash_numbers(high ^ key) & mask
        encrypted: npt.NDArray[np.uint64] = low | high << shift
        return encrypted


def hash_numbers(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a hash of each number, which is another one for each."""
    for factor in FACTORS:
        numbers = (numbers ^ numbers >> HALF) * factor
    hashed: npt.NDArray[np.uint64] = numbers ^ numbers >> HALF
    return hashed


class SampleOrder(Protocol):
    """Finds the samples of an epoch by their positions in it."""

    def __len__(self) -> int:
        """Return the number of samples in the epoch."""

    def find(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shard of the sample at each position of the epoch, and the number of the sample in it."""


class EpochOrder:
    """The order of the samples in an epoch: a function of a seed and the sizes of the shards.

    Its memory grows with the number of shards, and not with that of samples.

    Args:
        sizes: the number of samples in each shard.
        order: ``"global"``, ``"window"`` or ``"sequential"``.
        seed: the seed of the epoch.
        window_shards: how many shards ``"window"`` shuffles together.

    Examples:
        >>> order = EpochOrder([2, 3], "sequential", seed=0)
        >>> [each.tolist() for each in order.find(np.arange(5))]
        [[0, 0, 1, 1, 1], [0, 1, 0, 1, 2]]
    """

    def __init__(self, sizes: Sequence[int] | Numbers, order: Order, *, seed: int, window_shards: int = 16) -> None:
        counts = np.asarray(sizes, np.int64)
        self._shards = np.arange(len(counts))  # the shard at each place
        if order == "window":
            self._shards = Permutation(len(counts), seed=derived_seed("shards", seed))(self._shards)
        self._ends = np.cumsum(counts[self._shards])
        self._size = int(self._ends[-1]) if len(counts) else 0
        self._seed, self._order = seed, order
        self._last = -1, Permutation(0, seed=0)
        #: The positions at which windows end; without windows, there is one.
        self._window_ends = (
            np.append(self._ends[window_shards - 1 :: window_shards], self._size)
            if order == "window"
            else np.array([self._size])
        )

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
        places = np.searchsorted(self._ends, positions, "right")
        starts = np.concatenate(([0], self._ends))[places]
        return self._shards[places], positions - starts

    def _shuffle(self, positions: Numbers) -> Numbers:
        """Return where each position is moved to inside of its window."""
        shuffled = np.empty_like(positions)
        windows = np.searchsorted(self._window_ends, positions, "right")
        for window in np.unique(windows).tolist():
            start = int(self._window_ends[window - 1]) if window else 0
            inside = windows == window
            shuffled[inside] = self._permutation(window)(positions[inside] - start) + start
        return shuffled

    def _permutation(self, window: int) -> Permutation:
        """Return the permutation of a window; that of the last one is kept."""
        if self._last[0] != window:
            start = int(self._window_ends[window - 1]) if window else 0
            size = int(self._window_ends[window]) - start
            self._last = window, Permutation(size, seed=derived_seed("window", self._seed, window))
        return self._last[1]


class LengthOrder:
    """Sorts the samples of another order by length within windows, and shuffles the batches of each window.

    It moves samples only within their window. The samples after the last whole batch of the epoch stay at its end, so
    their choice does not depend on their length.

    Args:
        order: the other order.
        lengths: the length of each sample, in the order of the shards.
        starts: the number of the first sample of each shard.
        batch_size: the number of samples in a batch.
        window: the number of batches in a window.
        seed: the seed of the epoch; None keeps the batches sorted.

    Examples:
        >>> lengths = np.array([5, 1, 4, 2, 9, 3, 6])
        >>> order = EpochOrder([7], "sequential", seed=0)
        >>> sorted_order = LengthOrder(order, lengths, np.array([0]), batch_size=2, window=3, seed=None)
        >>> lengths[sorted_order.find(np.arange(7))[1]].tolist()
        [1, 2, 3, 4, 5, 9, 6]
    """

    def __init__(
        self, order: SampleOrder, lengths: Numbers, starts: Numbers, *, batch_size: int, window: int, seed: int | None
    ) -> None:
        self._order, self._lengths, self._starts = order, lengths, starts
        self._batch_size, self._window, self._seed = batch_size, window, seed
        self._last = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        """Return the number of samples in the epoch."""
        return len(self._order)

    def find(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shard of the sample at each position of the epoch, and the number of the sample in it."""
        size = self._window * self._batch_size
        windows = positions // size
        moved = np.empty_like(positions)
        for window in np.unique(windows).tolist():
            inside = windows == window
            moved[inside] = self._positions(window)[positions[inside] - window * size]
        return self._order.find(moved)

    def _positions(self, window: int) -> Numbers:
        """Return the positions in the other order, for a window; those of the last one are kept."""
        if self._last[0] != window:
            start = window * self._window * self._batch_size
            positions = np.arange(start, min(start + self._window * self._batch_size, len(self)))
            count = len(positions) // self._batch_size
            whole, rest = np.split(positions, [count * self._batch_size])
            shards, places = self._order.find(whole)
            by_length = whole[np.argsort(self._lengths[self._starts[shards] + places], kind="stable")]
            batches = by_length.reshape(count, self._batch_size)
            if self._seed is not None:
                seed = derived_seed("batches by length", self._seed, window)
                batches = batches[Permutation(count, seed=seed)(np.arange(count))]
            self._last = window, np.concatenate([batches.ravel(), rest])
        return self._last[1]


def check_lengths(lengths: Any, count: int, owner: str) -> Numbers:
    """Return lengths as an array.

    Args:
        lengths: the lengths.
        count: how many there must be.
        owner: the dataset or selection that messages name.

    Raises:
        TypeError: they are not integers.
        ValueError: there are more or fewer, or one is negative.
    """
    found = np.asarray(lengths)
    if found.shape != (count,):
        raise ValueError(f"bucket_by has lengths of the shape {found.shape}, and {owner} has {count} samples")
    if not np.issubdtype(found.dtype, np.integer) and count:
        raise TypeError(f"bucket_by must have integers as lengths, not {found.dtype}")
    found = found.astype(np.int64)
    if count and found.min() < 0:
        raise ValueError(f"bucket_by has the length {found.min()} for the sample {found.argmin()} of {owner}")
    return found


class MixedOrder:
    """The order of an epoch that draws samples from several datasets in exact proportions.

    A period is the shortest sequence of draws with the exact proportions. In each, the draws from a dataset are evenly
    spaced, and the seed chooses where that pattern begins, so that no rank always reads the same dataset. Successive
    draws from a dataset read it in an order of its own, and in another one when all of its samples have been read: no
    sample is read again before all others have been. Like an `EpochOrder`, it is computed and not stored.

    Args:
        datasets: for each dataset, the numbers of samples in its shards.
        weights: the number of draws from each dataset in a period; 0 for one that is not read or has no samples.
        order: the order within each dataset.
        seed: the seed of the epoch.
        length: the number of samples in the epoch.
        window_shards: how many shards of a dataset ``"window"`` shuffles together.

    Examples:
        >>> order = MixedOrder([[2], [5]], [1, 2], "sequential", seed=0, length=6)
        >>> [each.tolist() for each in order.find(np.arange(6))]
        [[1, 0, 1, 1, 0, 1], [0, 0, 1, 2, 1, 3]]
    """

    def __init__(
        self,
        datasets: Sequence[Sequence[int] | Numbers],
        weights: Sequence[int],
        order: Order,
        *,
        seed: int,
        length: int,
        window_shards: int = 16,
    ) -> None:
        self._datasets = [np.asarray(sizes, np.int64) for sizes in datasets]
        self._sizes = [int(sizes.sum()) for sizes in self._datasets]
        ends = np.cumsum([len(sizes) for sizes in self._datasets])
        self._first_shards = ends - [len(sizes) for sizes in self._datasets]
        self._order, self._seed, self._length, self._window_shards = order, seed, length, window_shards
        self._key = np.uint64(derived_seed("mixture", seed))
        self._weights = np.asarray(weights, np.int64)
        #: The dataset of each place of the pattern.
        self._pattern = _spaced_evenly(self._weights)
        #: The places, by dataset; a dataset's number, times the length of the pattern, is added to its places.
        places = np.arange(len(self._pattern)) + self._pattern * len(self._pattern)
        self._places = np.sort(places)
        self._last_orders: dict[int, tuple[int, EpochOrder]] = {}

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._length

    def find(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shard of the sample at each position of the epoch, and the number of the sample in it.

        Args:
            positions: positions from 0 to ``len(order) - 1``.
        """
        period = len(self._pattern)
        periods, draws = np.divmod(positions, period)
        begins = np.zeros_like(draws)
        if self._order != "sequential":
            begins = (hash_numbers(periods.astype(np.uint64) ^ self._key) % np.uint64(period)).astype(np.int64)
        chosen = self._pattern[(begins + draws) % period]
        earlier = self._count_before(chosen, (begins + draws) % period) - self._count_before(chosen, begins)
        rounds = periods * self._weights[chosen] + earlier % self._weights[chosen]
        shards, places = np.empty_like(rounds), np.empty_like(rounds)
        for number in np.unique(chosen).tolist():
            passes, rest = np.divmod(rounds, self._sizes[number])
            for epoch in np.unique(passes[chosen == number]).tolist():
                own = (chosen == number) & (passes == epoch)
                found, places[own] = self._order_of(number, epoch).find(rest[own])
                shards[own] = found + self._first_shards[number]
        return shards, places

    def _count_before(self, datasets: Numbers, places: Numbers) -> Numbers:
        """Return how many draws from a dataset are before a place of the pattern, up to a constant for the dataset."""
        return np.searchsorted(self._places, datasets * len(self._pattern) + places)

    def _order_of(self, number: int, epoch: int) -> EpochOrder:
        """Return the order of a dataset in an epoch of its own; that of the last one is kept."""
        known, order = self._last_orders.get(number, (-1, None))
        if order is None or known != epoch:
            seed = derived_seed("dataset", self._seed, number, epoch)
            order = EpochOrder(self._datasets[number], self._order, seed=seed, window_shards=self._window_shards)
            self._last_orders[number] = epoch, order
        return order


def _spaced_evenly(weights: Numbers) -> Numbers:
    """Return the number of each weight as often as the weight says, evenly spaced."""
    numbers = np.repeat(np.arange(len(weights)), weights)
    ranks = np.arange(len(numbers)) - np.repeat(np.cumsum(weights) - weights, weights)
    return numbers[np.argsort((ranks + 0.5) / weights[numbers], kind="stable")]


def integer_weights(weights: Mapping[str, float], names: Sequence[str]) -> list[int]:
    """Return integers in the proportions of weights, in the order of the datasets' names.

    Decimal fractions are exact, such as 0.7 and 0.3. If the sum of the integers would exceed `MAX_PERIOD`, they are
    rounded to about that sum, and a positive weight stays positive.

    Raises:
        ValueError: a weight is missing, negative or not finite, is for an unknown dataset, or all are 0.
        TypeError: the weights are not a mapping to numbers.

    Examples:
        >>> integer_weights({"web": 0.75, "books": 0.25}, ["web", "books"])
        [3, 1]
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f'weights must be a mapping, as in {{"{names[0]}": 2}}, not {weights!r}')
    if {*weights} != {*names}:
        raise ValueError(f"weights are for {sorted(weights, key=str)}, and the datasets are {sorted(names)}")
    check_weights({repr(name): weights[name] for name in names})
    given = [weights[name] for name in names]
    fractions = [Fraction(weight) if isinstance(weight, int) else Fraction(str(float(weight))) for weight in given]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    found = [int(fraction * scale) for fraction in fractions]
    divisor = math.gcd(*found)
    found = [number // divisor for number in found]
    if sum(found) > MAX_PERIOD:
        total = sum(found)
        found = [max(round(number * MAX_PERIOD / total), 1) if number else 0 for number in found]
    return found
