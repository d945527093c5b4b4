"""The order of batches of samples of similar length."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wds_datapipes.index.order.epoch_order import EpochOrder, Order
from wds_datapipes.index.order.length_order import LengthOrder

ORDERS: Any = st.sampled_from(["global", "window", "sequential"])
SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=6)
SEEDS = st.none() | st.integers(0, 99)


def starts_of(sizes: list[int]) -> Any:
    return np.cumsum(sizes, dtype=np.int64) - sizes


def numbers_of(order: Any, sizes: list[int]) -> list[int]:
    shards, places = order.find(np.arange(len(order)))
    numbers: list[int] = (starts_of(sizes)[shards] + places).tolist()
    return numbers


@given(SIZES, ORDERS, SEEDS, st.integers(1, 7), st.integers(1, 5), st.data())
def test_each_window_has_its_samples_in_batches_of_neighbours_by_length(
    sizes: list[int], kind: Order, seed: int | None, batch_size: int, window: int, data: st.DataObject
) -> None:
    count = sum(sizes)
    lengths = np.array(data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)), np.int64)
    base = EpochOrder(sizes, kind, seed=3, window_shards=2)
    starts = starts_of(sizes)
    order = LengthOrder(base, lengths, starts, batch_size=batch_size, window=window, seed=seed)
    before, after = numbers_of(base, sizes), numbers_of(order, sizes)
    whole = count - count % batch_size
    assert after[whole:] == before[whole:]
    for start in range(0, whole, window * batch_size):
        part = slice(start, min(start + window * batch_size, whole))
        assert sorted(after[part]) == sorted(before[part])
        batches = [lengths[after[at : at + batch_size]].tolist() for at in range(start, part.stop, batch_size)]
        assert batches == list(map(sorted, batches))
        if seed is not None:
            batches.sort()
        assert np.concatenate(batches).tolist() == sorted(lengths[before[part]].tolist())


@given(SIZES.filter(any), ORDERS, SEEDS, st.integers(1, 7), st.integers(1, 5))
def test_a_position_alone_determines_the_sample(
    sizes: list[int], kind: Order, seed: int | None, batch_size: int, window: int
) -> None:
    lengths = np.arange(sum(sizes))[::-1] % 11
    starts = starts_of(sizes)

    def new() -> LengthOrder:
        base = EpochOrder(sizes, kind, seed=3)
        return LengthOrder(base, lengths, starts, batch_size=batch_size, window=window, seed=seed)

    whole = [each.tolist() for each in new().find(np.arange(sum(sizes)))]
    for position in range(0, sum(sizes), 5):
        shards, places = new().find(np.array([position]))
        assert (shards[0], places[0]) == (whole[0][position], whole[1][position])
    backwards = [each.tolist()[::-1] for each in new().find(np.arange(sum(sizes))[::-1])]
    assert backwards == whole


def test_seeds_shuffle_the_batches_of_a_window() -> None:
    lengths = np.arange(400)
    orders = [
        numbers_of(
            LengthOrder(
                EpochOrder([400], "sequential", seed=0), lengths, np.array([0]), batch_size=4, window=25, seed=seed
            ),
            [400],
        )
        for seed in (None, 1, 2)
    ]
    assert orders[0] == list(range(400))
    assert len({tuple(order) for order in orders}) == 3
    for order in orders:
        assert sorted(order[:100]) == list(range(100))
