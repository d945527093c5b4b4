"""Chains of the stages that count or draw go on where a state was saved."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data.graph_settings import apply_random_seed
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.errors import EmptySourceError, StateError
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
            build_shard(f"{shard}.tar", samples)
        yield


def not_threefold(sample: dict[str, Any]) -> bool:
    return int(sample["cls"]) % 3 != 0


def filtered(pipe: Pipe) -> Pipe:
    return pipe.filter(not_threefold)


def shuffled(buffer_size: int, pipe: Pipe) -> Pipe:
    return pipe.shuffle_samples(buffer_size, initial=min(2, buffer_size))


def sliced(positions: tuple[int | None, ...], pipe: Pipe) -> Pipe:
    return pipe.slice_samples(*positions)


def thinned(p: float, pipe: Pipe) -> Pipe:
    return pipe.rsample(p)


def logged(pipe: Pipe) -> Pipe:
    return pipe.log_samples(first=0)


def not_empty(pipe: Pipe) -> Pipe:
    return pipe.map_samples(dict).non_empty()


def draw(sample: dict[str, Any], rng: Random) -> dict[str, Any]:
    return {**sample, "drawn": sample.get("drawn", 0) + rng.random()}


def drawing(pipe: Pipe) -> Pipe:
    return pipe.map_samples_with_rng(draw)


STAGES: list[Stage] = [
    drawing,
    filtered,
    logged,
    *(partial(shuffled, size) for size in (1, 2, 5, 100)),
    *(partial(sliced, positions) for positions in ((12,), (2, None, 2), (1, 20, 3), (0,))),
    *(partial(thinned, p) for p in (0.5, 0.8)),
]


def resampled(count: int | None) -> Pipe:
    return ShardList("{0..4}.tar").resample_wds_shards(count)


def once() -> Pipe:
    return ShardList("{0..4}.tar").shuffle().sharding_filter()


def unbegun(source: Callable[[], Pipe], stages: list[Stage], batch: int) -> Pipe:
    pipe = source().load_wds_shards().group_samples()
    for stage in stages:
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


@settings(max_examples=150, deadline=None)
@given(
    source=st.sampled_from([once, partial(resampled, 6), partial(resampled, None)]),
    stages=st.lists(st.sampled_from(STAGES), max_size=5),
    batch=st.sampled_from([0, 0, 3]),
    cuts=st.lists(st.integers(0, 40), min_size=1, max_size=3),
)
@example(once, [partial(shuffled, 5), partial(sliced, (2, None, 2)), partial(shuffled, 2)], 0, [3, 3])
@example(
    once,
    [partial(shuffled, 100), partial(thinned, 0.8), partial(shuffled, 5), drawing, partial(shuffled, 2), logged],
    0,
    [2, 1, 1],
)
def test_a_chain_of_stages_goes_on_from_any_cut_and_from_cuts_after_it(
    source: Callable[[], Pipe], stages: list[Stage], batch: int, cuts: list[int]
) -> None:
    new = partial(unbegun, source, stages, batch)
    whole = list(itertools.islice(seeded(new()), 150))  # an endless stream is broken off there
    is_endless, done, pipe = len(whole) == 150, 0, seeded(new())
    for cut in cuts:
        iterator = iter(pipe)
        head = list(itertools.islice(iterator, cut))
        assert head == whole[done : done + cut][: len(head)]
        done += len(head)
        state = saved(pipe)
        del iterator
        pipe = resumed(new(), state)
        rest = whole[done:]
        assert list(itertools.islice(pipe, len(rest) + (not is_endless))) == rest
        pipe = resumed(new(), state)


def loader(pipe: Pipe, workers: int) -> DataLoader2[Any]:
    service = ShardReadingService(workers)
    made: DataLoader2[Any] = DataLoader2(pipe, reading_service=service)
    return made


def long_chain(source: Callable[[], Pipe]) -> Pipe:
    pipe = source().load_wds_shards().group_samples().rsample(0.8).shuffle_samples(6).slice_samples(1, None)
    return (
        pipe.map_samples_with_rng(draw)
        .rsample(0.9)
        .shuffle_samples(4)
        .log_samples(first=0)
        .slice_samples(30)
        .non_empty()
        .to_tuple("__key__", "drawn")
    )


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_counts_and_draws_go_on_in_workers_and_the_next_epoch_is_the_same(workers: int) -> None:
    source = partial(resampled, None)
    with_end = loader(long_chain(source), workers)
    with_end.seed(5)
    whole, after = list(with_end), list(with_end)
    with_end.shutdown()
    assert len(whole) == 30 * max(workers, 1)
    assert after != whole
    for cut in (1, len(whole) // 2, len(whole)):
        first = loader(long_chain(source), workers)
        first.seed(5)
        assert list(itertools.islice(first, cut)) == whole[:cut]
        state = first.state_dict()
        first.shutdown()
        second = loader(long_chain(source), workers)
        second.load_state_dict(state)
        assert list(second) == whole[cut:]
        assert list(second) == after
        second.shutdown()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_endless_stream_of_drawn_shards_goes_on_where_the_loop_was_left(workers: int) -> None:
    def new() -> DataLoader2[Any]:
        made = loader(resampled(None).load_wds_shards().group_samples().shuffle_samples(5).to_tuple("__key__"), workers)
        made.seed(8)
        return made

    one = new()
    whole = list(itertools.islice(one, 100))
    one.shutdown()
    first = new()
    assert list(itertools.islice(first, 41)) == whole[:41]
    state = first.state_dict()
    first.shutdown()
    second = new()
    second.load_state_dict(state)
    assert list(itertools.islice(second, 59)) == whole[41:]
    second.shutdown()


def test_going_on_with_drawn_shards_opens_none_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def opening(url: str, **options: Any) -> Any:
        opened.append(url)
        return open_url(url, **options)

    monkeypatch.setattr("wds_datapipes.io.prefetch.open_url", opening)
    pipe = seeded(resampled(None).load_wds_shards().group_samples())
    whole = list(itertools.islice(pipe, 500))
    state = saved(pipe)
    before = len(opened)
    assert before > 50
    pipe = resumed(resampled(None).load_wds_shards().group_samples(), state)
    assert len(whole) == 500
    assert list(itertools.islice(pipe, 1))
    assert len(opened) - before < 10  # the one that was begun, or some that are empty and the next


def test_a_list_of_keys_goes_on_without_a_key_twice(tmp_path: Path) -> None:
    keys = tmp_path / "keys"

    def new() -> Pipe:
        pipe = once().load_wds_shards().group_samples().log_samples(first=0, key_log=keys)
        return seeded(pipe.shuffle_samples(5))

    list(new())
    whole = keys.read_text()
    assert whole.count("\n") == sum(SIZES)
    for cut in range(sum(SIZES) + 1):
        keys.unlink()
        pipe = new()
        head = list(itertools.islice(pipe, cut))
        state = saved(pipe)
        tail = list(resumed(new(), state))
        assert len(head + tail) == sum(SIZES)
        assert keys.read_text() == whole


def test_a_stream_that_had_samples_is_not_empty_where_none_is_left() -> None:
    def new() -> Pipe:
        return unbegun(once, [], 0).slice_samples(3).non_empty()

    pipe = seeded(new())
    assert len(list(pipe)) == 3
    assert list(resumed(new(), saved(pipe))) == []
    nothing = unbegun(once, [], 0).slice_samples(0).non_empty()
    with pytest.raises(EmptySourceError):
        list(resumed(nothing, saved(nothing)))


def test_the_epoch_after_one_that_was_over_when_it_was_loaded_is_whole() -> None:
    def new() -> Pipe:
        return unbegun(once, [partial(shuffled, 5), partial(sliced, (10,))], 0)

    pipe = seeded(new())
    list(pipe)
    pipe = resumed(new(), saved(pipe))
    assert list(pipe) == []
    assert list(seeded(pipe)) == list(seeded(new()))


def test_what_is_read_behind_the_last_position_is_no_error_of_a_resumed_epoch(tmp_path: Path) -> None:
    (tmp_path / "broken.tar").write_bytes(b"x" * 5000)

    def new() -> Pipe:
        shards = ShardList(["0.tar", str(tmp_path / "broken.tar")])
        return seeded(shards.load_wds_shards().group_samples().slice_samples(SIZES[0]))

    pipe = new()
    assert len(list(pipe)) == SIZES[0]
    pipe = resumed(new(), saved(pipe))
    assert list(pipe) == []
    assert len(list(pipe)) == SIZES[0]


def test_a_shuffle_behind_batches_is_refused_a_state() -> None:
    with pytest.raises(StateError, match=r"Put \.shuffle_samples\(\) before \.batch\(\)"):
        save_state(unbegun(once, [], 3).shuffle_samples(4))


def taken_apart(batch: list[Any]) -> list[Any]:
    return batch


@pytest.mark.parametrize(
    ("refused", "instead"),
    [
        (lambda pipe: pipe.compose(iter), "pass each_alone=True. If not, derive a class from wds_datapipes.Stage"),
        (lambda pipe: pipe.batch(2).unbatch(), r"Use \.unbatch_samples\(collated=False\)"),
        (lambda pipe: pipe.flatmap(taken_apart), r"Use \.map\(\) with the same function, and \.unbatch_samples"),
        (lambda pipe: pipe.shuffled_flatmap(taken_apart), r"behind it, and \.shuffle_samples\(n\) behind that"),
        (lambda pipe: pipe.shuffle(), r"Use \.shuffle_samples\(n\) for samples"),
    ],
)
def test_a_stage_that_cannot_go_on_exactly_says_what_to_do(refused: Stage, instead: str) -> None:
    with pytest.raises(StateError, match=f"may hold samples back.*{instead}"):
        save_state(refused(unbegun(once, [], 0)))


def test_a_drawn_number_is_the_same_where_other_workers_go_on() -> None:
    def new(workers: int) -> DataLoader2[Any]:
        made = loader(unbegun(once, [partial(shuffled, 5), drawing], 0).to_tuple("__key__", "drawn"), workers)
        made.seed(8)
        return made

    one = new(2)
    whole = list(one)
    one.shutdown()
    first = new(2)
    head = list(itertools.islice(first, 11))
    state = first.state_dict()
    first.shutdown()
    second = new(3)
    second.load_state_dict(state)
    assert sorted(head + list(second)) == sorted(whole)
    second.shutdown()
