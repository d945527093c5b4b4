"""Orders of the samples in an epoch: permutations, windows of shards and of lengths, and mixtures."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from global_batches import mixed_order, numbers_at, starts_of
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_datapipes.index.order.draw_pattern import MAX_PERIOD, integer_weights
from wds_datapipes.index.order.lanes import Lanes
from wds_datapipes.index.order.mixed_order import MixedOrder
from wds_datapipes.index.order.permutation import Permutation, permute
from wds_datapipes.index.order.sample_order import EpochOrder, LengthOrder, Order

ORDERS: Any = st.sampled_from(["global", "window", "sequential"])
SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=8)
ORDER_KINDS: list[Order] = ["global", "window"]
DATASETS = st.lists(SIZES.filter(any), min_size=1, max_size=4)
SEEDS = st.integers(0, 99)


# Permutations


@pytest.mark.parametrize("start", [0, 1000])
def test_it_is_a_permutation_at_every_size(start: int) -> None:
    powers = [2**exponent + offset for exponent in range(12, 19, 3) for offset in (-1, 0, 1)]
    for size in [*range(start, start + 300), *(powers if start else ())]:
        moved = Permutation(size, seed=size)(np.arange(size))
        assert np.array_equal(np.sort(moved), np.arange(size)), size


@settings(max_examples=30)
@given(size=st.integers(1, 2**62), seed=st.integers(0, 2**63), data=st.data())
def test_a_number_is_mapped_the_same_alone_and_among_others(size: int, seed: int, data: st.DataObject) -> None:
    numbers = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True)))
    permutation = Permutation(size, seed=seed)
    moved = permutation(numbers)
    assert ((moved >= 0) & (moved < size)).all()
    assert len(set(moved.tolist())) == len(numbers)
    assert [permutation(numbers[[place]])[0] for place in range(len(numbers))] == moved.tolist()


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=4), SEEDS)
def test_several_permutations_map_numbers_like_each_alone(sizes: list[int], seed: int) -> None:
    permutations = [Permutation(size, seed=seed) for size in sizes]
    which = np.repeat(np.arange(len(sizes)), sizes)
    expected = [permutation(np.arange(permutation.size)) for permutation in permutations]
    mixed = np.random.default_rng(seed).permutation(len(which))
    numbers = np.concatenate([np.arange(size) for size in sizes])
    for order in (np.arange(len(which)), mixed):
        found = permute(numbers[order], which[order], permutations)
        assert np.array_equal(found, np.concatenate(expected)[order])


def test_a_permutation_depends_on_the_arguments_only() -> None:
    # These numbers must never change, because saved states depend on them.
    assert Permutation(10, seed=7)(np.arange(10)).tolist() == [3, 2, 8, 4, 5, 7, 6, 1, 0, 9]
    assert Permutation(10**10, seed=7)(np.arange(4)).tolist() == [7641322675, 2879318086, 2766796493, 917159203]
    with pytest.raises(ValueError, match="from 0 to 2\\*\\*62, not -1"):
        Permutation(-1, seed=0)


def test_all_permutations_are_equally_likely() -> None:
    size, each = 3, 100
    count = each * math.factorial(size)
    found = Counter(tuple(Permutation(size, seed=seed)(np.arange(size)).tolist()) for seed in range(count))
    assert len(found) == math.factorial(size)
    chi_square = sum((number - each) ** 2 / each for number in found.values()) / max(len(found) - 1, 1)
    assert chi_square < 2.5, "far from uniform"


# One dataset


def test_orders_differ_between_seeds_and_shuffle_the_right_units() -> None:
    sizes = [50] * 20
    orders = {kind: EpochOrder(sizes, kind, seed=1, window_shards=4) for kind in ORDER_KINDS}
    for kind, order in orders.items():
        assert numbers_at(order, sizes) != numbers_at(EpochOrder(sizes, kind, seed=2, window_shards=4), sizes)
    in_one_shard = {
        kind: sum(one == other for one, other in pairwise(order.find(np.arange(1000))[0].tolist()))
        for kind, order in orders.items()
    }
    assert in_one_shard["global"] < 90 < in_one_shard["window"] < 350


@settings(max_examples=40)
@given(SIZES, ORDERS, st.none() | SEEDS, st.integers(1, 7), st.integers(1, 5), st.data())
def test_each_window_has_its_samples_in_batches_of_neighbours_by_length(
    sizes: list[int], kind: Order, seed: int | None, batch_size: int, window: int, data: st.DataObject
) -> None:
    count = sum(sizes)
    lengths = np.array(data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)), np.int64)
    base = EpochOrder(sizes, kind, seed=3, window_shards=2)
    order = LengthOrder(base, lengths, starts_of(sizes), lanes=Lanes(count, batch_size), window=window, seed=seed)
    before, after = numbers_at(base, sizes), numbers_at(order, sizes)
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


def test_seeds_shuffle_the_batches_of_a_window() -> None:
    base, starts = EpochOrder([400], "sequential", seed=0), np.array([0])
    orders = [
        numbers_at(LengthOrder(base, np.arange(400), starts, lanes=Lanes(400, 4), window=25, seed=seed), [400])
        for seed in (None, 1, 2)
    ]
    assert orders[0] == list(range(400))
    assert len({tuple(order) for order in orders}) == 3


# Mixtures


def samples_of(order: MixedOrder, datasets: list[list[int]]) -> list[tuple[int, int]]:
    """Return the dataset of the sample at each position, and its number in the dataset."""
    numbers = np.array(numbers_at(order, [size for sizes in datasets for size in sizes]), np.int64)
    ends = np.cumsum([sum(sizes) for sizes in datasets])
    found = np.searchsorted(ends, numbers, "right")
    return list(
        zip(found.tolist(), (numbers - (ends - [sum(sizes) for sizes in datasets])[found]).tolist(), strict=True)
    )


@given(DATASETS, ORDERS, SEEDS, st.data())
@settings(max_examples=50)
def test_datasets_are_drawn_in_exact_proportions(
    datasets: list[list[int]], kind: Order, seed: int, data: st.DataObject
) -> None:
    count = len(datasets)
    weights = data.draw(st.lists(st.integers(0, 6), min_size=count, max_size=count).filter(any))
    period = sum(weights)
    order = mixed_order(datasets, weights, kind, seed, Lanes(20 * period))
    found = samples_of(order, datasets)
    for number, (sizes, weight) in enumerate(zip(datasets, weights, strict=True)):
        for start in range(0, len(found), period):
            assert sum(dataset == number for dataset, _ in found[start : start + period]) == weight
        draws = [sample for dataset, sample in found if dataset == number]
        for end in range(0, len(draws), 29):  # every sample is read before any of them again
            times = Counter(draws[:end])
            assert max(times.values(), default=0) - min(times[sample] for sample in range(sum(sizes))) <= 1
        for end in range(0, len(found), 17):  # and the proportions are exact to one sample
            drawn = sum(dataset == number for dataset, _ in found[:end])
            assert abs(drawn - end * weight / period) < 1
        if kind == "sequential":
            assert draws == [draw % sum(sizes) for draw in range(len(draws))]
    all_sizes = [size for sizes in datasets for size in sizes]
    for position in range(0, len(order), 97):
        assert numbers_at(order, all_sizes, [position]) == [numbers_at(order, all_sizes)[position]]


def test_passes_over_a_dataset_have_different_orders() -> None:
    order = mixed_order([[50], [50]], [1, 1], "global", 3, Lanes(200))
    drawn = [sample for dataset, sample in samples_of(order, [[50], [50]]) if dataset == 0]
    assert drawn[:50] != drawn[50:100]
    again = mixed_order([[50], [50]], [1, 1], "global", 4, Lanes(200))
    assert samples_of(again, [[50], [50]]) != samples_of(order, [[50], [50]])


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"a": 2, "b": 4}, [1, 2]),
        ({"b": 0.3, "a": 0.7}, [7, 3]),
        ({"a": 1 / 3, "b": 2 / 3}, [1, 2]),
        ({"a": 2**0.5, "b": 1}, [38390, 27146]),
        ({"a": 10**400, "b": 1}, [MAX_PERIOD, 1]),
    ],
)
def test_weights_become_integers(weights: dict[str, float], expected: list[int]) -> None:
    assert list(integer_weights(weights, ["a", "b"]).values()) == expected


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ([1, 2], TypeError, "weights must be a mapping, as in"),
        ({"a": 1}, ValueError, r"weights are for \['a'\], but the datasets are \['a', 'b'\]"),
        ({"a": 1, "b": -1}, ValueError, "the weight of 'b' must be finite and not negative, not -1"),
        ({"a": float("nan"), "b": 1}, ValueError, "the weight of 'a' must be finite"),
        ({"a": "1", "b": 1}, TypeError, "the weight of 'a' must be a number, not '1'"),
        ({"a": 0, "b": 0.0}, ValueError, "at least one of the weights must be above 0"),
    ],
)
def test_wrong_weights_are_refused(weights: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        integer_weights(weights, ["a", "b"])
