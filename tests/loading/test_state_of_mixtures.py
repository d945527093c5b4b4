"""Pipelines of several sources go on where a state was saved."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data.graph_settings import apply_random_seed
from torchdata.dataloader2 import DataLoader2
from torchdata.stateful_dataloader import StatefulDataLoader

from wds_datapipes import ShardList, ShardReadingService, StatefulShards
from wds_datapipes.errors import ChangedShardError, StateError
from wds_datapipes.pipes.state.pipeline_state import load_state, save_state
from wds_datapipes.testing import build_shard

#: Of each of the datasets.
SIZES = {"a": (7, 0, 5, 1), "b": (3, 4), "c": (2, 1, 6)}
#: How much of an epoch without an end is compared.
ENOUGH = 90

#: StatefulDataLoader calls what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

Pipe = Any
Stage = Callable[[Pipe], Pipe]


@pytest.fixture(autouse=True, scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("shards"))
        for name, sizes in SIZES.items():
            for shard, size in enumerate(sizes):
                samples = [{"__key__": f"{name}{shard}-{number}", "cls": str(number)} for number in range(size)]
                build_shard(f"{name}{shard}.tar", samples)
        yield


def not_threefold(sample: dict[str, Any]) -> bool:
    return int(sample["cls"]) % 3 != 0


def draw(sample: dict[str, Any], rng: Random) -> dict[str, Any]:
    return {**sample, "drawn": sample.get("drawn", 0) + rng.random()}


def filtered(pipe: Pipe) -> Pipe:
    return pipe.filter(not_threefold)


def shuffled(buffer_size: int, pipe: Pipe) -> Pipe:
    return pipe.shuffle_samples(buffer_size, initial=min(2, buffer_size))


def thinned(pipe: Pipe) -> Pipe:
    return pipe.rsample(0.7)


def sliced(pipe: Pipe) -> Pipe:
    return pipe.slice_samples(1, 30)


def drawing(pipe: Pipe) -> Pipe:
    return pipe.map_samples_with_rng(draw)


def split(name: str) -> Pipe:
    shards = ShardList([f"{name}{shard}.tar" for shard in range(len(SIZES[name]))]).shuffle().sharding_filter()
    return shards.load_wds_shards().group_samples()


def drawn(name: str) -> Pipe:
    shards = ShardList([f"{name}{shard}.tar" for shard in range(len(SIZES[name]))]).resample_wds_shards()
    return shards.load_wds_shards().group_samples()


def nested(name: str) -> Pipe:
    return split(name).shuffle_samples(3).mix_samples(split("c"), weights=[2, 1], stop="all")


def nested_without_end(name: str) -> Pipe:
    return split(name).mix_samples(split("c"), stop="never")


STAGES: list[Stage] = [filtered, thinned, sliced, drawing, *(partial(shuffled, size) for size in (1, 2, 5, 100))]
SOURCES = [split, split, drawn, nested, nested_without_end]


def mixture(
    sources: Sequence[Callable[[str], Pipe]],
    before: Sequence[Sequence[Stage]],
    behind: Sequence[Stage],
    weights: Sequence[float] | None,
    stop: Any,
    batch: int = 0,
) -> Pipe:
    pipes = [source(name) for source, name in zip(sources, SIZES, strict=False)]
    for number, stages in enumerate(before[: len(pipes)]):
        for stage in stages:
            pipes[number] = stage(pipes[number])
    pipe = pipes[0].mix_samples(*pipes[1:], weights=None if weights is None else weights[: len(pipes)], stop=stop)
    for stage in behind:
        pipe = stage(pipe)
    return pipe.batch(batch) if batch else pipe


def seeded(pipe: Pipe) -> Pipe:
    apply_random_seed(pipe, torch.Generator().manual_seed(3))
    return pipe


def saved(pipe: Pipe) -> Any:
    return json.loads(json.dumps(save_state(pipe)))


def resumed(pipe: Pipe, state: Any) -> Pipe:
    load_state(seeded(pipe), state)
    return pipe


@settings(max_examples=40, deadline=None)
@given(
    sources=st.lists(st.sampled_from(SOURCES), min_size=2, max_size=3),
    before=st.lists(st.lists(st.sampled_from(STAGES), max_size=2), min_size=3, max_size=3),
    behind=st.lists(st.sampled_from(STAGES), max_size=3),
    weights=st.sampled_from([None, [3.0, 1.0, 2.0], [0.0, 1.0, 1.0]]),
    stop=st.sampled_from(["first", "all", "never"]),
    batch=st.sampled_from([0, 0, 3]),
    cuts=st.lists(st.integers(0, 25), min_size=1, max_size=3),
)
@example([split, split], [[], [], []], [partial(shuffled, 100)], None, "never", 0, [30, 0, 5])
@example([nested_without_end, split], [[], [], []], [partial(shuffled, 100)] * 2, None, "never", 0, [30, 20, 5])
@example([split, nested], [[], [], []], [partial(shuffled, 5), thinned, partial(shuffled, 5)], None, "all", 0, [9, 9])
# The second state is saved where the shuffle has all that it waits for, and its sources have not come to what is new.
@example([nested_without_end, drawn], [[], [], []], [filtered, partial(shuffled, 5)], None, "first", 0, [18, 1])
def test_a_mixture_goes_on_from_any_cut_and_the_epoch_after_it_is_whole(
    sources: list[Callable[[str], Pipe]],
    before: list[list[Stage]],
    behind: list[Stage],
    weights: list[float] | None,
    stop: str,
    batch: int,
    cuts: list[int],
) -> None:
    new = partial(mixture, sources, before, behind, weights, stop, batch)
    whole = list(itertools.islice(seeded(new()), ENOUGH))
    is_endless, done, pipe = len(whole) == ENOUGH, 0, seeded(new())
    for cut in cuts:
        iterator = iter(pipe)
        head = list(itertools.islice(iterator, min(cut, len(whole) - done)))
        assert head == whole[done : done + cut]
        done += len(head)
        state = saved(pipe)
        del iterator
        pipe = resumed(new(), state)
        rest = whole[done:]
        assert list(itertools.islice(pipe, len(rest) + (not is_endless))) == rest
        load_state(seeded(pipe), None)
        assert list(itertools.islice(pipe, ENOUGH)) == whole
        pipe = resumed(new(), state)


def loader(pipe: Pipe, workers: int) -> DataLoader2[Any]:
    made: DataLoader2[Any] = DataLoader2(pipe, reading_service=ShardReadingService(workers))
    made.seed(8)
    return made


def facts(pipe: Pipe) -> Pipe:
    return pipe.to_tuple("__key__", "drawn")


def natural(stop: str) -> Pipe:
    weights = None if stop == "all" else [3, 1, 2]
    sources = (
        [partial(split, name) for name in SIZES] if stop != "never" else [partial(split, "c"), partial(drawn, "b")]
    )
    pipes = [drawing(source()) for source in sources]
    pipe = pipes[0].mix_samples(*pipes[1:], weights=weights and weights[: len(pipes)], stop=stop)
    return facts(drawing(pipe.shuffle_samples(6)).slice_samples(40))


@pytest.mark.parametrize(("stop", "workers"), [("first", 2), ("all", 1), ("all", 3), ("never", 0), ("never", 2)])
def test_a_mixture_goes_on_in_workers_and_so_do_the_next_epochs(stop: str, workers: int) -> None:
    with loader(natural(stop), workers) as one:
        epochs = [list(one) for _ in range(3)]
    whole = epochs[0]
    assert len(whole) > 4
    for cut in (1, len(whole) // 2):
        with loader(natural(stop), workers) as first:
            assert list(itertools.islice(first, cut)) == whole[:cut]
            state = first.state_dict()
        with loader(natural(stop), workers) as second:
            second.load_state_dict(state)
            assert list(itertools.islice(second, 2)) == whole[cut : cut + 2]
            state = second.state_dict()
        with loader(natural(stop), workers) as third:
            third.load_state_dict(state)
            assert [list(third), list(third), list(third)] == [whole[cut + 2 :], *epochs[1:]]
    with loader(natural(stop), workers) as first:
        assert list(itertools.islice(first, len(whole))) == whole
        state = first.state_dict()
    with loader(natural(stop), workers) as second:
        second.load_state_dict(state)
        assert [list(second), list(second)] == [[], epochs[1]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mixture_goes_on_in_a_stateful_data_loader(workers: int) -> None:
    def new() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(StatefulShards(natural("all"), seed=3), batch_size=4, num_workers=workers)

    def batches(loader: Any) -> Iterator[str]:
        return map(str, loader)

    one = new()
    whole, after = list(batches(one)), list(batches(one))
    for cut in (1, 4):
        first = new()
        iterator = batches(first)
        assert list(itertools.islice(iterator, cut)) == whole[:cut]
        state = first.state_dict()
        del iterator
        second = new()
        second.load_state_dict(state)
        assert list(batches(second)) == whole[cut:]
        assert list(batches(second)) == after


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
def test_all_that_is_left_of_a_mixture_comes_once_on_other_workers(before: int, after: int, cut: int) -> None:
    with loader(dealable(), before) as one:
        came = list(itertools.islice(one, cut))
        state = one.state_dict()
    with loader(dealable(), after) as other:
        other.load_state_dict(state)
        head = list(itertools.islice(other, 2))
        state = other.state_dict()
    with loader(dealable(), after) as once_more:
        once_more.load_state_dict(state)
        assert sorted([*came, *head, *once_more]) == ALL
        assert sorted(once_more) == ALL


@pytest.mark.parametrize("stop", ["first", "never"])
def test_what_is_left_of_a_mixture_that_ends_otherwise_has_no_meaning_on_other_workers(stop: str) -> None:
    def new(workers: int) -> DataLoader2[Any]:
        return loader(split("a").mix_samples(split("b"), stop=stop).map(key_of), workers)

    with new(2) as one:
        assert list(itertools.islice(one, 3))
        state = one.state_dict()
    with new(1) as other:
        other.load_state_dict(state)
        with pytest.raises(StateError, match=f'left of mix_samples.stop="{stop}".* mix with stop="all"'):
            next(iter(other))


def test_a_state_that_no_source_has_used_is_forgotten_with_its_epoch() -> None:
    """In the first epoch, the mixture stops before it comes to its second source."""

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
        (lambda one, other: one.mix_samples(other.shuffle()), "Shuffler may hold samples back"),
        (lambda one, other: one.mix_samples(other.batch(2)).shuffle_samples(3), "here it is after .batch"),
        (lambda one, other: one.mix_samples(other.compose(iter)), "StreamComposer may hold samples back"),
        (lambda one, other: one.mix_samples(other).shuffle(), "Shuffler may hold samples back"),
    ],
)
def test_a_mixture_of_what_has_no_state_says_why(mixed: Callable[[Pipe, Pipe], Pipe], refusal: str) -> None:
    with pytest.raises(StateError, match=refusal):
        save_state(mixed(split("a"), split("b")))


def test_samples_that_are_gone_are_told() -> None:
    def new() -> Pipe:
        return seeded(split("a").mix_samples(split("b"), stop="all").shuffle_samples(5))

    pipe = new()
    list(itertools.islice(pipe, 5))
    state = saved(pipe)
    state[1]["waiting"][0][0] = 99  # there is no such shard
    with pytest.raises(ChangedShardError, match="no longer where they were"):
        list(resumed(new(), state))
