"""The order of a mixture: exact proportions, and every sample of a dataset before any of them again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_datapipes.errors import EmptySourceError
from wds_datapipes.index.order.epoch_order import Order
from wds_datapipes.index.order.mixed_order import MAX_PERIOD, MixedOrder, integer_weights

ORDERS: Any = st.sampled_from(["global", "window", "sequential"])
DATASETS = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(any), min_size=1, max_size=4)


def samples_of(order: MixedOrder, datasets: list[list[int]]) -> list[tuple[int, int]]:
    """Return the dataset of the sample at each position, and its number in the dataset."""
    shards, places = order.find(np.arange(len(order)))
    sizes = np.concatenate([np.array(each) for each in datasets])
    assert np.all(places < sizes[shards])
    ends = np.cumsum([len(each) for each in datasets])
    found = np.searchsorted(ends, shards, "right")
    starts = np.concatenate([np.cumsum(each) - each for each in datasets])
    return list(zip(found.tolist(), (starts[shards] + places).tolist(), strict=True))


@given(DATASETS, ORDERS, st.integers(0, 99), st.data())
def test_datasets_are_drawn_in_exact_proportions(
    datasets: list[list[int]], kind: Order, seed: int, data: st.DataObject
) -> None:
    count = len(datasets)
    weights = data.draw(st.lists(st.integers(0, 6), min_size=count, max_size=count).filter(any))
    period = sum(weights)
    order = MixedOrder(datasets, weights, kind, seed=seed, length=40 * period, window_shards=2)
    found = samples_of(order, datasets)
    for number, (sizes, weight) in enumerate(zip(datasets, weights, strict=True)):
        for start in range(0, len(found), period):
            assert sum(dataset == number for dataset, _ in found[start : start + period]) == weight
        draws = [sample for dataset, sample in found if dataset == number]
        for end in range(0, len(draws), 13):  # every sample is read before any of them again
            times = Counter(draws[:end])
            assert max(times.values(), default=0) - min(times[sample] for sample in range(max(sum(sizes), 1))) <= 1
    # A position alone determines the sample.
    single = [order.find(np.array([position])) for position in range(0, len(order), 97)]
    shards, places = order.find(np.arange(0, len(order), 97))
    assert [(int(shard[0]), int(place[0])) for shard, place in single] == list(
        zip(shards.tolist(), places.tolist(), strict=True)
    )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any))
def test_an_unshuffled_mixture_is_even_everywhere(weights: list[int]) -> None:
    datasets = [[7, 5]] * len(weights)
    period = sum(weights)
    order = MixedOrder(datasets, weights, "sequential", seed=0, length=3 * period)
    found = samples_of(order, datasets)
    for number, weight in enumerate(weights):
        draws = [sample for dataset, sample in found if dataset == number]
        assert draws == [draw % 12 for draw in range(len(draws))]
        for end in range(len(found)):
            drawn = sum(dataset == number for dataset, _ in found[:end])
            assert abs(drawn - end * weight / period) <= len(weights)


def test_passes_over_a_dataset_have_different_orders() -> None:
    order = MixedOrder([[50], [50]], [1, 1], "global", seed=3, length=200)
    drawn = [sample for dataset, sample in samples_of(order, [[50], [50]]) if dataset == 0]
    assert drawn[:50] != drawn[50:100]
    again = MixedOrder([[50], [50]], [1, 1], "global", seed=4, length=200)
    assert samples_of(again, [[50], [50]]) != samples_of(order, [[50], [50]])


def test_a_dataset_without_samples_must_have_no_weight() -> None:
    MixedOrder([[0], [3]], [0, 1], "global", seed=0, length=3)
    with pytest.raises(EmptySourceError, match="dataset 0 of the mixture has a weight of 1, and no samples"):
        MixedOrder([[0], [3]], [1, 1], "global", seed=0, length=3)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"a": 2, "b": 4}, [1, 2]),
        ({"b": 0.3, "a": 0.7}, [7, 3]),
        ({"a": 1.5, "b": 0}, [1, 0]),
        ({"a": 10**9, "b": 1}, [MAX_PERIOD, 1]),
        ({"a": 1 / 3, "b": 2 / 3}, [1, 2]),
        ({"a": 2**0.5, "b": 1}, [38390, 27146]),
        ({"a": 10**400, "b": 1}, [MAX_PERIOD, 1]),
    ],
)
def test_weights_become_integers(weights: dict[str, float], expected: list[int]) -> None:
    assert integer_weights(weights, ["a", "b"]) == expected


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ([1, 2], TypeError, "weights must be a mapping, as in"),
        ({"a": 1}, ValueError, r"weights are for \['a'\], and the datasets are \['a', 'b'\]"),
        ({"a": 1, "b": -1}, ValueError, "the weight of 'b' must be finite and not negative, not -1"),
        ({"a": float("inf"), "b": 1}, ValueError, "the weight of 'a' must be finite"),
        ({"a": float("nan"), "b": 1}, ValueError, "the weight of 'a' must be finite"),
        ({"a": 1, 2: 1}, ValueError, r"weights are for \[2, 'a'\]"),
        ({"a": "1", "b": 1}, TypeError, "the weight of 'a' must be a number, not '1'"),
        ({"a": 0, "b": 0.0}, ValueError, "at least one of the weights must be above 0"),
    ],
)
def test_wrong_weights_are_refused(weights: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        integer_weights(weights, ["a", "b"])
