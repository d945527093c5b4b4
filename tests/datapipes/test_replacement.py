"""The datapipes that replace those of torch do the same, item by item."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from operator import length_hint
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes.datapipes import replacement

#: Stages, their arguments and, of one that splits the data, the number of shares and the one that is taken.
STAGES: list[Any] = [
    *(("map", {"fn": str}), ("collate", {"collate_fn": lambda item: [item]})),
    ("filter", {"filter_fn": lambda item: len(str(item)) % 3 < 2}),
    *(("shuffle", {"buffer_size": size}) for size in (1, 3, 50)),
    *(("batch", {"batch_size": size, "drop_last": size % 2 > 0}) for size in range(1, 6)),
    *(("sharding_filter", {}, count, number) for count in (1, 2, 3) for number in range(count)),
]


def run(pipe: Any, stages: list[Any], seed: int) -> list[Any]:
    """Build a pipeline; return its names, its lengths, and its items, first without and then with a seed."""
    found, built = list[Any](), list[Any]()
    for name, options, *share in stages:
        pipe = getattr(pipe, name)(**options)
        if share:
            pipe.apply_sharding(*share)
        found += [type(pipe).__name__, length_hint(pipe, -1)]
        built.append(pipe)
    torch.manual_seed(seed)  # of the first pass
    found += list(pipe)
    for stage in built:
        stage.set_seed(seed) if hasattr(stage, "set_seed") else None
    return [*found, *pipe, pipe._number_of_samples_yielded]


@pytest.mark.filterwarnings("ignore:.*is not supported by pickle:UserWarning")
@given(st.integers(0, 30), st.lists(st.sampled_from(STAGES), max_size=6), st.integers(0, 1 << 62))
@settings(max_examples=200)
def test_pipelines_yield_the_same_as_those_of_torch(count: int, stages: list[Any], seed: int) -> None:
    theirs = run(IterableWrapper(range(count)), stages, seed)
    assert run(replacement.IterableWrapper(range(count)), stages, seed) == theirs


def test_a_second_iteration_ends_the_first_and_a_copy_begins_anew() -> None:
    pipe = replacement.IterableWrapper(range(9)).shuffle(buffer_size=3).set_seed(1)
    first, second = iter(pipe), iter(pipe)
    begun = [next(first), next(second)]
    with pytest.raises(RuntimeError, match=r"iteration of ShufflerIterDataPipe has ended, since another one has begun"):
        next(first)
    again = pickle.loads(pickle.dumps(pipe)).set_seed(1)
    assert sorted([begun[1], *second]) == sorted(again) == list(range(9))
    assert list(replacement.IterableWrapper(map(abs, [-1, 2]))) == [1, 2]  # which can be copied in some releases only


def test_a_datapipe_may_be_its_own_iterator() -> None:
    methods = {"reset": lambda self: setattr(self, "items", iter([2, 1])), "__iter__": lambda self: self}
    pipe = type("Own", (replacement.IterDataPipe,), {**methods, "__next__": lambda self: next(self.items)})()
    assert (list(pipe), list(pipe), pipe._number_of_samples_yielded) == ([2, 1], [2, 1], 2)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda pipe: pipe.map(str, "jpg"), "knows no columns"),
        (lambda pipe: list(pipe.filter(str)), "must return a bool, not '0'"),
        (lambda pipe: pipe.batch(0), "batch_size must be positive, not 0"),
        (lambda pipe: pipe.sharding_filter().apply_sharding(2, 2), "No instance 2 of 2"),
        (lambda pipe: [pipe.apply_sharding(2, 0, 1), pipe.apply_sharding(2, 0, 2)], r"in group 2 of \{1: \(2, 0\)\}"),
    ],
)
def test_wrong_use_is_an_error(use: Callable[[Any], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        use(replacement.IterableWrapper(range(3)).sharding_filter())
