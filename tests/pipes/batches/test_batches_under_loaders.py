"""Batches of workers that are unbatched and shuffled again in the main process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.testing import build_shard

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on a machine with few cores


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["DataLoader", "DataLoader2"])
def test_samples_of_all_workers_are_mixed_in_the_main_process(tmp_path: Path, workers: int, kind: str) -> None:
    for shard in range(4):
        build_shard(
            tmp_path / f"{shard}.tar", [{"__key__": f"{shard}-{n:02d}", "cls": f"{shard * 50 + n}"} for n in range(50)]
        )
    pipe = (
        ShardList(f"{tmp_path}/{{0..3}}.tar")
        .sharding_filter()
        .load_wds_shards()
        .group_samples()
        .wds_decode()
        .select_fields("cls")
        .batch(16)
        .collate()
    )
    loader = (
        DataLoader(pipe, batch_size=None, num_workers=workers)
        if kind == "DataLoader"
        else DataLoader2(pipe, reading_service=ShardReadingService(workers))
    )
    mixed = IterableWrapper(loader, deepcopy=False).unbatch_samples().shuffle_samples(100).batch(64).collate()
    epochs = []
    for _ in range(2):
        batches = list(mixed)
        assert [len(batch["cls"]) for batch in batches] == [64, 64, 64, 8]
        assert all(batch["cls"].dtype == torch.int64 for batch in batches)
        pairs = [pair for batch in batches for pair in zip(batch["__key__"], batch["cls"].tolist(), strict=True)]
        assert sorted(pairs) == [(f"{n // 50}-{n % 50:02d}", n) for n in range(200)]
        assert all(len({key[0] for key in batch["__key__"]}) > 1 for batch in batches[:3])
        epochs.append(pairs)
    assert epochs[0] != epochs[1]
    if isinstance(loader, DataLoader2):
        loader.shutdown()
