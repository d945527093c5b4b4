"""Pipelines of several sources resume from a state."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data.graph_settings import apply_random_seed
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.errors import ChangedShardError, StateError
from wds_datapipes.pipes.state.pipeline_state import load_state, save_state
from wds_datapipes.testing import build_shard

#: The samples of each dataset.
SIZES = {"a": (7, 0, 5, 1), "b": (3, 4), "c": (2, 1, 6)}

#: StatefulDataLoader calls functions that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

Pipe = Any


@pytest.fixture(autouse=True, scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("shards"))
        for name, sizes in SIZES.items():
            for shard, size in enumerate(sizes):
                samples = [{"__key__": f"{name}{shard}-{number}", "cls": str(number)} for number in range(size)]
                build_shard(f"{name}{shard}.tar", samples)
        yield


def split(name: str) -> Pipe:
    shards = ShardList([f"{name}{shard}.tar" for shard in range(len(SIZES[name]))]).shuffle().sharding_filter()
    return shards.load_wds_shards().group_samples()


def seeded(pipe: Pipe) -> Pipe:
    apply_random_seed(pipe, torch.Generator().manual_seed(3))
    return pipe


def saved(pipe: Pipe) -> Any:
    return json.loads(json.dumps(save_state(pipe)))


def resumed(pipe: Pipe, state: Any) -> Pipe:
    load_state(seeded(pipe), state)
    return pipe


def loader(pipe: Pipe, workers: int) -> DataLoader2[Any]:
    made: DataLoader2[Any] = DataLoader2(pipe, reading_service=ShardReadingService(workers))
    made.seed(8)
    return made


ALL = sorted(
    f"{name}{shard}-{n}" for name, sizes in SIZES.items() for shard, size in enumerate(sizes) for n in range(size)
)


def dealable() -> Pipe:
    inner = split("b").shuffle_samples(3).mix_samples(split("c"), stop="all").shuffle_samples(3)
    mixed = split("a").mix_samples(inner, weights=[1, 2], stop="all").shuffle_samples(5)
    return mixed.map(key_of)


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


@pytest.mark.parametrize(
    ("before", "after", "cut"), [(0, 2, 13), (2, 3, 1), (2, 3, 26), (3, 1, 13), (2, 0, 1), (2, 0, 26)]
)
def test_the_rest_of_a_mixture_comes_once_on_other_workers(before: int, after: int, cut: int) -> None:
    with loader(dealable(), before) as one:
        came = list(itertools.islice(one, cut))
        state = one.state_dict()
    with loader(dealable(), after) as other:
        other.load_state_dict(state)
        head = list(itertools.islice(other, 2))
        state = other.state_dict()
    with loader(dealable(), after) as is_repeat:
        is_repeat.load_state_dict(state)
        assert sorted([*came, *head, *is_repeat]) == ALL
        assert sorted(is_repeat) == ALL


@pytest.mark.parametrize("stop", ["first", "never"])
def test_a_state_of_a_mixture_that_ends_otherwise_is_invalid_on_other_workers(stop: str) -> None:
    def new(workers: int) -> DataLoader2[Any]:
        return loader(split("a").mix_samples(split("b"), stop=stop).map(key_of), workers)

    with new(2) as one:
        assert list(itertools.islice(one, 3))
        state = one.state_dict()
    with new(1) as other:
        other.load_state_dict(state)
        with pytest.raises(StateError, match=f'rest of mix_samples.stop="{stop}".* mix with stop="all"'):
            next(iter(other))


def test_a_state_unused_by_any_source_is_discarded_with_its_epoch() -> None:
    """In the first epoch, the mixture stops before it reaches its second source."""

    def new() -> Pipe:
        return split("a").shuffle_samples(3).mix_samples(split("b").shuffle_samples(2), weights=[1e9, 1]).map(key_of)

    pipe = seeded(new())
    assert len(list(itertools.islice(pipe, 5))) == 5
    pipe = resumed(new(), saved(pipe))
    assert len(list(pipe)) == sum(SIZES["a"]) - 5
    load_state(seeded(pipe), None)
    assert list(pipe) == list(seeded(new()))


@pytest.mark.parametrize(
    ("mixed", "refusal"),
    [
        (lambda one, other: one.mix_samples(other.shuffle()), "Shuffler has no position in the shards"),
        (lambda one, other: one.mix_samples(other.batch(2)).shuffle_samples(3), "here it comes after .batch"),
        (lambda one, other: one.mix_samples(other.compose(iter)), "StreamComposer has no position in the shards"),
        (lambda one, other: one.mix_samples(other).shuffle(), "Shuffler has no position in the shards"),
    ],
)
def test_the_error_of_a_mixture_without_a_state_says_why(mixed: Callable[[Pipe, Pipe], Pipe], refusal: str) -> None:
    with pytest.raises(StateError, match=refusal):
        save_state(mixed(split("a"), split("b")))


def test_missing_samples_are_reported() -> None:
    def new() -> Pipe:
        return seeded(split("a").mix_samples(split("b"), stop="all").shuffle_samples(5))

    pipe = new()
    list(itertools.islice(pipe, 5))
    state = saved(pipe)
    state[1]["waiting"][0][0] = 99  # there is no such shard
    with pytest.raises(ChangedShardError, match="not found at their saved positions"):
        list(resumed(new(), state))
