"""Lanes of a list of shards: a rank gets the same shards in every epoch, which its host's disk keeps."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_datapipes import DatasetSpec, ShardList, register_opener
from wds_datapipes.counters import Counters
from wds_datapipes.io.openers import open_url
from wds_datapipes.loading.splitting import split_by_rank, split_by_worker
from wds_datapipes.pipes.sharding import rotate_assignments
from wds_datapipes.types import Instance

pytestmark = pytest.mark.usefixtures("nothing_left")


def of_instance(shards: int, lanes: int, instance: Instance) -> Any:
    pipe = ShardList(f"{{0..{shards - 1}}}.tar").shuffle(lanes=lanes).sharding_filter()
    return split_by_worker(split_by_rank(pipe, instance), instance)


def epoch_of(pipe: Any, seed: int) -> list[str]:
    pipe.source_datapipe.set_seed(seed)
    return list(pipe)


@settings(max_examples=30)
@given(
    per_rank=st.integers(1, 4),
    ranks=st.integers(1, 4),
    workers=st.integers(1, 3),
    more=st.integers(0, 30),
    turn=st.integers(0, 5),
)
def test_each_epoch_has_all_shards_and_a_rank_has_the_same_ones(
    per_rank: int, ranks: int, workers: int, more: int, turn: int
) -> None:
    lanes = per_rank * ranks
    epochs = []
    for seed in range(3):
        of_rank = [list[str]() for _ in range(ranks)]
        for rank in range(ranks):
            for worker in range(workers):
                pipe = of_instance(lanes + more, lanes, Instance(rank, ranks, worker, workers))
                rotate_assignments(pipe, seed * turn)  # as passes of .with_epoch() do
                of_rank[rank] += epoch_of(pipe, seed)
        epochs.append([sorted(urls) for urls in of_rank])
    whole = sorted(f"{number}.tar" for number in range(lanes + more))
    assert sorted(url for urls in epochs[0] for url in urls) == whole
    if lanes > 1:
        assert epochs[0] == epochs[1] == epochs[2]


def test_lanes_need_a_list_that_stays_the_same() -> None:
    with pytest.raises(ValueError, match=r"shuffle\(lanes=3\) divides a whole list .* ShardList has 2 such shards"):
        ShardList("{0,1}.tar").shuffle(lanes=3)
    with pytest.raises(ValueError, match="DatasetSpec has 0 such shards"):
        DatasetSpec({"datasets": [{"shards": "{0..9}.tar", "choose": 5}]}).shuffle(lanes=2)
    with pytest.raises(ValueError, match="with buffer_size=5"):
        ShardList("{0..9}.tar").shuffle(5, lanes=2)


HOSTS, SHARDS, BYTES = 64, 3_200, 1024
OWN = SHARDS // HOSTS


@pytest.fixture
def store() -> Iterator[list[str]]:
    opened: list[str] = []

    def open_shard(url: str, /, **_options: object) -> Any:
        opened.append(url)
        return io.BytesIO(bytes(BYTES))

    register_opener("counted", open_shard, replace=True)
    yield opened
    register_opener("counted", open_shard, replace=True)


@pytest.mark.parametrize(
    ("lanes", "kept", "least", "most"),
    [(64, OWN, 1.0, 1.0), (512, OWN, 1.0, 1.0), (64, OWN // 2, 0.48, 0.5), (1, OWN, 0.0, 0.1)],
    ids=["whole", "more lanes", "half of its shards", "no lanes"],
)
def test_the_disk_of_one_of_64_hosts_has_the_shards_of_the_next_epoch(
    tmp_path: Path, store: list[str], lanes: int, kept: int, least: float, most: float
) -> None:
    shards: Any = ShardList(f"counted:{{0..{SHARDS - 1}}}.tar").shuffle(lanes=lanes)
    cached = shards.sharding_filter().cache_wds_shards(tmp_path, max_bytes=kept * BYTES, prefetch=0)
    pipe = split_by_rank(cached, Instance(37, HOSTS))
    rates = []
    for seed in range(3):
        shards.set_seed(seed)
        counters = Counters()
        store.clear()
        for url in pipe:
            with open_url(url, counters=counters):
                pass
        found = counters.figures()
        assert found["cache_misses"] == len(store)
        assert found["cache_hits_bytes"] + found["cache_misses_bytes"] == OWN * BYTES
        rates.append(found["cache_hits"] / OWN)
    assert rates[0] == 0
    assert all(least <= rate <= most for rate in rates[1:]), rates
