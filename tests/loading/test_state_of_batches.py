"""Stages that make several items of one go on where a state was saved: in a batch, and with some of it in a shuffle."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data.graph_settings import apply_random_seed
from torchdata.dataloader2 import DataLoader2

import wds_datapipes
from wds_datapipes import ShardList, ShardReadingService, StatefulShards
from wds_datapipes.errors import ChangedShardError, StateError
from wds_datapipes.io.openers import open_url
from wds_datapipes.pipes.state.pipeline_state import load_state, save_state
from wds_datapipes.testing import build_shard

SIZES = (7, 0, 13, 1, 9)
Pipe = Any
Stage = Callable[[Pipe], Pipe]


@pytest.fixture(autouse=True, scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("shards"))
        for shard, size in enumerate(SIZES):
            samples = [{"__key__": f"{shard}-{number}", "cls": str(number)} for number in range(size)]
            samples = [{**sample, "txt": "x" * (number % 3 * 250)} for number, sample in enumerate(samples)]
            build_shard(f"{shard}.tar", samples)
        yield


def not_threefold(sample: dict[str, Any]) -> bool:
    return int(sample["cls"]) % 3 != 0


def with_length(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a sample becomes depends on the others of its batch."""
    return [{**sample, "beside": (*sample.get("beside", ()), len(samples))} for sample in samples]


def is_kept(batch: list[dict[str, Any]]) -> bool:
    return int(batch[0]["cls"]) % 4 != 1


