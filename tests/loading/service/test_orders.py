"""The order of an epoch: how shards are dealt to ranks and workers, and that random draws differ between them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.testing import build_shard

SIZES = (7, 13, 1, 9, 4)
Pipe = Any


@pytest.fixture(scope="module", autouse=True)
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("shards")
        patch.chdir(folder)
        for shard, size in enumerate(SIZES):
            build_shard(f"{shard}.tar", [{"__key__": f"{shard}-{number}", "cls": "1"} for number in range(size)])
        yield folder


def numbered(number: int, sample: dict[str, Any]) -> tuple[int, str, str]:
    return number, sample["__url__"], sample["__key__"]


def number_items(pipe: Pipe, info: Any) -> Pipe:
    return pipe.map(partial(numbered, info.worker_id))


def loader_of(pipe: Pipe, workers: int, rank: int = 0, ranks: int = 1, seed: int = 4) -> Any:
    options: dict[str, Any] = {"distributed": (rank, ranks)} if ranks > 1 else {}
    service = ShardReadingService(workers, worker_init_fn=number_items, **options)
    loader: Any = DataLoader2(pipe, reading_service=service)
    loader.seed(seed)
    return loader


def split() -> Pipe:
    return ShardList("{0..4}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()


def orders_of(ranks: int, workers: int) -> list[list[str]]:
    """Merge the shards of all readers of each of six epochs, as they were dealt."""
    hands = [dict[int, list[str]]() for _ in range(6)]
    for rank in range(ranks):
        with loader_of(split(), workers, rank, ranks) as loader:
            for hand in hands:
                for worker, url, _ in loader:
                    own = hand.setdefault(worker * ranks + rank, [])
                    if url not in own:
                        own.append(url)
    instances = ranks * max(workers, 1)
    return [[hand[number % instances][number // instances] for number in range(len(SIZES))] for hand in hands]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 2), (3, 0)])
def test_shards_are_dealt_in_turn_to_all_readers_from_one_order(ranks: int, workers: int) -> None:
    """It follows from the seed and the epoch, and so shards move between readers from epoch to epoch.

    Several ranks have one order, but another than one rank.
    """
    orders = orders_of(min(ranks, 2), 0)
    assert orders_of(ranks, workers) == orders
    assert len({tuple(order) for order in orders}) == 6
    assert all(sorted(order) == [f"{shard}.tar" for shard in range(len(SIZES))] for order in orders)


@pytest.mark.parametrize("workers", [1, 3])
def test_random_draws_after_the_split_differ_by_rank_worker_and_epoch(workers: int) -> None:
    """All readers have the same items here, so that only random draws can make their orders differ."""
    orders = []
    for rank in range(2):
        pipe = ShardList("4.tar").map(str).load_wds_shards().group_samples().shuffle_samples(10)
        with loader_of(pipe, workers, rank, 2, seed=8) as loader:
            for _ in range(2):
                by_worker: dict[int, list[str]] = {}
                for worker, _, key in loader:
                    by_worker.setdefault(worker, []).append(key)
                orders += [tuple(keys) for keys in by_worker.values()]
    assert len(orders) == 4 * workers
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len(set(orders)) > 2 * workers  # of 24 orders; without different draws, at most 4 or `workers`
