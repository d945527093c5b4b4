"""Stages after a loader: they read its batches in the main process, and their state includes its epoch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain, islice
from typing import Any

import pytest
from error_facts import naming
from numbered_shards import numbered_shards
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import LoaderBatches, ShardList, ShardReadingService, StatefulShards
from wds_datapipes.errors import StateError

#: The numbers of samples in the shards.
SIZES = (20, 7, 31, 22)


shards = numbered_shards(SIZES)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Shuts the loaders down that a test has created."""
    with ExitStack() as stack:
        yield stack


def pipeline() -> Any:
    samples = ShardList("{0..3}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()
    return samples.shuffle_samples(5).to_tuple("__key__", "cls").batch(4).collate()


def dataloader2(opened: ExitStack, workers: int, seed: int | None = 5) -> Any:
    loader = opened.enter_context(DataLoader2(pipeline(), reading_service=ShardReadingService(workers)))
    if seed is not None:
        loader.seed(seed)
    return loader


def dataloader(_: ExitStack, workers: int, seed: int = 5) -> Any:
    return DataLoader(StatefulShards(pipeline(), seed=seed), batch_size=None, num_workers=workers)


Make = Callable[..., Any]
LOADERS = pytest.mark.parametrize("make", [dataloader2, dataloader])


def mixed(loader: Any) -> StatefulShards:
    return StatefulShards(LoaderBatches(loader).unbatch_samples().shuffle_samples(30).batch(6), seed=3)


def keys(batches: Any) -> list[list[str]]:
    return [[key for key, _ in batch] for batch in batches]


@LOADERS
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_all_workers_are_shuffled_and_batched_together(make: Make, workers: int, opened: ExitStack) -> None:
    data = mixed(make(opened, workers))
    epochs = [keys(data) for _ in range(2)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [6] * 13 + [2]
        assert sorted(chain(*epoch)) == sorted(f"{shard}-{n}" for shard, size in enumerate(SIZES) for n in range(size))
    assert len({key[0] for batch in epochs[0][:3] for key in batch}) >= 1 + bool(workers)


@LOADERS
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [0, 5, 14])
def test_a_state_resumes_the_loader_and_the_stages_after_it(
    make: Make, workers: int, taken: int, opened: ExitStack
) -> None:
    whole = mixed(make(opened, workers))
    epochs = [keys(whole) for _ in range(3)]
    first = mixed(make(opened, workers))
    assert keys(first) == epochs[0]
    assert keys(islice(first, taken)) == epochs[1][:taken]
    state = first.state_dict()
    resumed = mixed(make(opened, workers))
    resumed.load_state_dict(state)
    assert keys(resumed) == epochs[1][taken:]
    assert keys(resumed) == epochs[2]


@LOADERS
def test_a_loop_may_leave_an_epoch(make: Make, opened: ExitStack) -> None:
    whole, left = (mixed(make(opened, 2)) for _ in range(2))
    epochs = [keys(whole) for _ in range(2)]
    assert keys(islice(left, 3)) == epochs[0][:3]
    assert keys(left) == epochs[1]


def test_without_a_dataset_the_next_epoch_of_the_loader_is_read(opened: ExitStack) -> None:
    loader = dataloader2(opened, 2)
    pipe: Any = LoaderBatches(loader).unbatch_samples()
    first, second = ([key for key, _ in pipe] for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second)
    assert len(first) == sum(SIZES)


def test_a_state_belongs_to_the_same_loader(opened: ExitStack) -> None:
    state = mixed(dataloader2(opened, 2)).state_dict()
    for other in (dataloader2(opened, 2, seed=6), dataloader2(opened, 1), dataloader(opened, 2, seed=6)):
        with pytest.raises(StateError, match=r"was LoaderBatches\(num_workers=2, seed=5, .*, and is LoaderBatches\("):
            mixed(other).load_state_dict(state)


def test_a_loader_without_a_seed_has_no_state(opened: ExitStack) -> None:
    with pytest.raises(StateError, match=naming("LoaderBatches", "loader.seed(n)")):
        mixed(dataloader2(opened, 2, seed=None))


def test_a_stream_before_the_loader_has_no_state(opened: ExitStack) -> None:
    stream = StatefulShards(pipeline().with_epoch(5), seed=1)
    with pytest.raises(StateError, match=naming("EpochSetter")):
        mixed(DataLoader(stream, batch_size=None))
    with pytest.raises(RuntimeError, match="must be able to restart its source"):
        list(LoaderBatches(dataloader2(opened, 0)).with_epoch(3))


def test_only_the_main_process_reads_a_loader(opened: ExitStack) -> None:
    data = mixed(dataloader(opened, 0))
    with pytest.raises(RuntimeError, match=naming("num_workers=0")):
        list(DataLoader(data, batch_size=None, num_workers=1))
    with pytest.raises(TypeError, match="a loader, which cannot be copied, and DataLoader2 copies its pipeline"):
        copy.deepcopy(LoaderBatches(dataloader(opened, 0)))


@pytest.mark.parametrize("loader", [DataLoader(IterableWrapper([1, 2])), [1, 2], IterableWrapper([1]), None])
def test_other_loaders_are_refused(loader: Any) -> None:
    with pytest.raises(TypeError, match=naming("DataLoader2", "ShardReadingService", "DataLoader")):
        LoaderBatches(loader)