def some(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """None, one or several of one."""
    return [{**sample, "part": (*sample.get("part", ()), part)} for part in range(int(sample["cls"]) % 4)]


def patches(samples: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for sample in samples:
        yield from some(sample)


def draw(sample: dict[str, Any], rng: Random) -> dict[str, Any]:
    return {**sample, "drawn": sample.get("drawn", 0) + rng.random()}


def filtered(pipe: Pipe) -> Pipe:
    return pipe.filter(not_threefold)


def thinned(pipe: Pipe) -> Pipe:
    return pipe.rsample(0.8)


def drawing(pipe: Pipe) -> Pipe:
    return pipe.map_samples_with_rng(draw)


def shuffled(buffer_size: int, pipe: Pipe) -> Pipe:
    return pipe.shuffle_samples(buffer_size, initial=min(2, buffer_size))


def bounded(pipe: Pipe) -> Pipe:
    return pipe.shuffle_samples(30, max_bytes=1500)


def batched(size: int, pipe: Pipe) -> Pipe:
    """Behind a filter, a batch is made of more samples than it has; so it is behind a filter of batches."""
    return pipe.filter(not_threefold).batch(size).map(with_length).filter(is_kept).unbatch_samples(collated=False)


def several(pipe: Pipe) -> Pipe:
    return pipe.map(some).unbatch_samples(collated=False)


def composed(pipe: Pipe) -> Pipe:
    return pipe.compose(patches, each_alone=True)


def nested(pipe: Pipe) -> Pipe:
    whole = pipe.batch(2).batch(2)
    return whole.unbatch_samples(collated=False).map(with_length).unbatch_samples(collated=False)


STAGES: list[Stage] = [
    *(drawing, filtered, thinned, several, composed, nested, bounded),
    *(partial(batched, size) for size in (1, 3, 8, 40)),
    *(partial(shuffled, size) for size in (1, 4, 100)),
]


def split() -> Pipe:
    return ShardList("{0..4}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()


def resampled() -> Pipe:
    return ShardList("{0..4}.tar").resample_wds_shards(5).load_wds_shards().group_samples()


def mixed() -> Pipe:
    return batched(3, split()).mix_samples(composed(resampled()), stop="all")


def cut_stream() -> Pipe:
    return several(resampled()).with_epoch(40)


def cut_batches() -> Pipe:
    """The last batch of a pass is smaller, and other batches have samples from further behind."""
    return split().shuffle_samples(8).batch(4).map(with_length).unbatch_samples(collated=False).with_epoch(70)


def chain(source: Callable[[], Pipe], stages: list[Stage], behind: int) -> Pipe:
    pipe = source()
    for stage in stages:
        pipe = stage(pipe)
    return pipe.batch(behind) if behind else pipe


def seeded(pipe: Pipe) -> Pipe:
    apply_random_seed(pipe, torch.Generator().manual_seed(3))
    return pipe


def saved(pipe: Pipe) -> Any:
    return json.loads(json.dumps(save_state(pipe)))


def resumed(pipe: Pipe, state: Any) -> Pipe:
    load_state(seeded(pipe), state)
    return pipe


@settings(max_examples=120, deadline=None)
@given(
    source=st.sampled_from([split, split, resampled, mixed, cut_stream, cut_batches]),
    stages=st.lists(st.sampled_from(STAGES), max_size=5),
    behind=st.sampled_from([0, 0, 3]),
    cuts=st.lists(st.integers(0, 40), min_size=1, max_size=3),
)
@example(split, [partial(shuffled, 4), partial(batched, 3), partial(shuffled, 4)], 0, [3, 3])
@example(split, [partial(batched, 40), partial(shuffled, 100)], 0, [11, 1])  # all wait, and are of the last batch
@example(split, [partial(batched, 3), partial(shuffled, 100), nested, partial(shuffled, 4)], 0, [5, 0, 5])
@example(split, [partial(shuffled, 4), several, partial(shuffled, 4), composed, partial(shuffled, 4)], 0, [5, 1])
@example(mixed, [partial(shuffled, 4), partial(batched, 3), thinned], 0, [9, 9])
@example(cut_stream, [partial(batched, 3), partial(shuffled, 4)], 0, [9, 9])
@example(cut_batches, [partial(shuffled, 40)], 0, [34, 0])
def test_a_chain_goes_on_within_a_batch_and_with_parts_of_batches_that_wait(
    source: Callable[[], Pipe], stages: list[Stage], behind: int, cuts: list[int]
) -> None:
    new = partial(chain, source, stages, behind)
    whole = list(seeded(new()))
    done, pipe = 0, seeded(new())
    for cut in cuts:
        iterator = iter(pipe)
        head = list(itertools.islice(iterator, cut))
        assert head == whole[done : done + cut][: len(head)]
        done += len(head)
        state = saved(pipe)
        del iterator
        pipe = resumed(new(), state)
        assert list(pipe) == whole[done:]
        pipe = resumed(new(), state)


@pytest.mark.parametrize("apart", [partial(batched, 3), composed])
def test_a_state_may_be_saved_where_only_what_waits_was_made_again(apart: Stage) -> None:
    """The shuffle has all that it waits for, and yields some before it asks for what is new of this source."""

    def new() -> Pipe:
        return bounded(apart(split()).mix_samples(split(), weights=[1, 4], stop="all"))

    whole = list(seeded(new()))
    for cut in range(len(whole)):
        pipe = seeded(new())
        list(itertools.islice(pipe, cut))
        for done in (cut, cut + 1):
            pipe = resumed(new(), saved(pipe))
            assert list(itertools.islice(pipe, 1)) == whole[done : done + 1]
        assert list(resumed(new(), saved(pipe))) == whole[cut + 2 :]


def natural() -> Pipe:
    pipe = batched(4, drawing(split().shuffle_samples(6)))
    return composed(drawing(pipe.shuffle_samples(5))).to_tuple("__key__", "beside", "part", "drawn").batch(3)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_are_taken_apart_go_on_in_workers_and_the_next_epoch_is_the_same(workers: int) -> None:
    def new() -> DataLoader2[Any]:
        made: DataLoader2[Any] = DataLoader2(natural(), reading_service=ShardReadingService(workers))
        made.seed(5)
        return made

    with new() as one:
        whole, after = list(one), list(one)
    assert len(whole) > 3
    for cut in (1, len(whole) // 2, len(whole)):
        with new() as first:
            iterator = iter(first)
            assert list(itertools.islice(iterator, cut)) == whole[:cut]
            state = first.state_dict()
        with new() as second:
            second.load_state_dict(state)
            assert [list(second), list(second)] == [whole[cut:], after]


def test_torchs_loaders_go_on_as_well() -> None:
    def new() -> StatefulShards:
        return StatefulShards(natural(), seed=3)

    whole = list(new())
    data = new()
    assert list(itertools.islice(data, 4)) == whole[:4]
    state = json.loads(json.dumps(data.state_dict()))
    data = new()
    data.load_state_dict(state)
    assert list(data) == whole[4:]


@pytest.mark.parametrize("build", [partial(batched, 3), several, composed])
def test_another_number_of_workers_cannot_go_on_within_batches(build: Stage) -> None:
    def new(workers: int) -> DataLoader2[Any]:
        return DataLoader2(build(split()), reading_service=ShardReadingService(workers))

    with new(0) as one:
        next(iter(one))
        state = one.state_dict()
    with new(2) as two:
        two.load_state_dict(state)
        with pytest.raises(StateError, match="means nothing where there is another number of them"):
            next(iter(two))


@pytest.mark.parametrize(
    ("build", "refusal"),
    [
        (
            lambda pipe: pipe.batch(2).slice_samples(4).unbatch_samples(collated=False),
            "SampleSlicer is between the two",
        ),
        (lambda pipe: pipe.batch(2).with_epoch(4).unbatch_samples(collated=False), "EpochSetter is between the two"),
        (lambda pipe: pipe.batch(2).unbatch_samples(collated=False).batch(2).shuffle_samples(3), r"before \.batch"),
    ],
)
def test_what_counts_batches_before_they_are_taken_apart_is_refused(build: Stage, refusal: str) -> None:
    with pytest.raises(StateError, match=refusal):
        save_state(build(split()))


class Doubled(wds_datapipes.Stage[Any]):
    """A stage of a user that makes two of one, and says that it does not."""

    is_stateless = True

    def __init__(self, source: Pipe) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            yield item
            yield item


def test_a_stage_that_makes_several_of_one_and_does_not_tell_is_noticed() -> None:
    pipe = seeded(Doubled(split().map(some)).unbatch_samples(collated=False))
    assert len(list(pipe)) > 20
    with pytest.raises(StateError, match="a stage before it makes several items of one"):
        save_state(pipe)


def test_each_batch_that_waits_is_read_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def opening(url: str, **options: Any) -> Any:
        opened.append(url)
        return open_url(url, **options)

    def new() -> Pipe:
        pipe = split().map(counted).batch(4).unbatch_samples(collated=False)
        return seeded(pipe.shuffle_samples(12).shuffle_samples(5))

    pipe = new()
    list(itertools.islice(pipe, 6))
    state = saved(pipe)
    waiting = [len(stage.get("waiting", ())) for stage in state]
    assert waiting == [0, 4, 11, 4]
    monkeypatch.setattr("wds_datapipes.shards.loading.open_url", opening)
    COUNTED.clear()
    assert next(iter(resumed(new(), state)))
    assert len(COUNTED) == len(set(COUNTED)) < 30
    assert len(opened) == len(set(opened)) < len(SIZES)


COUNTED: list[str] = []


def counted(sample: dict[str, Any]) -> dict[str, Any]:
    COUNTED.append(sample["__key__"])
    return sample


def test_samples_of_a_batch_that_are_gone_are_told() -> None:
    pipe = seeded(batched(3, split()))
    list(itertools.islice(pipe, 5))
    state = saved(pipe)
    state[1]["waiting"][0][0] = 99  # there is no such shard
    with pytest.raises(ChangedShardError, match="no longer where they were"):
        list(resumed(batched(3, split()), state))


def test_a_state_has_what_a_batch_was_made_of_once() -> None:
    pipe = seeded(split().batch(5).unbatch_samples(collated=False).shuffle_samples(5))
    next(iter(pipe))
    _, present, shuffle = saved(pipe)
    assert len(present["waiting"]) == 5
    assert [len(values) for values in shuffle["waiting"]] == [5] * 4
    assert sorted(len(values[4]) for values in shuffle["waiting"]) == [1, 1, 1, 6]
