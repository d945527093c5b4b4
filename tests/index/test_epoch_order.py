"""The order of samples in an epoch, as a function of the sizes of the shards."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wds_datapipes.index.order.epoch_order import EpochOrder, Order

SIZES = st.lists(st.integers(0, 30), max_size=20)


def pairs(order: EpochOrder, positions: range | None = None) -> list[tuple[int, int]]:
    """Return the shard and the number of each sample."""
    shards, numbers = order.find(np.array(positions or range(len(order)), np.int64))
    return list(zip(shards.tolist(), numbers.tolist(), strict=True))


@given(SIZES, st.sampled_from(["global", "window", "sequential"]), st.integers(0, 99), st.integers(1, 25))
def test_each_sample_has_one_position(sizes: list[int], kind: Order, seed: int, window: int) -> None:
    order = EpochOrder(sizes, kind, seed=seed, window_shards=window)
    expected = [(shard, number) for shard, size in enumerate(sizes) for number in range(size)]
    assert len(order) == sum(sizes)
    found = pairs(order)
    assert sorted(found) == expected
    if kind == "sequential":
        assert found == expected
    # A position alone determines the sample.
    assert [pairs(order, range(position, position + 1))[0] for position in range(len(order))] == found


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 25), st.integers(0, 99))
def test_a_window_has_the_samples_of_its_shards(sizes: list[int], window: int, seed: int) -> None:
    order = EpochOrder(sizes, "window", seed=seed, window_shards=window)
    shards = list(dict.fromkeys(shard for shard, _ in pairs(order)))
    filled = [shard for shard, size in enumerate(sizes) if size]
    assert sorted(shards) == filled
    open_now: set[int] = set()
    most = 0
    left = dict(enumerate(sizes))
    for shard, _ in pairs(order):
        open_now.add(shard)
        most = max(most, len(open_now))
        left[shard] -= 1
        if not left[shard]:
            open_now.remove(shard)
    assert most <= window


def test_orders_differ_between_seeds_and_shuffle_the_right_units() -> None:
    sizes = [50] * 20
    orders = {kind: pairs(EpochOrder(sizes, kind, seed=1, window_shards=4)) for kind in ("global", "window")}
    assert orders["global"] != pairs(EpochOrder(sizes, "global", seed=2))
    assert orders["window"] != pairs(EpochOrder(sizes, "window", seed=2, window_shards=4))
    in_one_shard = {kind: sum(a[0] == b[0] for a, b in pairwise(found)) for kind, found in orders.items()}
    assert in_one_shard["global"] < 90 < in_one_shard["window"] < 350
