"""The length of a loader is the number of its items, if the pipeline determines it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.dataloader2 import DataLoader2, DistributedReadingService, SequentialReadingService

from wds_datapipes import ShardList, ShardReadingService, StatefulShards
from wds_datapipes.loading.service.loader import length_of_rank
from wds_datapipes.testing import build_shard
from wds_datapipes.types import Instance


def numbers(count: int) -> Any:
    return IterableWrapper(range(count))


def is_even(number: int) -> bool:
    return number % 2 == 0


PIPELINES = {
    "sharding_filter": lambda: numbers(23).shuffle().sharding_filter(),
    "batch": lambda: numbers(23).sharding_filter().batch(4),
    "with_length": lambda: numbers(23).sharding_filter().filter(is_even).with_length(12),
    "with_epoch": lambda: numbers(23).sharding_filter().with_epoch(13),
    "with_epoch, batch": lambda: numbers(23).sharding_filter().with_epoch(13).batch(4),
    "with_epoch without a split": lambda: numbers(23).with_epoch(13),
}
every_pipeline = pytest.mark.parametrize("new", PIPELINES.values(), ids=PIPELINES.keys())


@every_pipeline
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_yields_as_many_items_as_its_length(new: Any, workers: int) -> None:
    with DataLoader2(new(), reading_service=ShardReadingService(workers)) as loader:
        length = len(loader)
        assert [len(list(loader)), len(list(loader))] == [length, length] == [len(loader)] * 2


@pytest.mark.parametrize("workers", [1, 2])
def test_the_length_is_that_of_a_rank(workers: int) -> None:
    def length(rank: int) -> int:
        return length_of_rank(numbers(21).sharding_filter().batch(5), Instance(rank, 2, workers=workers))

    assert [length(rank) for rank in range(2)] == [3, 2]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "service",
    [
        ShardReadingService(2, distributed=True),
        SequentialReadingService(DistributedReadingService(), ShardReadingService(2)),
    ],
    ids=["distributed", "sequential"],
)
def test_a_length_under_any_service(service: Any) -> None:
    with DataLoader2(numbers(23).sharding_filter().batch(4), reading_service=service) as loader:
        assert len(loader) == len(list(loader))


def test_the_ranks_must_be_known() -> None:
    loader: Any = DataLoader2(numbers(5).sharding_filter(), reading_service=ShardReadingService(distributed=True))
    with loader, pytest.raises(TypeError, match="until init_process_group is called"):
        len(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_error_of_an_unknown_length_says_how_to_declare_it(workers: int, tmp_path: Path) -> None:
    pipe = numbers(23).sharding_filter().filter(is_even)
    advice = r"End each epoch after n items with \.with_epoch\(n\), with the same n on every rank; or, on a"
    with DataLoader2(pipe, reading_service=ShardReadingService(workers)) as loader:
        with pytest.raises(TypeError, match=advice):
            len(loader)
        assert loader  # which calls len() unless it knows better
        assert sorted(loader) == list(range(0, 23, 2))
    samples = ShardList(build_shard(tmp_path / "a.tar", [{"__key__": "a", "cls": "1"}])).sharding_filter()
    samples = samples.load_wds_shards().group_samples()
    with pytest.raises(TypeError, match=advice):
        len(StatefulShards(samples))
    assert len(DataLoader(StatefulShards(samples.with_length(12)), batch_size=5)) == 3
