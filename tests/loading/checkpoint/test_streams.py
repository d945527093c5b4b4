"""Streams that are cut into epochs resume within an epoch and between two."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.graph_settings import apply_random_seed
from torchdata.dataloader2 import DataLoader2
from torchdata.dataloader2.random import SeedGenerator

from wds_datapipes import ShardList, ShardReadingService, StatefulShards
from wds_datapipes.pipes.state.pipeline_state import load_state, save_state
from wds_datapipes.testing import build_shard

SIZES = (5, 3, 4, 1, 2, 6)
Pipe = Any


def sample(shard: int, number: int) -> dict[str, Any]:
    return {"__key__": f"{shard}-{number}", "cls": str(number), "txt": "x" * (number % 3 * 250)}


@pytest.fixture(autouse=True, scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("shards"))
        for shard, size in enumerate(SIZES):
            build_shard(f"{shard}.tar", [sample(shard, n) for n in range(size)])
        yield


def draw(sample: dict[str, Any], rng: Random) -> dict[str, Any]:
    return {**sample, "drawn": sample.get("drawn", 0) + rng.random()}


def drawing(pipe: Pipe) -> Pipe:
    return pipe.map_samples_with_rng(draw)


def split() -> Pipe:
    return ShardList("{0..5}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()


def drawn() -> Pipe:
    return ShardList("{0..5}.tar").resample_wds_shards().load_wds_shards().group_samples()


def mixed() -> Pipe:
    return split().mix_samples(drawn(), stop="never")


def epochs_of(pipe: Pipe, numbers: range) -> list[list[Any]]:
    return [list(seeded(pipe, number)) for number in numbers]


def seeded(pipe: Pipe, epoch: int) -> Pipe:
    apply_random_seed(pipe, torch.Generator().manual_seed(epoch))
    load_state(pipe, None)
    return pipe


def saved(pipe: Pipe) -> Any:
    return json.loads(json.dumps(save_state(pipe)))


def is_odd(sample: dict[str, Any]) -> bool:
    return int(sample["cls"]) % 2 == 1


@pytest.mark.parametrize("source", [drawn, mixed])
def test_a_stream_resumes_after_more_shards_than_may_yield_nothing(source: Callable[[], Pipe]) -> None:
    """Shards that are skipped to reach the position do not count as shards that yield nothing."""
    pipe = source().filter(is_odd).with_epoch(300)
    epochs_of(pipe, range(2))
    iterator = iter(seeded(pipe, 2))
    assert len(list(itertools.islice(iterator, 10))) == 10
    state, rest = saved(pipe), list(iterator)
    resumed = source().filter(is_odd).with_epoch(300)
    load_state(resumed, state)
    assert list(resumed) == rest


def loader(pipe: Pipe, workers: int) -> DataLoader2[Any]:
    made: DataLoader2[Any] = DataLoader2(pipe, reading_service=ShardReadingService(workers))
    made.seed(8)
    return made


def natural(source: Callable[[], Pipe]) -> Pipe:
    return drawing(source().shuffle_samples(4)).to_tuple("__key__", "drawn").batch(2).with_epoch(7)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_after_an_interrupted_one_resumes_where_it_began(workers: int) -> None:
    with loader(natural(split), workers) as first:
        assert len(list(itertools.islice(first, 3))) == 3
        iterator = iter(first)
        state = first.state_dict()
        rest = list(iterator)
        following = list(first)
    with loader(natural(split), workers) as second:
        second.load_state_dict(state)
        assert [list(second), list(second)] == [rest, following]


def test_an_epoch_restarted_before_its_first_item_takes_nothing_from_the_stream() -> None:
    """DataLoader2 itself starts no epoch twice; other loaders and services may."""
    with loader(natural(split), 0) as one:
        stream = list(itertools.chain(*(one for _ in range(3))))
    with loader(natural(split), 0) as first:
        assert list(itertools.islice(first, 3)) == stream[:3]
        state = first.state_dict()
    service, generator = ShardReadingService(0), SeedGenerator(8)
    pipe = service.restore(natural(split), state["wds_datapipes"].encode())
    for _ in range(2):
        service.initialize_iteration(generator)
    assert list(pipe) == stream[3:10]
    service.finalize_iteration()
    service.initialize_iteration(generator)
    assert list(pipe) == stream[10:17]
    service.finalize()


def itself(item: Any) -> Any:
    return item


REFUSED: list[Any] = []


def unless_refused(item: Any) -> Any:
    if REFUSED:
        raise ValueError(REFUSED.pop())
    return item


def test_a_stream_resumes_after_a_refused_first_item_of_an_epoch() -> None:
    def new() -> StatefulShards:
        return StatefulShards(split().to_tuple("__key__").with_epoch(4).map(unless_refused))

    data = new()
    stream = list(itertools.chain(*(DataLoader(data, batch_size=None, collate_fn=itself) for _ in range(2))))
    data = new()
    batches = DataLoader(data, batch_size=None, collate_fn=itself)
    assert list(batches) == stream[:4]
    REFUSED.append("no such label")
    with pytest.raises(ValueError, match="no such label"):
        list(batches)
    resumed = new()
    resumed.load_state_dict(data.state_dict())
    assert list(DataLoader(resumed, batch_size=None, collate_fn=itself)) == stream[5:8]
