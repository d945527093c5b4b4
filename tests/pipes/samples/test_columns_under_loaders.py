"""Joined columns under real loaders: each sample gets its own, whichever worker reads its shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.testing import build_shard

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # on a machine with few cores
]


def labels_of(url: str) -> str:
    return url.replace("images", "labels")


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["DataLoader", "DataLoader2"])
def test_each_sample_gets_its_own_columns_in_each_epoch(tmp_path: Path, workers: int, kind: str) -> None:
    keys = [[f"{shard}-{number}" for number in range(count)] for shard, count in enumerate([7, 1, 12, 3, 9])]
    for shard, names in enumerate(keys):
        build_shard(tmp_path / f"images-{shard}.tar", [{"__key__": key, "jpg": f"image {key}"} for key in names])
        build_shard(tmp_path / f"labels-{shard}.tar", [{"__key__": key, "txt": f"label {key}"} for key in names])
    pipe: Any = ShardList(f"{tmp_path}/images-{{0..4}}.tar").shuffle().sharding_filter().load_wds_shards()
    pipe = pipe.group_samples().add_columns([labels_of])
    pipe = pipe.associate({key: {"number": key} for names in keys for key in names}).shuffle_samples(5)
    loader: Any = (
        DataLoader(pipe, batch_size=None, num_workers=workers)
        if kind == "DataLoader"
        else DataLoader2(pipe, reading_service=ShardReadingService(workers))
    )
    for _ in range(2):
        samples = list(loader)
        assert sorted(sample["__key__"] for sample in samples) == sorted(key for names in keys for key in names)
        for sample in samples:
            assert sample["jpg"] == f"image {sample['__key__']}".encode()
            assert sample["txt"] == f"label {sample['__key__']}".encode()
            assert sample["number"] == sample["__key__"]
    if kind == "DataLoader2":
        loader.shutdown()
