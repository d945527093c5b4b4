"""Pipelines that resume from a state, without a loader."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.graph_settings import apply_random_seed

from wds_datapipes import ShardList
from wds_datapipes.pipes.state.pipeline_state import load_state, save_state
from wds_datapipes.testing import build_shard

SIZES = (7, 0, 13, 1, 9)


@pytest.fixture(autouse=True)
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for shard, size in enumerate(SIZES):
        samples = [
            {"__key__": f"{shard}-{number}", "cls": str(number), "txt": "x" * (37 * number % 700)}
            for number in range(size)
        ]
        build_shard(f"{shard}.tar", samples)


def not_threefold(sample: dict[str, Any]) -> bool:
    return bool(sample["cls"] % 3)


def pipeline(buffer_size: int, *, filtered: bool, twice: bool, batched: bool) -> IterDataPipe[Any]:
    shards = ShardList("{0..4}.tar").shuffle().sharding_filter()
    pipe: IterDataPipe[Any] = shards.load_wds_shards().group_samples()
    pipe = pipe.shuffle_samples(buffer_size, initial=min(2, buffer_size)).wds_decode()
    pipe = pipe.filter(not_threefold) if filtered else pipe
    pipe = pipe.shuffle_samples(4) if twice else pipe
    pipe = pipe.to_tuple("__key__", "cls")
    pipe = pipe.batch(3) if batched else pipe
    apply_random_seed(pipe, torch.Generator().manual_seed(3))
    return pipe


def saved(pipe: IterDataPipe[Any]) -> Any:
    return json.loads(json.dumps(save_state(pipe)))


@pytest.mark.parametrize("buffer_size", [1, 2, 5, 100])
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_a_pipeline_resumes_at_any_position_and_then_again(
    buffer_size: int, filtered: bool, twice: bool, batched: bool
) -> None:
    def new() -> IterDataPipe[Any]:
        return pipeline(buffer_size, filtered=filtered, twice=twice, batched=batched)

    whole = list(new())
    for cut in range(len(whole) + 1):
        pipe = new()
        iterator = iter(pipe)
        assert [next(iterator) for _ in range(cut)] == whole[:cut]
        state = saved(pipe)
        resumed = new()
        load_state(resumed, state)
        iterator = iter(resumed)
        head = list(itertools.islice(iterator, 3))
        state = saved(resumed)
        assert head + list(iterator) == whole[cut:]
        is_repeat = new()
        load_state(is_repeat, state)
        assert list(is_repeat) == whole[cut + len(head) :]
