"""Copies for the next epoch are downloaded before this one ends, without evicting any that are still needed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from data_parallel_pipelines import open_service
from faults import FaultProxy
from nginx_server import Nginx
from numbered_shards import write_numbered
from readers import keys_of
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes import IndexedSamples, StatefulShards
from wds_datapipes.index import AccessOptions, EpochOptions, Manifest, build_indexes
from wds_datapipes.io.remote import known_stores
from wds_datapipes.pipes.stage import Stage
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.shard_cache.entry import Entry

SHARDS, SAMPLES, WINDOW = 8, 20, 2


@pytest.fixture(autouse=True)
def _near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no delay of a slow machine make the server distant, whose shards are read in parts."""
    monkeypatch.setattr(known_stores, "NEAR_S", 60.0)


@pytest.fixture(scope="module")
def folder(nginx: Nginx) -> Path:
    folder = nginx.files / "next-epoch"
    folder.mkdir()
    build_indexes(write_numbered(folder, [SAMPLES] * SHARDS))
    return folder


def url_of(proxy: FaultProxy, shard: int) -> str:
    return f"http://127.0.0.1:{proxy.port}/next-epoch/{shard}.tar"


def samples_of(proxy: FaultProxy, folder: Path, copies: Path, shards: int = SHARDS) -> IndexedSamples:
    """Return samples whose cache has space for some shards."""
    manifest = Manifest(build_indexes([url_of(proxy, shard) for shard in range(SHARDS)], index_dir=folder))
    size = (folder / "0.tar").stat().st_size
    access = AccessOptions(index_dir=folder, cache_dir=copies, cache_bytes=shards * size, open_shards=WINDOW)
    return IndexedSamples(manifest, order="window", epoch=EpochOptions(window_shards=WINDOW), access=access)


def loader_of(pipe: Any, kind: str) -> Any:
    if kind == "StatefulShards":
        return DataLoader(StatefulShards(pipe, seed=3), batch_size=None)
    workers, distributed = 2 if kind == "workers" else 0, (1, 2) if kind == "ranks" else False
    return open_service(pipe, workers, distributed=distributed, seed=3)


def downloads(proxy: FaultProxy) -> Counter[str]:
    return Counter(path for path, asked in proxy.asked if asked is None)


@pytest.mark.parametrize("kind", ["DataLoader2", "workers", "StatefulShards"])
def test_the_first_window_of_the_next_epoch_waits_for_no_request(
    proxy: FaultProxy, folder: Path, tmp_path: Path, kind: str
) -> None:
    loader = loader_of(samples_of(proxy, folder, tmp_path / "other"), "DataLoader2")
    whole, following = keys_of(loader), keys_of(loader)
    window = following[: WINDOW * SAMPLES]
    proxy.asked.clear()
    copies = tmp_path / "copies"
    loader = loader_of(samples_of(proxy, folder, copies, 3 * WINDOW), kind)
    assert keys_of(loader) == whole
    shards = {int(key[0]) for key in window}
    while not all(Entry.of(copies, url_of(proxy, shard)).path.exists() for shard in shards):
        time.sleep(0.01)
    asked = downloads(proxy)
    proxy.awaited = 1000  # no request is answered
    proxy.met.clear()
    items = iter(loader)
    assert keys_of(islice(items, len(window))) == window
    proxy.met.set()
    assert keys_of(items) == following[len(window) :]
    again = downloads(proxy) - asked
    assert not {f"/next-epoch/{shard}.tar" for shard in shards} & again.keys()


@pytest.mark.parametrize("shards", [WINDOW, WINDOW + 1, 2 * WINDOW])
def test_no_shard_is_downloaded_twice_in_an_epoch(proxy: FaultProxy, folder: Path, tmp_path: Path, shards: int) -> None:
    """The first shards of the next epoch evict nothing in use, and are not evicted themselves."""
    loader = loader_of(samples_of(proxy, folder, tmp_path / "copies", shards), "DataLoader2")
    epochs = [keys_of(loader) for _ in range(4)]
    assert max(downloads(proxy).values()) <= len(epochs) + 1  # some for a fifth epoch
    assert downloads(proxy).total() <= len(epochs) * SHARDS + WINDOW


class Seeds(SeededStage, Stage[Any]):
    """Yields the seed of the epoch, and that of the next one."""

    shares_seed = True

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        seed = self.take_seed()
        for _ in self.source:
            yield seed, self.next_seed


@pytest.mark.parametrize("selects", [False, True])
@pytest.mark.parametrize("kind", ["DataLoader2", "workers", "ranks", "StatefulShards"])
def test_a_stage_knows_the_seed_of_the_next_epoch(kind: str, selects: bool) -> None:
    loader = loader_of(Seeds(IterableWrapper(range(4)).sharding_filter()), kind)
    epochs = []
    for epoch in range(3):
        if selects:
            (loader.dataset if kind == "StatefulShards" else loader).set_epoch(epoch)
        epochs.append({*map(tuple, loader)})
    (seeds,) = zip(*epochs, strict=True)
    assert len(set(seeds)) == 3
    assert all(before[1] == after[0] for before, after in pairwise(seeds))


def test_a_loader_without_a_seed_has_no_next_seed() -> None:
    loader = open_service(Seeds(IterableWrapper(range(4)).sharding_filter()), seed=None)
    assert {following for _ in range(2) for _, following in loader} == {None}
