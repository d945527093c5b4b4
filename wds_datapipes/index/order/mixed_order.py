"""The order of an epoch that mixes several datasets, and the weights of these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from wds_datapipes.index.order.lanes import Lanes
from wds_datapipes.index.order.permutation import Numbers, hash_numbers
from wds_datapipes.index.order.sample_order import EpochOrder, Order
from wds_datapipes.samples.mixing import check_weights
from wds_datapipes.seeds import derived_seed

#: The most draws in a period of a mixture; weights that need more are rounded.
MAX_PERIOD = 1 << 16


class MixedOrder:
    """The order of an epoch that draws samples from several datasets in exact proportions.

    A period is the shortest sequence of draws with the exact proportions. In each, the draws from a dataset are evenly
    spaced, and the seed chooses where that pattern begins, so that no rank always reads the same dataset. Successive
    draws from a dataset read it in an order of its own, and in another one when all of its samples have been read: no
    sample is read again before all others of its lane have been. Like an `EpochOrder`, it is computed and not stored.

    Each lane draws from its own lane of each dataset. The pattern continues from lane to lane in the slots of a batch,
    so that the proportions are exact in batches of whole periods too.

    Args:
        datasets: for each dataset, the numbers of samples in its shards.
        weights: the number of draws from each dataset in a period; 0 for one that is not read or has no samples.
        order: the order within each dataset.
        seed: the seed of the epoch.
        lanes: the lanes of the epoch, which follow one another in this order.
        window_shards: how many shards of a dataset ``"window"`` shuffles together.

    Examples:
        >>> order = MixedOrder([[2], [5]], [1, 2], "sequential", seed=0, lanes=Lanes(6))
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
        lanes: Lanes,
        window_shards: int = 16,
    ) -> None:
        self._datasets = [np.asarray(sizes, np.int64) for sizes in datasets]
        self._sizes = [int(sizes.sum()) for sizes in self._datasets]
        ends = np.cumsum([len(sizes) for sizes in self._datasets])
        self._first_shards = ends - [len(sizes) for sizes in self._datasets]
        self._order, self._seed, self._lanes, self._window_shards = order, seed, lanes, window_shards
        self._key = np.uint64(derived_seed("mixture", seed))
        self._weights = np.asarray(weights, np.int64)
        #: The dataset of each place of the pattern.
        self._pattern = _spaced_evenly(self._weights)
        #: The places, by dataset; a dataset's number, times the length of the pattern, is added to its places.
        places = np.arange(len(self._pattern)) + self._pattern * len(self._pattern)
        self._places = np.sort(places)
        self._orders: dict[tuple[int, int], EpochOrder] = {}

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._lanes.count

    def find(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shard of the sample at each position of the epoch, and the number of the sample in it.

        Args:
            positions: positions from 0 to ``len(order) - 1``.
        """
        period = len(self._pattern)
        lanes, numbers = self._lanes.split(positions)
        periods, draws = np.divmod(numbers, period)
        begins = lanes * self._lanes.share % period
        if self._order != "sequential":
            hashed = hash_numbers(periods.astype(np.uint64) ^ self._key) % np.uint64(period)
            begins = (begins + hashed.astype(np.int64)) % period
        chosen = self._pattern[(begins + draws) % period]
        earlier = self._count_before(chosen, (begins + draws) % period) - self._count_before(chosen, begins)
        rounds = periods * self._weights[chosen] + earlier % self._weights[chosen]
        shards, places = np.empty_like(rounds), np.empty_like(rounds)
        for number in np.unique(chosen).tolist():
            size, count = self._sizes[number], len(self._lanes)
            draws = rounds + lanes * size // count
            # In pass p, the lane begins at (p + lane) * size // count - p * size // count; see `lane_starts`.
            passes = ((draws + 1) * count - 1) // size - lanes
            for epoch in np.unique(passes[chosen == number]).tolist():
                own = (chosen == number) & (passes == epoch)
                found, places[own] = self._order_of(number, epoch).find(draws[own] - epoch * size // count)
                shards[own] = found + self._first_shards[number]
        return shards, places

    def _count_before(self, datasets: Numbers, places: Numbers) -> Numbers:
        """Return how many draws from a dataset are before a place of the pattern, up to a constant for the dataset."""
        return np.searchsorted(self._places, datasets * len(self._pattern) + places)

    def _order_of(self, number: int, epoch: int) -> EpochOrder:
        """Return the order of a dataset in an epoch of its own; the last two are kept, as lanes differ by a sample."""
        if (number, epoch) not in self._orders:
            seed = derived_seed("dataset", self._seed, number, epoch)
            self._orders = {at: order for at, order in self._orders.items() if at[0] != number or at[1] == epoch - 1}
            self._orders[number, epoch] = EpochOrder(
                self._datasets[number],
                self._order,
                seed=seed,
                window_shards=self._window_shards,
                lanes=len(self._lanes),
                passes=epoch,
            )
        return self._orders[number, epoch]


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
