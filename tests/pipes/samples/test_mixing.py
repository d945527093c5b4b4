"""Several sources as one, in turn or by weight, and what happens when one ends."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import webdataset.mix
from data_parallel_pipelines import open_service
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph_settings import apply_random_seed

from wds_datapipes.errors import EmptySourceError
from wds_datapipes.pipes import SampleMixer

Pipe = IterDataPipe[Any]
WORKERS = (0, 3)
#: Sources by their sizes; each item contains its source and its position.
SIZES = st.lists(st.integers(0, 8), min_size=1, max_size=4)


def sources(*sizes: int) -> list[Pipe]:
    return [IterableWrapper([(source, place) for place in range(size)]) for source, size in enumerate(sizes)]


def mixed(*pipes: Pipe, **options: Any) -> Pipe:
    return SampleMixer(*pipes, **options)


def seeded(pipe: Pipe, seed: int = 0) -> Pipe:
    apply_random_seed(pipe, torch.Generator().manual_seed(seed))
    return pipe


@settings(max_examples=30)
@given(SIZES, st.booleans())
def test_taken_in_turn_as_in_webdataset(sizes: list[int], longest: bool) -> None:
    theirs = webdataset.mix.RoundRobin([list(source) for source in sources(*sizes)], longest=longest)
    assert list(mixed(*sources(*sizes), stop="all" if longest else "first")) == list(theirs)


@settings(max_examples=30)
@given(SIZES, st.integers(0, 100), st.sampled_from([None, "weights"]))
def test_all_is_every_item_once_in_the_order_of_its_source(sizes: list[int], seed: int, how: str | None) -> None:
    weights = None if how is None else [1 + 3 * number for number in range(len(sizes))]
    items = list(seeded(mixed(*sources(*sizes), stop="all", weights=weights), seed))
    for source, size in enumerate(sizes):
        assert [item for item in items if item[0] == source] == [(source, place) for place in range(size)]


@settings(max_examples=30)
@given(SIZES, st.integers(0, 100))
def test_first_ends_with_the_first_exhausted_source(sizes: list[int], seed: int) -> None:
    counts = Counter(source for source, _ in seeded(mixed(*sources(*sizes), weights=[1] * len(sizes)), seed))
    assert any(counts[source] == size for source, size in enumerate(sizes))
    assert all(counts[source] <= size for source, size in enumerate(sizes))


@settings(max_examples=30)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=4), st.integers(0, 100))
def test_never_restarts_each_source(sizes: list[int], seed: int) -> None:
    pipe = seeded(mixed(*sources(*sizes), weights=[1] * len(sizes), stop="never"), seed)
    items = list(itertools.islice(pipe, 100))
    assert len(items) == 100
    for source, size in enumerate(sizes):
        places = [place for number, place in items if number == source]
        assert places == [place % size for place in range(len(places))]


def test_weights_are_proportions() -> None:
    pipe = seeded(mixed(*sources(5, 5), weights=[0.25, 0.75], stop="never"))
    counts = Counter(source for source, _ in itertools.islice(pipe, 4000))
    assert 0.23 < counts[0] / 4000 < 0.27


@pytest.mark.parametrize("stop", ["first", "all", "never"])
def test_a_source_of_weight_0_is_not_read(stop: str) -> None:
    pipe = mixed(*sources(3, 0), Unreadable(), weights=[1, 0, 0], stop=stop)
    assert list(itertools.islice(pipe, 3)) == [(0, 0), (0, 1), (0, 2)]
    assert len(list(itertools.islice(pipe, 6))) == (6 if stop == "never" else 3)


class Unreadable(IterDataPipe[Any]):
    """Cannot be read."""

    def __iter__(self) -> Iterator[Any]:
        yield from ()
        raise OSError("no such disk")


@pytest.mark.parametrize("workers", WORKERS)
def test_an_empty_source_cannot_restart(workers: int) -> None:
    for empty in (sources(0)[0], sources(0)[0].sharding_filter(), sources(9)[0].sharding_filter().filter(is_none)):
        pipe = mixed(sources(9)[0].sharding_filter(), empty, stop="never").with_epoch(5)
        with pytest.raises(
            EmptySourceError, match=r"has restarted source 1 \(of 0 to 1\) \d+ times in a row, but it yielded no items"
        ):
            load(pipe, workers)


def is_none(_: object) -> bool:
    return False


def load(pipe: Pipe, workers: int, epochs: int = 1, seed: int | None = 7) -> list[list[Any]]:
    with open_service(pipe, workers, seed=seed) as loader:
        return [list(loader) for _ in range(epochs)]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_restarted_source_is_shuffled_the_same_in_all_workers(workers: int) -> None:
    one, other = (source.shuffle().enumerate().sharding_filter() for source in sources(6, 12))
    for items in load(mixed(one, other, stop="never").with_epoch(48), workers, 2):
        # 24 items of each source: 4 passes over one, 2 over the other
        for source, size in enumerate((6, 12)):
            seen: dict[int, list[int]] = {}
            for index, (number, place) in items:
                if number == source:
                    seen.setdefault(index, []).append(place)
            passes = list(zip(*(seen[index] for index in range(size)), strict=True))
            assert len(passes) == 24 // size
            assert [sorted(each) for each in passes] == [list(range(size))] * len(passes)
            assert len(set(passes)) == len(passes)


@pytest.mark.parametrize("workers", [3])
def test_a_source_without_items_for_a_worker_is_skipped_unless_it_restarts(workers: int) -> None:
    def pipe(stop: str) -> Pipe:
        return mixed(*(source.sharding_filter() for source in sources(1, 12)), stop=stop)

    (every,) = load(pipe("all"), workers)
    assert Counter(source for source, _ in every) == {0: 1, 1: 12}
    (endless,) = load(pipe("never").with_epoch(6 * workers), workers)
    assert Counter(source for source, _ in endless) == {0: 3 * workers, 1: 3 * workers}  # in a different pass
    (first,) = load(pipe("first"), workers)
    assert first == [(0, 0), (1, 0)]


def test_sources_that_share_a_stage_are_refused_by_torch() -> None:
    (shared,) = sources(4)
    with pytest.raises(RuntimeError, match="another iterator has been created from the same"):
        list(mixed(shared.map(str), shared.map(repr)))
    with pytest.raises(ValueError, match="the same source twice"):
        mixed(shared, shared)
    one, other = sources(4)[0].fork(2)
    assert list(mixed(one.map(str), other.map(repr))) == [str((0, place)) for place in range(4) for _ in range(2)]
