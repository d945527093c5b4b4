"""Pipelines with a cache go on where a state was saved, whether the cache is whole there or not."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph_settings import apply_random_seed
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.errors import ChangedShardError, StateError
from wds_datapipes.pipes.state.pipeline_state import load_state, save_state
from wds_datapipes.testing import build_shard

SIZES = (7, 0, 9, 1, 4)
Pipe = Any
Stage = Callable[[Pipe], Pipe]

#: The keys of what was read before a cache.
READ: list[str] = []


@pytest.fixture(autouse=True, scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("shards"))
        for shard, size in enumerate(SIZES):
            samples = [{"__key__": f"{shard}-{number}", "cls": str(number)} for number in range(size)]
            build_shard(f"{shard}.tar", samples)
        yield


def noted(sample: dict[str, Any]) -> dict[str, Any]:
    READ.append(sample["__key__"])
    return sample


def draw(sample: dict[str, Any], rng: Random) -> dict[str, Any]:
    return {**sample, "drawn": sample.get("drawn", 0) + rng.random()}


def drawing(pipe: Pipe) -> Pipe:
    return pipe.map_samples_with_rng(draw)


def as_it_is(pipe: Pipe) -> Pipe:
    return pipe


def torchs_shuffle(pipe: Pipe) -> Pipe:
    """It has no state, and needs none here."""
    return pipe.shuffle(buffer_size=4)


def shuffled(pipe: Pipe) -> Pipe:
    return pipe.shuffle_samples(4)


def in_batches(pipe: Pipe) -> Pipe:
    return pipe.batch(3).unbatch_samples(collated=False)


def mixed(pipe: Pipe) -> Pipe:
    return pipe.mix_samples(split().cache_samples(seed=4), stop="all")


def thinned(pipe: Pipe) -> Pipe:
    return pipe.rsample(0.8)


def cut(pipe: Pipe) -> Pipe:
    return pipe.with_epoch(30).shuffle_samples(3)


def split() -> Pipe:
    return ShardList("{0..4}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()


def cached(before: Stage, place: str | None, behind: list[Stage], max_bytes: int | None) -> Pipe:
    pipe = before(split().map(noted)).cache_samples(place, max_bytes=max_bytes, seed=3)
    for stage in behind:
        pipe = stage(pipe)
    return pipe


def seeded(pipe: Pipe, epoch: int) -> Pipe:
    apply_random_seed(pipe, torch.Generator().manual_seed(epoch))
    load_state(pipe, None)
    return pipe


def saved(pipe: Pipe) -> Any:
    return json.loads(json.dumps(save_state(pipe)))


@pytest.mark.filterwarnings("ignore:cache_samples keeps nothing")
@settings(max_examples=50, deadline=None)
@given(
    before=st.sampled_from([as_it_is, torchs_shuffle, drawing, in_batches, thinned]),
    behind=st.lists(st.sampled_from([shuffled, in_batches, thinned, drawing, mixed]), max_size=3),
    on_disk=st.booleans(),
    is_lost=st.booleans(),
    max_bytes=st.sampled_from([None, None, 500]),
    epoch=st.integers(0, 1),
    number=st.integers(1, 30),
    more=st.integers(0, 4),
)
@example(as_it_is, [shuffled, in_batches, shuffled], True, False, None, 1, 7, 1)
@example(torchs_shuffle, [in_batches, shuffled], False, True, None, 0, 7, 0)
@example(as_it_is, [thinned, mixed, in_batches], False, False, None, 1, 21, 4)
def test_a_cache_goes_on_from_any_cut_in_any_epoch_and_is_whole_in_the_next(
    before: Stage,
    behind: list[Stage],
    on_disk: bool,
    is_lost: bool,
    max_bytes: int | None,
    epoch: int,
    number: int,
    more: int,
) -> None:
    whole = [list(seeded(cached(before, None, behind, None), epoch)) for epoch in range(4)]
    folder = tempfile.mkdtemp() if on_disk else None
    new = partial(cached, before, folder, behind, max_bytes)
    pipe = new()
    for earlier in range(epoch):
        assert list(seeded(pipe, earlier)) == whole[earlier]
    iterator = iter(seeded(pipe, epoch))
    head = list(itertools.islice(iterator, number))
    assert head == whole[epoch][:number]
    state = saved(pipe)
    del iterator
    if on_disk and is_lost:
        shutil.rmtree(str(folder))
    pipe = seeded(new(), epoch)
    load_state(pipe, state)
    iterator = iter(pipe)
    assert list(itertools.islice(iterator, more)) == whole[epoch][number : number + more]
    state = saved(pipe)
    del iterator
    pipe = seeded(new(), epoch)
    load_state(pipe, state)
    assert list(pipe) == whole[epoch][number + more :]
    were_read = []
    for later in range(epoch + 1, 4):
        READ.clear()
        assert list(seeded(pipe, later)) == whole[later]
        were_read.append(bool(READ))
    # A mixture that had taken all of the cache before the cut takes nothing after it: the next epoch fills the cache.
    assert not any(were_read[mixed in behind :]) or max_bytes is not None
    if folder is not None:
        shutil.rmtree(folder)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("place", [None, "kept"])
def test_a_cache_goes_on_in_workers_between_and_within_epochs(tmp_path: Path, place: str | None, workers: int) -> None:
    def new(name: str) -> DataLoader2[Any]:
        folder = None if place is None else f"{tmp_path}/{name}"
        pipe = cached(as_it_is, folder, [shuffled, drawing], None).to_tuple("__key__", "drawn").batch(2)
        made: DataLoader2[Any] = DataLoader2(pipe, reading_service=ShardReadingService(workers))
        made.seed(5)
        return made

    with new("whole") as loader:
        whole = [list(loader) for _ in range(3)]
    assert len(whole[0]) == 11
    for epoch, number in ((0, 4), (1, 1), (1, 11)):
        with new(f"{epoch}-{number}") as first:
            assert [list(first) for _ in range(epoch)] == whole[:epoch]
            iterator = iter(first)
            assert list(itertools.islice(iterator, number)) == whole[epoch][:number]
            state = first.state_dict()
            del iterator
        with new(f"{epoch}-{number}") as second:
            second.load_state_dict(state)
            assert [list(second), list(second)] == [whole[epoch][number:], whole[epoch + 1]]


def test_another_number_of_workers_cannot_go_on_in_a_cache() -> None:
    def new(workers: int) -> DataLoader2[Any]:
        return DataLoader2(split().cache_samples(), reading_service=ShardReadingService(workers))

    with new(0) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with new(2) as other:
        other.load_state_dict(state)
        with pytest.raises(
            StateError, match=r"SampleCacher knows .* or counts it, .*\. Go on with as many ranks and workers"
        ):
            next(iter(other))


def test_samples_that_come_from_no_shard_go_on_out_of_a_cache() -> None:
    def new() -> Pipe:
        return seeded(IterableWrapper(range(20)).shuffle().cache_samples(seed=2).shuffle_samples(5), 0)

    whole, pipe = list(new()), new()
    assert list(itertools.islice(pipe, 8)) == whole[:8]
    other = new()
    load_state(other, saved(pipe))
    assert list(other) == whole[8:]


@pytest.mark.parametrize(
    ("build", "refusal"),
    [
        (lambda pipe: pipe.with_epoch(9).cache_samples(), r"before \.cache_samples\(\) an epoch has to follow"),
        (lambda pipe: pipe.cycle(2).cache_samples(), r"order of the samples .* Put Cycler before what draws"),
    ],
)
def test_what_is_not_the_same_in_each_pass_before_a_cache_is_refused(build: Stage, refusal: str) -> None:
    with pytest.raises(StateError, match=refusal):
        save_state(build(split()))


@pytest.mark.parametrize(
    ("samples", "refusal"),
    [
        ([{"__key__": key, "cls": "1"} for key in "abxd"], "after its sample 2, and that is another one"),
        ([{"__key__": key, "cls": "1"} for key in "ab"], "after 3 samples, and there are 2 now"),
    ],
)
def test_other_samples_before_a_cache_are_told(tmp_path: Path, samples: Any, refusal: str) -> None:
    def new() -> Pipe:
        return seeded(ShardList(f"{tmp_path}/a.tar").load_wds_shards().group_samples().cache_samples(), 0)

    build_shard(tmp_path / "a.tar", [{"__key__": key, "cls": "1"} for key in "abcd"])
    pipe = new()
    list(itertools.islice(pipe, 3))
    state = saved(pipe)
    build_shard(tmp_path / "a.tar", samples)
    pipe = new()
    load_state(pipe, state)
    with pytest.raises(ChangedShardError, match=refusal):
        list(pipe)
