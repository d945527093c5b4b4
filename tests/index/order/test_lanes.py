"""Lanes of an epoch: each rank reads the same part of the dataset in every epoch, in the same global batches."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from global_batches import mixed_order, numbers_at, starts_of
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_datapipes.index.order.batch_share import BatchShare, Remainder
from wds_datapipes.index.order.lanes import Lanes, lane_starts
from wds_datapipes.index.order.sample_order import TRIES, EpochOrder, LaneOrder, LengthOrder, Order, SampleOrder
from wds_datapipes.types import Instance

ORDERS: Any = st.sampled_from(["global", "window", "sequential"])
REMAINDERS: Any = st.sampled_from(["drop", "pad", "keep"])
SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=8)
FEW = st.lists(st.integers(0, 6), min_size=1, max_size=3)


def lanes_of(sizes: list[int], lanes: int, kind: Order) -> list[set[int]]:
    """Return the samples of each lane, which are those of an epoch without windows or lengths, whatever its seed."""
    order = EpochOrder(sizes, "sequential" if kind == "sequential" else "global", seed=0, lanes=lanes)
    starts = lane_starts(sum(sizes), lanes)
    return [{*numbers_at(order, sizes, range(start, end))} for start, end in pairwise(starts)]


def epoch_of(sizes: list[int], lanes: Lanes, kind: Order, seed: int, *, by_length: bool, window: int) -> LaneOrder:
    order: SampleOrder = EpochOrder(sizes, kind, seed=seed, window_shards=window, lanes=len(lanes))
    if by_length:
        lengths = np.arange(sum(sizes)) * 7 % 11
        order = LengthOrder(
            order, lengths, starts_of(sizes), lanes=lanes, window=window, seed=None if kind == "sequential" else seed
        )
    return LaneOrder(order, lanes)


@settings(max_examples=100)
@given(SIZES, st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), ORDERS, REMAINDERS, st.data())
def test_a_rank_reads_only_its_lanes_in_every_epoch(
    sizes: list[int], of_a_rank: int, ranks: int, share: int, workers: int, kind: Order, remainder: Remainder,
    data: st.DataObject,
) -> None:  # fmt: skip
    """Each sample comes once, and those of a rank, with its padding, are from the same lanes, whatever the seed."""
    count, number = sum(sizes), ranks * of_a_rank
    batch = number * share
    if count < (batch if remainder == "drop" else number):
        return
    by_length = data.draw(st.booleans(), "by length")
    lanes = Lanes(count, batch, number)
    members = lanes_of(sizes, number, kind)
    assert sorted(map(len, members)) == sorted(np.diff(lane_starts(count, number)).tolist())
    assert {*chain(*members)} == {*range(count)}
    window = data.draw(st.integers(1, 25), "window")
    for seed in (1, 2):
        order = epoch_of(sizes, lanes, kind, seed, by_length=by_length, window=window)
        everything = numbers_at(order, sizes, range(count))
        assert sorted(everything) == list(range(count))
        assert numbers_at(order, sizes, range(count)[::-1]) == everything[::-1]
        alone = data.draw(st.integers(0, count - 1), "position")
        assert numbers_at(order, sizes, [alone]) == [everything[alone]]
        for start in range(0, count - batch + 1, batch):
            for slot, sample in enumerate(everything[start : start + batch]):
                assert sample in members[slot // share]
        yielded = Counter[int]()
        for rank in range(ranks):
            own = set[int]().union(*members[rank * of_a_rank : (rank + 1) * of_a_rank])
            for worker in range(workers):
                part = BatchShare(count, batch, remainder, Instance(rank, ranks, worker, workers), lanes=number)
                positions = [*chain.from_iterable(each.tolist() for each in part.positions())]
                assert own.issuperset(numbers_at(order, sizes, positions))
                yielded.update(positions)
        assert set(yielded.values()) <= {1}
        kept = count if remainder != "drop" else count // batch * batch
        padded = -(-count // batch) * batch if remainder == "pad" else kept
        assert sorted(yielded) == list(range(padded))


@given(SIZES.filter(any), st.integers(1, 5), st.integers(1, 25), st.integers(0, 99))
def test_a_window_has_the_shards_of_one_lane(sizes: list[int], lanes: int, window: int, seed: int) -> None:
    order = EpochOrder(sizes, "window", seed=seed, window_shards=window, lanes=lanes)
    starts = lane_starts(sum(sizes), lanes)
    for start, end in pairwise(starts):
        shards = order.find(np.arange(start, end))[0].tolist()
        left, open_now = Counter(shards), set[int]()
        for shard in shards:
            open_now.add(shard)
            assert len(open_now) <= window
            left[shard] -= 1
            if not left[shard]:
                open_now.remove(shard)


@settings(max_examples=80)
@given(st.lists(FEW.filter(any), min_size=1, max_size=3), st.integers(1, 6), st.integers(1, 3), ORDERS, st.data())
def test_a_lane_of_a_mixture_draws_from_its_lanes_in_exact_proportions(
    datasets: list[list[int]], number: int, share: int, kind: Order, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.integers(1, 4), min_size=len(datasets), max_size=len(datasets)))
    period, batch = sum(weights), number * share
    count = batch * period + data.draw(st.integers(0, batch), "rest")
    lanes = Lanes(count, batch, number)
    mixed = mixed_order(datasets, weights, kind, 3, lanes)
    sizes = [*chain(*datasets)]
    found = np.array(numbers_at(LaneOrder(mixed, lanes), sizes, range(count)))
    ends = np.cumsum([sum(each) for each in datasets])
    sources = np.searchsorted(ends, found, "right")
    if batch % period == 0:
        for start in range(0, count - batch + 1, batch):
            of_batch = np.bincount(sources[start : start + batch], minlength=len(datasets))
            assert of_batch.tolist() == [weight * batch // period for weight in weights]
    by_lane = found[: count // batch * batch].reshape(-1, number, share)
    totals = [Counter[int]() for _ in datasets]
    # With as many lanes as samples, each sample is a lane, and they are in the order that is cut into lanes.
    ordered = [lanes_of(each, sum(each), kind) for each in datasets]
    for lane in range(number):
        own = by_lane[:, lane].ravel()
        drawn = np.searchsorted(ends, own, "right")
        for start in range(0, len(own) - period + 1, period):
            assert np.bincount(drawn[start : start + period], minlength=len(datasets)).tolist() == weights
        for source, (each, end) in enumerate(zip(datasets, ends.tolist(), strict=True)):
            size = sum(each)
            mine = set[int]().union(*ordered[source][lane * size // number : -(-(lane + 1) * size // number)])
            draws = (own[drawn == source] - (end - size)).tolist()
            assert mine.issuperset(draws)
            totals[source].update(draws)
    for times, each in zip(totals, datasets, strict=True):
        assert max(times.values(), default=0) - min(times[sample] for sample in range(sum(each))) <= 2


@given(SIZES, st.integers(1, 5), st.integers(1, 3), st.data())
def test_substitutes_are_of_the_same_lane(sizes: list[int], number: int, share: int, data: st.DataObject) -> None:
    count, batch = sum(sizes), number * share
    if count < batch:
        return
    order = epoch_of(sizes, Lanes(count, batch, number), "global", 1, by_length=False, window=2)
    members = lanes_of(sizes, number, "global")
    position = data.draw(st.integers(0, count // batch * batch - 1), "position")
    (lane,) = (own for own in members if numbers_at(order, sizes, [position])[0] in own)
    others = [order.substitutes(np.array([position]), tried).item() for tried in range(1, TRIES + 1)]
    assert lane.issuperset(numbers_at(order, sizes, others[:50]))
    assert {*others} <= {*range(count)}
    assert count == 1 or {*others} != {position}


# Counted for 512 ranks of 8 workers, on 64 hosts: 20,000 shards of 5,000 samples


SHARDS, SAMPLES, BATCH = 20_000, 5_000, 32_768


def window_order(lanes: int, *, scale: int = 1, seed: int = 5) -> LaneOrder:
    sizes = np.full(SHARDS, SAMPLES // scale)
    base = EpochOrder(sizes, "window", seed=seed, lanes=lanes)
    return LaneOrder(base, Lanes(sizes.sum().item(), BATCH // scale, lanes))


def count_opens(shards: Iterable[int], most: int) -> int:
    """Return the number of times shards are opened if the ``most`` recently used ones stay open."""
    opened, count = OrderedDict[int, None](), 0
    for shard in shards:
        count += shard not in opened
        opened[shard] = None
        opened.move_to_end(shard)
        if len(opened) > most:
            opened.popitem(last=False)
    return count


@pytest.mark.parametrize(("lanes", "expected"), [(1, 0.25), (64, 0.0128), (512, 0.0017), (4096, 0.0017)])
def test_a_worker_opens_each_shard_of_its_lanes_once(lanes: int, expected: float) -> None:
    order = window_order(lanes)
    for rank, worker in ((0, 0), (301, 5)):
        part = BatchShare(len(order), BATCH, "drop", Instance(rank, 512, worker, 8), lanes=lanes)
        shards = [*chain.from_iterable(order.find(each)[0].tolist() for each in part.positions())]
        assert 0.9 * expected < count_opens(shards, 64) / len(shards) < expected * 1.01


@pytest.mark.parametrize(("lanes", "epochs", "most"), [(1, 1, SHARDS), (64, 3, 314), (512, 3, 320)])
def test_a_host_has_the_same_shards_in_all_epochs(lanes: int, epochs: int, most: int) -> None:
    """This uses an eighth of the shard and batch sizes; all workers of a host's 8 ranks share one part."""
    touched = []
    for seed in range(epochs):
        order = window_order(lanes, scale=8, seed=seed)
        part = BatchShare(len(order), BATCH // 8, "pad", Instance(17, 64), lanes=lanes)
        touched.append({*np.concatenate([order.find(each)[0] for each in part.positions()]).tolist()})
    assert most * 0.95 < len(touched[0]) <= most
    assert all(shards == touched[0] for shards in touched)


@pytest.mark.parametrize("kind", ["global", "window"])
@pytest.mark.parametrize("number", [512, 4096])
def test_a_worker_of_many_sorts_the_windows_of_its_own_lanes(kind: Order, number: int) -> None:
    """With 512 ranks of 8 workers, a worker looks at 9 samples for each one it yields; with one lane, at 4,000."""
    asked = []

    class CountingOrder(EpochOrder):
        def find(self, positions: Any) -> Any:
            asked.append(len(positions))
            return super().find(positions)

    batch, workers = 32_768, 8
    sizes = [5000] * (40 * batch // 5000)
    lanes = Lanes(sum(sizes), batch, number)
    order = CountingOrder(sizes, kind, seed=1, lanes=number)
    lengths = np.arange(sum(sizes)) % 97
    by_length = LengthOrder(order, lengths, starts_of(sizes), lanes=lanes, window=10, seed=1)
    share = BatchShare(sum(sizes), batch, "drop", Instance(17, 512, 3, workers), lanes=number)
    for positions in share.positions():
        LaneOrder(by_length, lanes).find(positions)
    assert sum(asked) <= (workers + 1) * (len(share) + batch // 512)
    assert len(asked) <= 10
