"""Functions with a generator that draw the same numbers for the same sample."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numbered_shards import numbered_shards
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph_settings import apply_random_seed
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import DatasetSpec, ShardList, ShardReadingService

Pipe = Any


shards = numbered_shards([10] * 6)


def draw(sample: Any, rng: Random) -> Any:
    key = (sample["__url__"], sample["__key__"]) if isinstance(sample, dict) else sample
    return key, rng.random(), rng.gauss(0, 1), int(np.random.default_rng(rng.getrandbits(64)).integers(1 << 60))


def keyed(sample: dict[str, Any], rng: Random) -> dict[str, Any]:
    return {"drawn": rng.random()}


def samples(shards: Pipe | None = None) -> Pipe:
    shards = ShardList("{0..5}.tar").shuffle().sharding_filter() if shards is None else shards
    return shards.load_wds_shards().group_samples()


def epochs(pipe: Pipe, workers: int, seed: int = 3) -> list[list[Any]]:
    loader: DataLoader2[Any] = DataLoader2(pipe, reading_service=ShardReadingService(workers))
    loader.seed(seed)
    try:
        return [list(loader), list(loader)]
    finally:
        loader.shutdown()


def test_a_sample_draws_the_same_in_any_worker_and_differently_in_each_epoch() -> None:
    alone = epochs(samples().map_samples_with_rng(draw), 0)
    assert len({item[1:] for epoch in alone for item in epoch}) == 120
    for workers in (1, 3):
        assert list(map(sorted, epochs(samples().map_samples_with_rng(draw), workers))) == list(map(sorted, alone))
    shuffled = epochs(samples().shuffle_samples(20).map_samples_with_rng(draw), 2)
    assert shuffled[0] != alone[0]
    assert list(map(sorted, shuffled)) == list(map(sorted, alone))
    assert not {item[1] for item in epochs(samples().map_samples_with_rng(draw), 0, seed=4)[0]} & {
        item[1] for item in alone[0]
    }


def test_two_stages_draw_different_numbers() -> None:
    pipe = samples().map_samples_with_rng(keyed).rename(first="drawn").map_samples(dict)
    both = epochs(pipe.zip(samples().map_samples_with_rng(keyed)), 1)[0]
    assert len(both) == 60
    assert not {one["first"] for one, _ in both} & {other["drawn"] for _, other in both}


def test_other_stages_keep_their_seeds() -> None:
    def keys(pipe: Pipe) -> list[Any]:
        return [
            [(item[0] if isinstance(item, tuple) else item["__key__"]) for item in each] for each in epochs(pipe, 2)
        ]

    assert keys(samples().shuffle_samples(20)) == keys(samples().map_samples_with_rng(keyed).shuffle_samples(20))


@pytest.mark.parametrize(
    "drawn",
    [
        lambda: ShardList("0.tar").resample_wds_shards(20),
        lambda: DatasetSpec({"datasets": [{"shards": "0.tar", "resample": 20}]}).sharding_filter(),
        lambda: ShardList("0.tar").cycle(20).sharding_filter(),
    ],
)
def test_each_copy_of_a_repeated_sample_draws_separately(drawn: Any) -> None:
    first, second = epochs(samples(drawn()).map_samples_with_rng(draw), 2)
    assert len(first) == 200
    assert len({item[1:] for item in first + second}) == 400
    assert [first, second] == epochs(samples(drawn()).map_samples_with_rng(draw), 2)


def test_items_that_are_not_samples_draw_separately() -> None:
    for pipe in (
        IterableWrapper([1] * 50).map_samples_with_rng(draw),
        samples().to_tuple("cls").map_samples_with_rng(draw),
        samples().batch(4).unbatch().to_tuple("__key__").map_samples_with_rng(draw),
    ):
        first, second = epochs(pipe, 0)
        assert len(first) >= 50
        assert len({item[1] for item in first + second}) == 2 * len(first)


def test_without_a_loader_each_epoch_draws_differently_unless_seeded() -> None:
    pipe = samples().map_samples_with_rng(draw)
    runs = []
    for seed in (1, 2, 1):
        apply_random_seed(pipe, torch.Generator().manual_seed(seed))
        runs.append({item[0]: item[1:] for item in pipe})
    assert runs[0] == runs[2] != runs[1]
    assert not {item[1] for item in pipe} & {item[1] for item in pipe}


def test_none_drops_a_sample_and_errors_are_skipped_or_raised() -> None:
    def odd(sample: dict[str, Any], rng: Random) -> Any:
        if sample["cls"] == b"4":
            raise ValueError("four")
        return sample if int(sample["cls"]) % 2 else None

    pipe = samples(ShardList("0.tar")).map_samples_with_rng(odd, on_error="skip")
    assert [sample["__key__"] for sample in pipe] == [f"0-{n}" for n in (1, 3, 5, 7, 9)]
    with pytest.raises(ValueError, match="four") as caught:
        list(itertools.islice(samples(ShardList("0.tar")).map_samples_with_rng(odd), 9))
    assert "raised in map_samples_with_rng for the sample '0-4' of 0.tar" in getattr(caught.value, "__notes__", [""])[0]
