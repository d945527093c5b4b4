"""Stages that count, and streams divided into epochs, resume from a state."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_table import SIZES, Pipe, drawn, is_even, shards_of, split
from torch.utils.data.graph_settings import apply_random_seed

from wds_datapipes.errors import EmptySourceError
from wds_datapipes.pipes.state.pipeline_state import load_state, save_state

#: The number of samples in each shard, unless a test says otherwise.
SAMPLES = sum(SIZES[""])


shards = shards_of()


def seeded(pipe: Pipe, epoch: int = 3) -> Pipe:
    apply_random_seed(pipe, torch.Generator().manual_seed(epoch))
    load_state(pipe, None)
    return pipe


def saved(pipe: Pipe) -> Any:
    return json.loads(json.dumps(save_state(pipe)))


def resumed(pipe: Pipe, state: Any) -> Pipe:
    load_state(seeded(pipe), state)
    return pipe


def test_a_stream_is_not_empty_if_all_its_samples_came_before_the_resume() -> None:
    def new() -> Pipe:
        return split().slice_samples(3).non_empty()

    pipe = seeded(new())
    assert len(list(pipe)) == 3
    assert list(resumed(new(), saved(pipe))) == []
    nothing = split().slice_samples(0).non_empty()
    with pytest.raises(EmptySourceError):
        list(resumed(nothing, saved(nothing)))


@pytest.mark.parametrize("source", [drawn, lambda: split().mix_samples(drawn(), stop="never")])
def test_a_stream_resumes_after_more_shards_than_may_yield_nothing(source: Callable[[], Pipe]) -> None:
    """Shards skipped to reach the position do not count as shards that yield nothing."""
    pipe = source().filter(is_even).with_epoch(300)
    for epoch in range(2):
        list(seeded(pipe, epoch))
    iterator = iter(seeded(pipe, 2))
    assert len(list(itertools.islice(iterator, 10))) == 10
    state, rest = saved(pipe), list(iterator)
    again = source().filter(is_even).with_epoch(300)
    load_state(again, state)
    assert list(again) == rest
