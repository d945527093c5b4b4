"""Streams that other stages begin again go on where a state was saved: in mixtures, and cut once more."""

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

from wds_datapipes import ShardList, ShardReadingService, StatefulShards
from wds_datapipes.errors import StateError
from wds_datapipes.pipes.state.pipeline_state import load_state, next_epoch_state, save_state
from wds_datapipes.testing import build_shard

SIZES = (5, 3, 4, 1, 2, 6)
EPOCHS = 4
Pipe = Any
Stage = Callable[[Pipe], Pipe]


@pytest.fixture(autouse=True, scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("shards"))
        for shard, size in enumerate(SIZES):
            build_shard(f"{shard}.tar", [{"__key__": f"{shard}-{n}", "cls": str(n)} for n in range(size)])
        yield


def draw(sample: dict[str, Any], rng: Random) -> dict[str, Any]:
    return {**sample, "drawn": sample.get("drawn", 0) + rng.random()}


def drawing(pipe: Pipe) -> Pipe:
    return pipe.map_samples_with_rng(draw)


def shuffled(pipe: Pipe) -> Pipe:
    return pipe.shuffle_samples(3)


def thinned(pipe: Pipe) -> Pipe:
    return pipe.rsample(0.7)


def in_batches(pipe: Pipe) -> Pipe:
    return pipe.batch(2).unbatch_samples(collated=False)


