"""Pipelines of several sources resume from a state."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data.graph_settings import apply_random_seed

from wds_datapipes import ShardList
from wds_datapipes.errors import ChangedShardError
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


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


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


def test_missing_samples_are_reported() -> None:
    def new() -> Pipe:
        return seeded(split("a").mix_samples(split("b"), stop="all").shuffle_samples(5))

    pipe = new()
    list(itertools.islice(pipe, 5))
    state = saved(pipe)
    state[1]["waiting"][0][0] = 99  # there is no such shard
    with pytest.raises(ChangedShardError, match="not found at their saved positions"):
        list(resumed(new(), state))
