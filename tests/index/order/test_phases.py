"""Phases of a run: datasets are read pass by pass, in the proportions of a schedule, across epochs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain, compress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_datapipes import IndexedSamples, StatefulShards
from wds_datapipes.epoch import Epoch
from wds_datapipes.index import EpochOptions, Manifest
from wds_datapipes.index.order.batch_share import WHOLE_EPOCH
from wds_datapipes.index.order.phase import Phase
from wds_datapipes.index.order.weight_schedule import check_schedule, weights_between
from wds_datapipes.types import ShardInfo

NAMES = ("a", "b", "c")
WEIGHTS = st.fixed_dictionaries({name: st.integers(0, 5) for name in NAMES}).filter(lambda each: any(each.values()))
SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any)
OPTIONS = st.fixed_dictionaries(
    {
        "order": st.sampled_from(["global", "window", "sequential"]),
        "remainder": st.sampled_from(["drop", "pad", "keep"]),
        "lanes": st.sampled_from([1, 2, 4]),
    }
)

Drawn = tuple[str, int, int]


def manifest(name: str, sizes: list[int]) -> Manifest:
    return Manifest(ShardInfo(f"{name}{n}.tar", samples=size, bytes=0) for n, size in enumerate(sizes))


def steps_of(pipe: IndexedSamples, epochs: int) -> list[list[Drawn]]:
    """Return the samples of each step, without padding."""
    found = []
    for epoch in range(epochs):
        pipe.set_seed(epoch).current_epoch, pipe.first_seed = Epoch(5, epoch), 5
        order = pipe.order_of_epoch()
        size = pipe.batch_of(1)
        for number in range(-(-pipe.timeline.end_of(epoch) // size)):
            [positions] = pipe.find_batch(number, 1, WHOLE_EPOCH, size)
            shards, places = order.find(positions)
            drawn = zip(pipe.dataset.names(shards), shards.tolist(), places.tolist(), strict=True)
            found.append([*compress(drawn, positions < len(order))])
    return found


@settings(max_examples=40)
@given(st.tuples(SIZES, SIZES, SIZES), st.lists(WEIGHTS, min_size=1, max_size=4), OPTIONS, st.data())
def test_datasets_are_read_pass_by_pass_in_the_proportions_of_a_schedule(
    sizes: tuple[list[int], ...], weights: list[dict[str, int]], options: dict[str, Any], data: st.DataObject
) -> None:
    starts = sorted({0, *data.draw(st.lists(st.integers(1, 20), max_size=len(weights) - 1, unique=True))})
    kinds = data.draw(st.lists(st.booleans(), min_size=len(starts), max_size=len(starts)))
    schedule: Any = [
        (start, each, "linear") if start and kind else (start, each)
        for start, each, kind in zip(starts, weights, kinds, strict=False)
    ]
    lanes = options["lanes"]
    datasets = {name: manifest(name, [n * lanes for n in each]) for name, each in zip(NAMES, sizes, strict=True)}
    count = data.draw(st.integers(8, 40), "samples")
    pipe = IndexedSamples(
        datasets, weights=schedule, global_batch_size=8, epoch=EpochOptions(samples=count, window_shards=2), **options
    )
    steps = steps_of(pipe, epochs=1 + 120 // count)
    for name, own in pipe.dataset.shards_of.items():  # each sample once per pass of its lane, across phases and epochs
        size, share = int(pipe.dataset.sizes[own].sum()), 8 // pipe.lanes
        for lane in range(pipe.lanes if pipe.remainder == "drop" or pipe.lanes == 1 else 0):
            slots = slice(lane * share, (lane + 1) * share)
            times = Counter(each for step in steps for each in step[slots] if each[0] == name)
            fewest = min(times.values()) if len(times) * pipe.lanes == size else 0
            assert max(times.values(), default=0) <= 1 + fewest
    ends = [*(start for start, *_ in schedule[1:]), len(steps)]
    for (first, weight, *_), end, (_, _, *kind) in zip(schedule, ends, [*schedule[1:], (0, {})], strict=True):
        drawn = Counter(name for name, _, _ in chain(*steps[first:end]))
        for name in NAMES if not kind else ():
            share = weight[name] / sum(weight.values())
            assert abs(drawn[name] - drawn.total() * share) < (1 if pipe.lanes == 1 else 2 * pipe.lanes)


def test_weights_change_linearly() -> None:
    datasets = {name: manifest(name, [1000]) for name in "ab"}
    schedule: Any = [(0, {"a": 1, "b": 0}), (100, {"a": 1, "b": 0}), (300, {"a": 0, "b": 1}, "linear")]
    pipe = IndexedSamples(datasets, weights=schedule, global_batch_size=10, epoch=EpochOptions(samples=1000))
    drawn = [sum(name == "b" for name, _, _ in step) for step in steps_of(pipe, 4)]
    assert drawn[:100] == [0] * 100
    assert drawn[300:] == [10] * 100
    for step in range(100, 300, 20):  # 20 steps have 200 samples
        assert abs(sum(drawn[step : step + 20]) - (step - 90)) <= 3


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ([], ValueError, "weights must have a point for step 0"),
        ([(1, {"a": 1})], ValueError, "must increase, from 0 for a point that is not linear, but 1 follows -1"),
        ([(0, {"a": 1}), (0, {"a": 2})], ValueError, "but 0 follows 0"),
        ([(0, {"a": 1}, "linear")], ValueError, "from 0 for a point that is not linear"),
        (
            [(0, {"a": 1}), (2, {"a": 1}, "cubic")],
            TypeError,
            r'must be \(step, weights\) or \(step, weights, "linear"\)',
        ),
        ([{"a": 1}], TypeError, "a point of weights must be"),
        ([(0, {"b": 1})], ValueError, r"weights are for \['b'\], but the datasets are \['a'\]"),
        ([(-1, {"a": 1})], ValueError, "the step of a point of weights"),
    ],
)
def test_wrong_schedules_are_refused(weights: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_schedule(weights, ["a"], 8)


@given(st.sets(st.integers(1, 30)).map(sorted))
def test_the_weights_of_successive_phases_are_those_of_the_whole_schedule(starts: list[int]) -> None:
    schedule: Any = [(0, {"a": 1}), (10, {"a": 2}), (20, {"a": 3})]
    phase = Phase(1, 1, {}, check_schedule(schedule, ["a"], 1))
    whole = dict(weights_between(phase, None))
    begins = [0, *starts]
    phases = zip(begins, [*begins[1:], None], strict=True)
    found = [point for start, end in phases for point in weights_between(replace(phase, step=start), end)]
    assert [step for step, _ in found] == sorted({*whole, *begins})
    assert all(weights == whole[max(known for known in whole if known <= step)] for step, weights in found)


def test_a_schedule_needs_steps() -> None:
    weights = [(0, {"a": 1}), (2, {"a": 2})]
    with pytest.raises(ValueError, match="weights by step require global_batch_size"):
        check_schedule(weights, ["a"], None)
    pipe = IndexedSamples({"a": manifest("a", [9])}, weights=weights, global_batch_size=2)
    with pytest.raises(RuntimeError, match=r"Read with StatefulShards, or with DataLoader2, ShardReadingService and a"):
        next(iter(pipe))
    # The loader is right, but this stage restarts the samples by its own count.
    data = StatefulShards(pipe.batch(2).with_epoch(3), seed=1)
    with pytest.raises(RuntimeError, match=r"without a later stage .*\.with_epoch\(\) .*epoch=EpochOptions\("):
        next(iter(data))