def split() -> Pipe:
    return ShardList("{0..5}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()


def drawn() -> Pipe:
    return ShardList("{0..5}.tar").resample_wds_shards().load_wds_shards().group_samples()


def cut(source: Callable[[], Pipe], n: int) -> Pipe:
    return source().with_epoch(n)


def mixed(one: Callable[[], Pipe], stop: Any, between: list[Stage]) -> Pipe:
    """A stream that is cut, one that is not, and one that is cut twice."""
    pipe = cut(one, 4)
    for stage in between:
        pipe = stage(pipe)
    return pipe.mix_samples(split(), cut(drawn, 7).with_epoch(3), weights=[3, 1, 2], stop=stop)


def cut_again(one: Callable[[], Pipe], stop: Any, between: list[Stage]) -> Pipe:
    pipe = cut(one, 4)
    for stage in between:
        pipe = stage(pipe)
    return pipe.with_epoch(9 if stop == "never" else 3)


def mixed_and_cut(one: Callable[[], Pipe], stop: Any, between: list[Stage]) -> Pipe:
    return mixed(one, stop, between).with_epoch(12)


def mixed_twice(one: Callable[[], Pipe], stop: Any, between: list[Stage]) -> Pipe:
    return split().mix_samples(mixed(one, "all", between), stop=stop)


def natural(build: Callable[..., Pipe], one: Callable[[], Pipe], stop: Any, between: list[Stage], ends: Any) -> Pipe:
    pipe = build(one, stop, between)
    for stage in ends:
        pipe = stage(pipe)
    return pipe.with_epoch(25) if stop == "never" and build in (mixed, mixed_twice) else pipe


def seeded(pipe: Pipe, epoch: int) -> Pipe:
    apply_random_seed(pipe, torch.Generator().manual_seed(epoch))
    load_state(pipe, None)
    return pipe


def epochs_of(pipe: Pipe, numbers: range) -> list[list[Any]]:
    return [list(seeded(pipe, number)) for number in numbers]


def saved(pipe: Pipe) -> Any:
    return json.loads(json.dumps(save_state(pipe)))


def counted(pipe: Pipe) -> Pipe:
    return pipe.rsample(1.0)


STAGES: list[Stage] = [drawing, shuffled, in_batches]


@settings(max_examples=20, deadline=None)
@given(
    build=st.sampled_from([mixed, cut_again, mixed_and_cut, mixed_twice]),
    one=st.sampled_from([split, drawn]),
    stop=st.sampled_from(["first", "all", "never"]),
    between=st.lists(st.sampled_from([*STAGES, counted]), max_size=2),
    behind=st.lists(st.sampled_from([*STAGES, thinned]), max_size=2),
    epoch=st.integers(0, 2),
    number=st.integers(0, 30),
    again=st.integers(0, 3),
)
@example(mixed, split, "never", [drawing], [shuffled, shuffled], 1, 13, 1)
@example(mixed, drawn, "all", [], [shuffled], 1, 10, 0)
@example(cut_again, split, "never", [drawing, shuffled], [shuffled], 2, 5, 1)
@example(mixed_twice, split, "all", [], [shuffled], 1, 9, 1)
def test_streams_within_others_go_on_from_any_cut_in_any_epoch_and_so_do_the_next(
    build: Callable[..., Pipe],
    one: Callable[[], Pipe],
    stop: str,
    between: list[Stage],
    behind: list[Stage],
    epoch: int,
    number: int,
    again: int,
) -> None:
    new = partial(natural, build, one, stop, between, behind)
    whole = epochs_of(new(), range(EPOCHS))
    number = min(number, len(whole[epoch]))
    pipe = new()
    assert epochs_of(pipe, range(epoch)) == whole[:epoch]
    iterator = iter(seeded(pipe, epoch))
    assert list(itertools.islice(iterator, number)) == whole[epoch][:number]
    state = saved(pipe) if number else next_epoch_state(saved(pipe))
    del iterator
    resumed = seeded(new(), epoch)
    load_state(resumed, state)
    iterator = iter(resumed)
    assert list(itertools.islice(iterator, again)) == whole[epoch][number : number + again]
    state = saved(resumed)
    del iterator
    resumed = seeded(new(), epoch)
    load_state(resumed, state)
    assert list(resumed) == whole[epoch][number + again :]
    state = next_epoch_state(saved(resumed))
    assert epochs_of(resumed, range(epoch + 1, EPOCHS)) == whole[epoch + 1 :]
    following = seeded(new(), epoch + 1)
    load_state(following, state)
    assert [list(following), *epochs_of(following, range(epoch + 2, EPOCHS))] == whole[epoch + 1 :]


def in_workers(build: Callable[..., Pipe]) -> Pipe:
    return build(split, "all", [drawing]).shuffle_samples(3).to_tuple("__key__")


@pytest.mark.parametrize(("build", "workers"), [(mixed, 0), (cut_again, 2), (mixed, 2)])
def test_streams_within_others_go_on_in_workers_and_between_epochs(build: Callable[..., Pipe], workers: int) -> None:
    def new() -> DataLoader2[Any]:
        made: DataLoader2[Any] = DataLoader2(in_workers(build), reading_service=ShardReadingService(workers))
        made.seed(8)
        return made

    with new() as one:
        whole = [list(one) for _ in range(4)]
    for epoch, number in ((0, 2), (1, 0), (1, len(whole[1]))):
        with new() as first:
            assert [list(first) for _ in range(epoch)] == whole[:epoch]
            iterator = iter(first)
            assert list(itertools.islice(iterator, number)) == whole[epoch][:number]
            if number == len(whole[epoch]):
                assert list(iterator) == []
            state = first.state_dict()
            del iterator
        rest = [whole[epoch][number:], *whole[epoch + 1 :]]
        with new() as second:
            second.load_state_dict(state)
            assert [list(second) for _ in range(3 - epoch)] == (rest[1:] if number == len(whole[epoch]) else rest)[
                : 3 - epoch
            ]


def test_torchs_loaders_go_on_with_streams_within_others() -> None:
    def new() -> StatefulShards:
        return StatefulShards(in_workers(mixed), seed=8)

    data = new()
    whole = [list(data) for _ in range(3)]
    data = new()
    assert list(data) == whole[0]
    assert list(itertools.islice(data, 5)) == whole[1][:5]
    state = json.loads(json.dumps(data.state_dict()))
    data = new()
    data.load_state_dict(state)
    assert [list(data), list(data)] == [whole[1][5:], whole[2]]


def test_streams_within_others_have_no_meaning_on_another_number_of_workers() -> None:
    def new(workers: int) -> DataLoader2[Any]:
        return DataLoader2(in_workers(mixed), reading_service=ShardReadingService(workers))

    with new(2) as one:
        next(iter(one))
        state = one.state_dict()
    with new(1) as other:
        other.load_state_dict(state)
        with pytest.raises(StateError, match="means nothing where there is another number of them"):
            next(iter(other))


def test_a_mixture_that_was_loaded_and_did_not_begin_goes_on_in_its_streams() -> None:
    def new() -> Pipe:
        return cut(split, 4).mix_samples(cut(drawn, 3), stop="all")

    whole, pipe = epochs_of(new(), range(2)), new()
    assert epochs_of(pipe, range(1)) == whole[:1]
    resumed = seeded(new(), 1)
    load_state(resumed, next_epoch_state(saved(pipe)))
    load_state(resumed, None)
    assert list(resumed) == whole[1]
