"""Shards read from local copies, in the loaders of torch and torchdata."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from faults import FaultProxy
from nginx_server import Nginx
from numbered_shards import write_numbered
from torch.utils.data import DataLoader, IterDataPipe
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import DirectoryShards, ShardList, ShardReadingService, StatefulShards
from wds_datapipes.errors import CorruptShardError
from wds_datapipes.index import IndexOptions, Manifest, build_indexes, write_manifest
from wds_datapipes.testing import build_shard

SIZES = (4, 1, 6, 3, 5)
KEYS = [f"{shard}-{n}" for shard, size in enumerate(SIZES) for n in range(size)]


@pytest.fixture
def folder(nginx: Nginx, tmp_path: Path) -> Path:
    """The folder of a server with some shards."""
    (nginx.files / tmp_path.name).mkdir()
    write_numbered(nginx.files / tmp_path.name, SIZES)
    return nginx.files / tmp_path.name


@pytest.fixture
def pattern(proxy: FaultProxy, folder: Path) -> str:
    return f"http://127.0.0.1:{proxy.port}/{folder.name}/{{0..4}}.tar"


def pipeline(pattern: str, folder: Path, **options: Any) -> IterDataPipe[Any]:
    shards = ShardList(pattern).shuffle().sharding_filter().cache_wds_shards(folder, **options)
    pipe: IterDataPipe[Any] = shards.load_wds_shards().group_samples().to_tuple("__key__").map(itemgetter(0))
    return pipe


def test_shards_before_a_state_are_not_fetched(pattern: str, tmp_path: Path, proxy: FaultProxy) -> None:
    def loader(*folder: Path) -> Any:
        shards: Any = ShardList(pattern)
        for each in folder:
            shards = shards.cache_wds_shards(each, prefetch=0)
        return DataLoader(StatefulShards(shards.load_wds_shards().group_samples()), batch_size=None)

    first_half = loader(tmp_path / "a")
    tracked = first_half.dataset.tracked(first_half)
    head = [next(tracked)["__key__"] for _ in range(12)]
    state = first_half.dataset.state_dict()
    for copies in ([tmp_path / "b"], []):  # the state describes samples, wherever they are read from
        proxy.asked.clear()
        second_half = loader(*copies)
        second_half.dataset.load_state_dict(state)
        assert head + [sample["__key__"] for sample in second_half.dataset.tracked(second_half)] == KEYS
        assert [path[-5] for path, _ in proxy.asked if path[-5] != "3"] == ["4"]


def test_copies_are_verified_by_a_manifest(pattern: str, folder: Path, tmp_path: Path) -> None:
    manifest = Manifest(build_indexes(pattern, options=IndexOptions(digest=True), index_dir=tmp_path))
    write_manifest(manifest, tmp_path / "manifest.json")
    pipe = pipeline(pattern, tmp_path / "copies", manifest=tmp_path / "manifest.json")
    assert sorted(pipe) == KEYS
    build_shard(folder / "2.tar", [{"__key__": f"2-{n}", "cls": "x"} for n in range(6)])
    with pytest.raises(CorruptShardError, match=r"2\.tar was downloaded, but its SHA-256 is"):
        list(pipeline(pattern, tmp_path / "more", manifest=manifest))
    with pytest.raises(ValueError, match=r"The largest shard of the manifest has \d+ bytes, but the cache is limited"):
        pipeline(pattern, tmp_path / "copies", manifest=manifest, max_bytes=1000)
    bad = pipeline(pattern, tmp_path / "copies", manifest=manifest)
    assert sorted(bad) == KEYS  # the copies already exist


def test_a_shard_of_a_directory_is_read_before_it_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "incoming"
    folder.mkdir()
    for number in range(3):
        build_shard(folder / f"{number}.tar", [{"__key__": f"{number}", "cls": "1"}])
    shards = DirectoryShards(folder, after="delete", timeout_s=0, poll_s=0.01).cache_wds_shards(
        tmp_path / "copies", prefetch=2
    )
    assert [sample["__key__"] for sample in shards.load_wds_shards().group_samples()] == ["0", "1", "2"]
    assert list(folder.glob("*.tar")) == []


def test_a_report_has_hits_and_misses(pattern: str, folder: Path, tmp_path: Path) -> None:
    pipe = pipeline(pattern, tmp_path / "copies")
    with DataLoader2(pipe, reading_service=ShardReadingService(num_workers=2)) as loader:
        assert sorted(loader) == KEYS
        first = loader.reading_service.report()
        assert sorted(loader) == KEYS
        second = loader.reading_service.report().since(first)
    size = sum((folder / f"{number}.tar").stat().st_size for number in range(5))
    found = [{name: each.total.figures[f"cache_{name}"] for name in FIGURES} for each in (first, second)]
    assert found[0] == {"hits": 0, "misses": 5, "hits_bytes": 0, "misses_bytes": size}
    assert found[1] == {"hits": 5, "misses": 0, "hits_bytes": size, "misses_bytes": 0}
    assert second.as_dict()["cache_hit_rate"] == 1
    assert "; 5 of 5 shards came from the cache;" in str(second)


FIGURES = ("hits", "misses", "hits_bytes", "misses_bytes")
