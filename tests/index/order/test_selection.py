"""Selections: each selected sample once, in the order of the shards, for slices, numbers, masks and functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from error_facts import naming
from hypothesis import given
from hypothesis import strategies as st

from wds_datapipes.index.order.select import Selection

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def numbers_of(selection: Selection, sizes: list[int]) -> list[int]:
    """Return the numbers of all selected samples in the order of the shards."""
    starts = np.cumsum(sizes) - sizes
    found = []
    for shard, size in enumerate(selection.sizes.tolist()):
        shards = np.full(size, shard)
        inside = selection.find(shards, np.arange(size))
        assert all(0 <= number < sizes[shard] for number in inside.tolist())
        found += (inside + starts[shard]).tolist()
    return found


def selects(count: int) -> st.SearchStrategy[Any]:
    """Draw a slice, a mask, or numbers."""
    bounds = st.none() | st.integers(-20, 20)
    numbers = st.lists(st.integers(0, count - 1), max_size=30) if count else st.just([])
    masks = st.lists(st.booleans(), min_size=count, max_size=count).map(lambda mask: np.array(mask, bool))
    return st.one_of(st.builds(slice, bounds, bounds, st.none() | st.integers(1, 12)), masks, numbers)


@given(SIZES, st.data())
def test_samples_are_selected_as_from_a_list_in_the_order_of_the_shards(sizes: list[int], data: st.DataObject) -> None:
    select = data.draw(selects(sum(sizes)))
    everything = np.arange(sum(sizes))
    expected = everything[select].tolist() if not isinstance(select, list) else sorted(select)
    assert numbers_of(Selection(select, np.array(sizes), read_index=None), sizes) == expected


def test_different_selections_have_different_fingerprints() -> None:
    sizes = np.array([4, 4])
    some = [Selection(select, sizes, read_index=None) for select in (slice(0, 4), slice(1, 5), [0, 1, 2], [0, 1, 3])]
    assert len({selection.fingerprint() for selection in some}) == 4


@pytest.mark.parametrize(
    ("select", "error", "message"),
    [
        (slice(None, None, -1), ValueError, "backwards"),
        ([0, 8], IndexError, "no sample 8 to select: numbers are at least 0 and below 8"),
        ([-1], IndexError, "no sample -1"),
        (np.array([1, 2**64 - 1], np.uint64), IndexError, "no sample 18446744073709551615"),
        ([True, False], ValueError, "a mask of length 2, not 8, the number of samples"),
        ([0.5], TypeError, "not an array of float64"),
        ([[1]], ValueError, r"the shape \(1, 1\)"),
    ],
)
def test_invalid_selections_are_refused(select: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Selection(select, np.array([4, 4]), read_index=None)


def test_a_function_that_selects_wrongly_is_refused_with_the_shard() -> None:
    masks: Any = [[True] * 4, [True] * 3]
    with pytest.raises(ValueError, match=naming("mask", "length 3", "not 4", "shard 1")):
        Selection(np.asarray, np.array([4, 4]), read_index=masks.__getitem__)
