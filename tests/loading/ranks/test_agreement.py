"""Ranks that differ in their number of workers or list of shards are refused before they lose data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from forked_ranks import on_ranks
from numbered_shards import key_of, write_numbered
from torch.utils.data import DataLoader
from torchdata.dataloader2 import DataLoader2, DistributedReadingService, SequentialReadingService
from users_stages import OwnSplit

from wds_datapipes import ShardList, ShardReadingService, StatefulShards

KEYS = sorted(f"{shard}-{number}" for shard in range(6) for number in range(3))


def keys(shards: Any) -> Any:
    return shards.load_wds_shards().group_samples().map(key_of)


def split(urls: list[str]) -> Any:
    return keys(ShardList(urls).shuffle().sharding_filter())


def by_service(pipe: Any, workers: int) -> list[str]:
    with DataLoader2(pipe, reading_service=ShardReadingService(workers, distributed=True, timeout_s=60)) as loader:
        return list(loader)


def after_torchdatas_service(pipe: Any) -> list[str]:
    service = SequentialReadingService(DistributedReadingService(), ShardReadingService(1))
    with DataLoader2(pipe, reading_service=service) as loader:
        return list(loader)


def by_torch(pipe: Any, workers: int, *, is_tracked: bool = True) -> list[str]:
    data = StatefulShards(pipe)
    loader = DataLoader(data, batch_size=None, num_workers=workers, timeout=60 if workers else 0)
    return list(data.tracked(loader) if is_tracked else loader)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str] | str]]:
    """The items or the error of each of two ranks in each scenario."""
    folder = tmp_path_factory.mktemp("unlike")
    write_numbered(folder, [3] * 6)
    urls = sorted(map(str, folder.glob("*.tar")))

    def read(rank: int) -> dict[str, list[str] | str]:
        (folder / str(rank)).mkdir()
        part, here = urls[rank::2], [str(folder / f"{rank}/.." / Path(url).name) for url in urls]
        scenarios: dict[str, Callable[[], list[str]]] = {
            "service": lambda: by_service(split(urls), 1),
            "service, own folders": lambda: by_service(split(here), rank),
            "service, own split": lambda: by_service(keys(OwnSplit(ShardList(urls))), 2),
            "service, workers": lambda: by_service(split(urls), 1 + rank),
            "service, lists": lambda: by_service(split(part), 1),
            "torch": lambda: by_torch(split(urls), 1),
            "torch, own split": lambda: by_torch(keys(OwnSplit(ShardList(urls))), 2, is_tracked=False),
            "torch, workers": lambda: by_torch(split(urls), 1 + rank),
            "torch, workers, not tracked": lambda: by_torch(split(urls), 1 + rank, is_tracked=False),
            "torch, lists": lambda: by_torch(split(part), 1),
            "torch, lists of a stream": lambda: by_torch(split(part).with_epoch(5), 0),
            # This comes last: it may leave the other rank alone in the process group.
            "torchdata, lists": lambda: after_torchdatas_service(split(part)),
        }
        found: dict[str, list[str] | str] = {}
        for name, scenario in scenarios.items():
            dist.barrier()
            try:
                found[name] = scenario()
            except RuntimeError as error:
                found[name] = str(error)
        return found

    return on_ranks(2, read)


@pytest.mark.parametrize("name", ["service", "service, own folders", "service, own split", "torch", "torch, own split"])
def test_ranks_that_agree_read_each_sample_once(results: Any, name: str) -> None:
    assert sorted(key for rank in results for key in rank[name]) == KEYS


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        *((name, ("2 workers", "one process", "same num_workers")) for name in ("service, workers", "torch, workers")),
        ("torch, workers, not tracked", ("2 workers", "one process", "Give every rank the same num_workers")),
        *(
            (name, ("lists 3 shards from 0.tar", "lists 3 shards from 1.tar", "without urls[rank::ranks]"))
            for name in ("service, lists", "torch, lists", "torch, lists of a stream", "torchdata, lists")
        ),
    ],
)
def test_ranks_that_differ_are_refused(results: Any, name: str, parts: tuple[str, ...]) -> None:
    errors = [rank[name] for rank in results if isinstance(rank[name], str)]
    assert errors
    assert len(errors) == 2 or name.startswith("torch")  # all ranks of a service end
    assert all(part in "\n".join(errors) for part in parts)
