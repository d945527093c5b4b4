"""Shards that are read in step go on in step where a state was saved."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data.graph_settings import apply_random_seed
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.errors import ChangedShardError, MisalignedShardsError, StateError
from wds_datapipes.io.openers import open_url
from wds_datapipes.pipes.state.pipeline_state import load_state, save_state
from wds_datapipes.testing import build_shard

#: One key comes back in each shard that has as many samples.
SIZES = (7, 0, 13, 1, 9)
#: Where the shards beside lack a sample, and where they have one that the others have not.
LACKING, ADDED = {(0, 2), (2, 5), (4, 8)}, {(2, 3), (4, 0), (0, 6)}
Pipe = Any
Stage = Callable[[Pipe], Pipe]


def key(shard: int, number: int) -> str:
    return f"{shard}-{1 if number == 6 else number}"


@pytest.fixture(autouse=True, scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("shards"))
        for shard, size in enumerate(SIZES):
            places = [(shard, number) for number in range(size)]
            build_shard(f"{shard}.tar", [{"__key__": key(*at), "cls": f"{at}"} for at in places])
            build_shard(f"texts-{shard}.tar", [{"__key__": key(*at), "txt": f"{at}" * at[1] * 99} for at in places])
            build_shard(f"masks-{shard}.tar.gz", [{"__key__": key(*at), "png": f"{at}" * 40} for at in places])
            other = [
                {"__key__": name, "json": f"{at}{name}"}
                for at in places
                for name in ((f"{shard}-{at[1]}+",) if at in ADDED else ()) + (() if at in LACKING else (key(*at),))
            ]
            build_shard(f"others-{shard}.tar", other)
        yield


def split() -> Pipe:
    shards = ShardList("{0..4}.tar").shuffle().sharding_filter().load_wds_shards()
    return shards.group_samples(on_repeated_key="ignore")


def resampled() -> Pipe:
    return ShardList("{0..4}.tar").resample_wds_shards(7).load_wds_shards().group_samples(on_repeated_key="ignore")


def twice() -> Pipe:
    return ShardList("0.tar::0.tar::3.tar::3.tar").load_wds_shards().group_samples(on_repeated_key="ignore")


def cached() -> Pipe:
    return split().cache_samples()


def texts_of(url: str) -> str:
    return f"texts-{url}"


def masks_of(url: str) -> str:
    return f"masks-{url}.gz"


def others_of(url: str) -> str:
    return f"others-{url}"


def one(pipe: Pipe) -> Pipe:
    return pipe.add_columns(texts_of)


def two(pipe: Pipe) -> Pipe:
    return pipe.add_columns([masks_of, texts_of])


def one_by_one(pipe: Pipe) -> Pipe:
    return two(pipe).rsample(0.8).add_columns(others_of, on_error="skip")


def misaligned(pipe: Pipe) -> Pipe:
    return pipe.add_columns([others_of, texts_of], on_error="skip")


def shuffled(buffer_size: int, pipe: Pipe) -> Pipe:
    return pipe.shuffle_samples(buffer_size)


def thinned(pipe: Pipe) -> Pipe:
    return pipe.rsample(0.8)


def in_batches(pipe: Pipe) -> Pipe:
    return pipe.batch(3).unbatch_samples(collated=False)


def mixed(pipe: Pipe) -> Pipe:
    return pipe.mix_samples(one(split()), stop="all")


def cut(pipe: Pipe) -> Pipe:
    return pipe.with_epoch(20)


STAGES: list[Stage] = [thinned, in_batches, mixed, *(partial(shuffled, size) for size in (1, 4, 100))]


def chain(source: Callable[[], Pipe], columns: Stage, behind: list[Stage]) -> Pipe:
    pipe = columns(source())
    for stage in behind:
        pipe = stage(pipe)
    return pipe


def seeded(pipe: Pipe) -> Pipe:
    apply_random_seed(pipe, torch.Generator().manual_seed(3))
    return pipe


def saved(pipe: Pipe) -> Any:
    return json.loads(json.dumps(save_state(pipe)))


def resumed(pipe: Pipe, state: Any) -> Pipe:
    load_state(seeded(pipe), state)
    return pipe


@settings(max_examples=70, deadline=None)
@given(
    source=st.sampled_from([split, split, resampled, twice, cached]),
    columns=st.sampled_from([one, two, one_by_one, misaligned]),
    behind=st.lists(st.sampled_from(STAGES), max_size=3),
    ends=st.sampled_from([[], [], [cut], [cut, partial(shuffled, 4)]]),
    cuts=st.lists(st.integers(0, 25), min_size=1, max_size=3),
)
@example(split, misaligned, [partial(shuffled, 4)], [], [9, 9])
@example(split, two, [], [], [8, 0, 3])
@example(split, one_by_one, [partial(shuffled, 4), in_batches, partial(shuffled, 4)], [], [9, 1])
@example(twice, one, [partial(shuffled, 4)], [cut], [7, 7])
def test_columns_go_on_in_step_from_any_cut(
    source: Callable[[], Pipe], columns: Stage, behind: list[Stage], ends: list[Stage], cuts: list[int]
) -> None:
    new = partial(chain, source, columns, [*behind, *ends])
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


def natural() -> Pipe:
    return two(split()).shuffle_samples(5).to_tuple("__key__", "cls", "txt", "png").batch(2)


@pytest.mark.parametrize("workers", [0, 2])
def test_columns_go_on_in_workers_and_the_next_epoch_is_the_same(workers: int) -> None:
    def new() -> DataLoader2[Any]:
        made: DataLoader2[Any] = DataLoader2(natural(), reading_service=ShardReadingService(workers))
        made.seed(5)
        return made

    with new() as loader:
        whole, after = list(loader), list(loader)
    for cut in (1, len(whole) // 2):
        with new() as first:
            assert list(itertools.islice(first, cut)) == whole[:cut]
            state = first.state_dict()
        with new() as second:
            second.load_state_dict(state)
            assert [list(second), list(second)] == [whole[cut:], after]


def test_another_number_of_workers_cannot_go_on_in_step() -> None:
    def new(workers: int) -> DataLoader2[Any]:
        return DataLoader2(natural(), reading_service=ShardReadingService(workers))

    with new(0) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with new(2) as other:
        other.load_state_dict(state)
        with pytest.raises(StateError, match=r"ColumnAdder .*\. Go on with as many ranks and workers as before"):
            next(iter(other))


def test_going_on_reads_nothing_of_a_shard_beside_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, int]] = []

    def opening(url: str, **options: Any) -> Any:
        read.append((url, 0))
        return open_url(url, **options)

    pipe = seeded(one(split()).shuffle_samples(3))
    list(itertools.islice(pipe, 20))
    state = saved(pipe)
    monkeypatch.setattr("wds_datapipes.shards.loading.open_url", opening)
    pipe = resumed(one(split()).shuffle_samples(3), state)
    assert next(iter(pipe))
    urls = [url for url, _ in read]
    assert len(urls) == len(set(urls)) <= 4
    assert {url for url in urls if url.startswith("texts-")} == {texts_of(url) for url in urls if url[0].isdigit()}


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("number", [4, 3])
def test_another_sample_in_a_shard_beside_is_told(tmp_path: Path, policy: Any, number: int) -> None:
    """Of one that waits in the shuffle, or of the last one that was read."""

    def new() -> Pipe:
        shards = ShardList(f"{tmp_path}/a.tar").load_wds_shards().group_samples()
        return seeded(shards.add_columns(("a.tar", "b.tar"), on_error=policy).shuffle_samples(3))

    def write(name: str, keys: str, field: str) -> None:
        build_shard(tmp_path / name, [{"__key__": key, field: key} for key in keys])

    write("a.tar", "abcdefgh", "cls")
    write("b.tar", "abcdefgh", "txt")
    pipe = new()
    list(itertools.islice(pipe, 3))
    state = saved(pipe)
    assert state[1]["columns"] == [[4 * 1024, 5 * 1024]]
    waiting = {shard[1] // 1024 for shard in state[2]["waiting"]} | {4}
    changed = sorted(waiting)[-1] if number == 4 else sorted(waiting)[0]
    assert len(waiting) > 1
    write("b.tar", "".join("x" if place == changed else key for place, key in enumerate("abcdefgh")), "txt")
    with warnings.catch_warnings(), pytest.raises(ChangedShardError, match="no longer where they were"):
        list(resumed(new(), state))


def test_what_is_left_beside_a_shard_that_has_ended_is_told_where_the_run_goes_on(tmp_path: Path) -> None:
    build_shard(tmp_path / "a.tar", [{"__key__": key, "cls": key} for key in "abc"])
    build_shard(tmp_path / "b.tar", [{"__key__": key, "txt": key} for key in "abcd"])

    def new() -> Pipe:
        shards = ShardList(f"{tmp_path}/a.tar::3.tar").load_wds_shards().group_samples()
        return seeded(shards.add_columns(beside_of))

    pipe = new()
    assert len(list(itertools.islice(pipe, 3))) == 3
    with pytest.raises(MisalignedShardsError, match=r"b\.tar has the sample 'd' where .*a\.tar has ended"):
        next(iter(resumed(new(), saved(pipe))))


def beside_of(url: str) -> str:
    return url.replace("a.tar", "b.tar")
