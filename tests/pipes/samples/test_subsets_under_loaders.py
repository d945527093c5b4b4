"""Subsets of a stream under real loaders."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.errors import EmptySourceError
from wds_datapipes.testing import build_shard

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on a machine with few cores


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard in range(4):
        build_shard(tmp_path / f"{shard}.tar", [{"__key__": f"{shard}-{n}", "bin": bytes(50_000)} for n in range(50)])
    return tmp_path


def samples(folder: Path) -> IterDataPipe[Any]:
    pipe: IterDataPipe[Any] = ShardList(f"{folder}/{{0..3}}.tar").sharding_filter().load_wds_shards().group_samples()
    return pipe


def keys(samples: Any) -> list[str]:
    return [sample["__key__"] for sample in samples]


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_each_epoch_draws_another_subset_that_the_seed_repeats(folder: Path, workers: int) -> None:
    def epochs(seed: int) -> list[list[str]]:
        loader = DataLoader2(samples(folder).rsample(0.3), reading_service=ShardReadingService(workers))
        loader.seed(seed)
        try:
            return [keys(loader) for _ in range(2)]
        finally:
            loader.shutdown()

    first, second = epochs(1)
    assert [first, second] == epochs(1)
    assert first != second
    assert first != epochs(2)[0]
    assert 20 < len(first) < 100
    assert len(set(first)) == len(first)


def test_workers_draw_separately(folder: Path) -> None:
    loader = DataLoader(samples(folder).rsample(0.5), batch_size=None, num_workers=2)
    torch.manual_seed(0)
    drawn = keys(loader)
    parts = [{key[2:] for key in drawn if key[0] == shard} for shard in "01"]
    assert parts[0] != parts[1], "both workers have drawn the same numbers"


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_positions_count_in_each_worker(folder: Path, workers: int) -> None:
    pipe = samples(folder).slice_samples(2, 7, 2)
    expected = sorted(f"{worker}-{n}" for worker in range(workers) for n in (2, 4, 6))
    assert sorted(keys(DataLoader(pipe, batch_size=None, num_workers=workers))) == expected
    loader = DataLoader2(pipe, reading_service=ShardReadingService(workers))
    assert sorted(keys(loader)) == expected
    loader.shutdown()


def test_the_shard_is_closed_before_the_last_sample_leaves(folder: Path) -> None:
    def opened() -> set[str]:
        return {Path(file.path).name for file in psutil.Process().open_files() if file.path.endswith(".tar")}

    iterator = iter(samples(folder).slice_samples(2))
    next(iterator)
    assert opened() == {"0.tar"}
    next(iterator)
    assert opened() == set()
    assert list(iterator) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_an_empty_stream_is_an_error_that_names_the_source(tmp_path: Path, workers: int) -> None:
    pipe = ShardList(build_shard(tmp_path / "a.tar", [])).non_empty().load_wds_shards().group_samples().non_empty()
    loader = DataLoader(pipe, batch_size=None, num_workers=workers)
    names = re.escape("no items from SampleGrouper. The shards may be empty")
    with pytest.raises(EmptySourceError, match=names) as caught:
        list(loader)
    traceback.clear_frames(caught.tb)


def test_before_the_split_a_worker_without_a_shard_is_no_error(folder: Path) -> None:
    before = ShardList(f"{folder}/0.tar").non_empty().sharding_filter().load_wds_shards().group_samples()
    assert len(list(DataLoader(before, batch_size=None, num_workers=2))) == 50
    with pytest.raises(EmptySourceError) as caught:
        list(DataLoader(before.non_empty(), batch_size=None, num_workers=2))
    traceback.clear_frames(caught.tb)
    with pytest.raises(EmptySourceError, match="no items from IterableWrapper"):
        list(IterableWrapper([]).non_empty())
