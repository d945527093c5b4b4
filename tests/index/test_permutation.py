"""The permutation that determines the order of indexed samples."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_datapipes.index.order.permutation import Permutation

POWERS = [2**exponent + offset for exponent in range(12, 21, 2) for offset in (-1, 0, 1)]


@pytest.mark.parametrize("sizes", [range(start, start + 500) for start in range(0, 4000, 500)] + [POWERS], ids=str)
def test_it_is_a_permutation_at_every_size(sizes: range | list[int]) -> None:
    for size in sizes:
        moved = Permutation(size, seed=size)(np.arange(size))
        assert np.array_equal(np.sort(moved), np.arange(size)), size


@given(size=st.integers(1, 2**62), seed=st.integers(0, 2**63), data=st.data())
def test_a_number_is_mapped_alike_alone_and_among_others(size: int, seed: int, data: st.DataObject) -> None:
    numbers = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True)))
    permutation = Permutation(size, seed=seed)
    moved = permutation(numbers)
    assert ((moved >= 0) & (moved < size)).all()
    assert len(set(moved.tolist())) == len(numbers)
    assert [permutation(numbers[[place]])[0] for place in range(len(numbers))] == moved.tolist()


def test_it_depends_on_the_arguments_only() -> None:
    # These numbers must never change: saved states depend on them.
    assert Permutation(10, seed=7)(np.arange(10)).tolist() == [3, 2, 8, 4, 5, 7, 6, 1, 0, 9]
    assert Permutation(10**10, seed=7)(np.arange(4)).tolist() == [7641322675, 2879318086, 2766796493, 917159203]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_permutations_are_equally_likely(size: int) -> None:
    each = 200
    count = each * math.factorial(size)
    found = Counter(tuple(Permutation(size, seed=seed)(np.arange(size)).tolist()) for seed in range(count))
    assert len(found) == math.factorial(size)
    chi_square = sum((number - each) ** 2 / each for number in found.values()) / max(len(found) - 1, 1)
    assert chi_square < 2.5, "far from uniform"


def test_neighbors_are_separated() -> None:
    moved = Permutation(100_000, seed=0)(np.arange(100_000))
    distances = np.abs(np.diff(moved))
    assert 0.98 < distances.mean() / (100_000 / 3) < 1.02, "the mean distance of two random numbers is a third"
    assert (distances == 1).sum() < 20


def test_too_large_a_size_is_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to 2\\*\\*62, not -1"):
        Permutation(-1, seed=0)
