"""Chains of stages that count or draw resume from a state."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.utils.data.graph_settings import apply_random_seed

from wds_datapipes import ShardList
from wds_datapipes.errors import EmptySourceError
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


def draw(sample: dict[str, Any], rng: Random) -> dict[str, Any]:
    return {**sample, "drawn": sample.get("drawn", 0) + rng.random()}


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


def test_resuming_drawn_shards_opens_no_finished_one(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert len(opened) - before < 10  # the current shard, or some that are empty and the next


def test_a_list_of_keys_resumes_without_repeating_a_key(tmp_path: Path) -> None:
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


def test_a_stream_is_not_empty_if_all_its_samples_came_before_the_resume() -> None:
    def new() -> Pipe:
        return unbegun(once, [], 0).slice_samples(3).non_empty()

    pipe = seeded(new())
    assert len(list(pipe)) == 3
    assert list(resumed(new(), saved(pipe))) == []
    nothing = unbegun(once, [], 0).slice_samples(0).non_empty()
    with pytest.raises(EmptySourceError):
        list(resumed(nothing, saved(nothing)))


def test_items_read_after_the_last_position_are_no_error_of_a_resumed_epoch(tmp_path: Path) -> None:
    (tmp_path / "broken.tar").write_bytes(b"x" * 5000)

    def new() -> Pipe:
        shards = ShardList(["0.tar", str(tmp_path / "broken.tar")])
        return seeded(shards.load_wds_shards().group_samples().slice_samples(SIZES[0]))

    pipe = new()
    assert len(list(pipe)) == SIZES[0]
    pipe = resumed(new(), saved(pipe))
    assert list(pipe) == []
    assert len(list(pipe)) == SIZES[0]
