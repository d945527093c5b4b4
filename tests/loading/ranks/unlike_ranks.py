"""Loaders of two ranks that differ in their workers or their lists, and their errors. Run by torchrun.

Each rank writes the result of each scenario as JSON. Its folder holds the shards.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterDataPipe

from wds_datapipes import ShardList, ShardReadingService, StatefulShards

from torchdata.dataloader2 import (  # isort: skip  # its banner is silenced by the import above
    DataLoader2,
    DistributedReadingService,
    SequentialReadingService,
)


class OwnSplit(IterDataPipe[Any]):
    """Splits as ``.sharding_filter()`` does, but does not learn whether it splits between ranks or workers."""

    def __init__(self, source: IterDataPipe[Any]) -> None:
        self.source = source
        self.instances, self.instance = 1, 0

    def apply_sharding(self, instances: int, instance: int) -> None:
        self.instances, self.instance = instances, instance

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(self.source, self.instance, None, self.instances)


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


def keys(shards: Any) -> Any:
    return shards.load_wds_shards().group_samples().map(key_of)


def by_service(pipe: Any, service: Any) -> list[str]:
    with DataLoader2(pipe, reading_service=service) as loader:
        return list(loader)


def by_torch(pipe: Any, workers: int, *, is_tracked: bool) -> list[str]:
    data = StatefulShards(pipe)
    loader = DataLoader(data, batch_size=None, num_workers=workers)
    return list(data.tracked(loader) if is_tracked else loader)


def scenarios(folder: Path, rank: int) -> dict[str, Callable[[], list[str]]]:
    urls = sorted(map(str, folder.glob("*.tar")))
    part, here = urls[rank::2], [str(folder / f"{rank}/.." / Path(url).name) for url in urls]

    def split(some: list[str]) -> Any:
        return keys(ShardList(some).shuffle().sharding_filter())

    def service(workers: int) -> Any:
        return ShardReadingService(workers, distributed=True, timeout_s=60)

    return {
        "service": lambda: by_service(split(urls), service(1)),
        "service, own folders": lambda: by_service(split(here), service(rank)),
        "service, own split": lambda: by_service(keys(OwnSplit(ShardList(urls))), service(2)),
        "service, workers": lambda: by_service(split(urls), service(1 + rank)),
        "service, lists": lambda: by_service(split(part), service(1)),
        "torch": lambda: by_torch(split(urls), 1, is_tracked=True),
        "torch, own split": lambda: by_torch(keys(OwnSplit(ShardList(urls))), 2, is_tracked=False),
        "torch, workers": lambda: by_torch(split(urls), 1 + rank, is_tracked=True),
        "torch, workers, not tracked": lambda: by_torch(split(urls), 1 + rank, is_tracked=False),
        "torch, lists": lambda: by_torch(split(part), 1, is_tracked=True),
        "torch, lists of a stream": lambda: by_torch(split(part).with_epoch(5), 0, is_tracked=True),
        # This comes last: it may leave the other rank alone in the process group.
        "sequential, lists": lambda: by_service(
            split(part), SequentialReadingService(DistributedReadingService(), ShardReadingService(1))
        ),
    }


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results: dict[str, Any] = {}
    for name, scenario in scenarios(folder, rank).items():
        dist.barrier()
        try:
            results[name] = scenario()
        except RuntimeError as error:
            results[name] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
