"""The order of an epoch that draws samples from several datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wds_datapipes.errors import StateError
from wds_datapipes.index.order.draws import Pass
from wds_datapipes.index.order.lanes import Lanes
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.sample_order import EpochOrder, Order
from wds_datapipes.index.order.timeline import RunTimeline
from wds_datapipes.seeds import derived_seed


class MixedOrder:
    """The order of an epoch that mixes several datasets in exact proportions, as part of a run.

    Each lane draws from its own lane of each dataset, in a `DrawPattern` that continues from lane to lane in the slots
    of a batch, so the proportions are also exact in batches of whole periods. Successive draws from a dataset follow
    its own order through all epochs, and a new order once all of its samples have been read: no sample is read again
    before all others of its lane. Like an `EpochOrder`, it is computed, not stored.

    Args:
        timeline: the phases of the run.
        epoch: the number of the epoch.
        sizes: the number of samples in each shard.
        shards_of: the shards of each dataset.
        order: the order within each dataset.
        seed: the seed of the run.
        lanes: the lanes of the epoch, which follow one another in this order.
        window_shards: how many shards of a dataset ``"window"`` shuffles together.
    """

    def __init__(
        self,
        timeline: RunTimeline,
        epoch: int,
        sizes: Sequence[int] | Numbers,
        shards_of: Mapping[str, slice],
        order: Order,
        *,
        seed: int,
        lanes: Lanes,
        window_shards: int = 16,
    ) -> None:
        names, self._draws, passes = timeline.draws(None if order == "sequential" else seed)
        self._earlier = timeline.drawn(epoch)
        self._begins = [max(int((draws.begins - self._earlier).max()), 0) for draws in self._draws]
        self._lanes = lanes
        options = {"order": order, "window_shards": window_shards, "lanes": len(lanes)}
        self._datasets = [
            DrawnDataset(name, own, np.asarray(sizes, np.int64), shards_of, seed, options)
            for name, own in zip(names, passes, strict=True)
        ]

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._lanes.count

    def find(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shard of the sample at each position of the epoch, and the number of the sample in it.

        Args:
            positions: positions from 0 to ``len(order) - 1``.

        Raises:
            StateError: the sample belongs to a dataset that was removed.
        """
        lanes, numbers = self._lanes.split(positions)
        which = np.searchsorted(self._begins, numbers, "right") - 1
        numbers = numbers + self._earlier[lanes]
        chosen, draws, shards, samples = (np.empty_like(numbers) for _ in range(4))
        for number in np.unique(which).tolist():
            own = which == number
            chosen[own], draws[own] = self._draws[number].find(lanes[own], numbers[own])
        for number in np.unique(chosen).tolist():
            own = chosen == number
            shards[own], samples[own] = self._datasets[number].find(lanes[own], draws[own])
        return shards, samples


@dataclass(eq=False)
class DrawnDataset:
    """A dataset that is read pass by pass.

    Args:
        name: its name.
        passes: the passes from which it has certain shards.
        sizes: the number of samples in each shard of all datasets.
        shards_of: the shards of each dataset.
        seed: the seed of the run.
        options: the options of the `EpochOrder` of each pass.
    """

    name: str
    passes: Sequence[Pass]
    sizes: Numbers
    shards_of: Mapping[str, slice]
    seed: int
    options: Mapping[str, Any]
    _orders: dict[int, EpochOrder] = field(default_factory=dict, init=False)

    def find(self, lanes: Numbers, draws: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shards of draws and the numbers of the samples in them.

        Raises:
            StateError: the dataset was removed.
        """
        shards, samples = np.empty_like(draws), np.empty_like(draws)
        count = self.options["lanes"]
        ends = [*(each.draws for each in self.passes[1:]), None]
        for known, end in zip(self.passes, ends, strict=True):
            inside = draws >= known.draws[lanes]
            if end is not None:
                inside &= draws < end[lanes]
            numbers = known.numbers(lanes, draws, count)
            passes = known.passes(lanes, numbers, count)
            for number in np.unique(passes[inside]).tolist():
                own = inside & (passes == number)
                found = self._order_of(number, known).find(numbers[own] - number * known.samples // count)
                shards[own], samples[own] = found
        return shards, samples

    def _order_of(self, number: int, known: Pass) -> EpochOrder:
        """Return the order of a pass; the last two are kept, because lanes differ by a sample."""
        if number not in self._orders:
            self._orders = {at: order for at, order in self._orders.items() if at == number - 1}
            own = numbers_of_shards(known.shards, self.shards_of)
            seed = derived_seed("dataset", self.seed, self.name, number)
            self._orders[number] = EpochOrder(self.sizes[own], seed=seed, passes=number, numbers=own, **self.options)
        return self._orders[number]


def numbers_of_shards(shards: Mapping[str, int], shards_of: Mapping[str, slice]) -> Numbers:
    """Return the numbers of the first shards of some datasets.

    Args:
        shards: the number of shards of each dataset.
        shards_of: the shards of all datasets.

    Raises:
        StateError: there is no such dataset.
    """
    if missing := [name for name in shards if name not in shards_of]:
        raise StateError(
            f"The next samples come from the dataset {missing[0]!r}, which was removed from the pipeline. Pass it with "
            "a weight of 0"
        )
    return np.concatenate(
        [np.arange(shards_of[name].start, shards_of[name].start + count) for name, count in shards.items()]
    )
