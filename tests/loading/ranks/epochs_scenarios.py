"""The items that a rank reads and trains on per epoch, by the recipes of "Equal epochs on every rank". Run by torchrun.

Each rank writes its results as JSON.
"""

from __future__ import annotations

import gc
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterDataPipe

from wds_datapipes import ShardList, ShardReadingService

from torchdata.dataloader2 import DataLoader2  # isort: skip  # its banner is silenced by the import above

#: How long ranks wait for each other, in seconds.
LIMIT_S = 300.0

EPOCHS = 3

Batches = list[list[str]]


def shards(folder: Path) -> IterDataPipe[Any]:
    pipe: IterDataPipe[Any] = ShardList(str(folder / "*.tar")).shuffle()
    return pipe


def read(pipe: IterDataPipe[Any], workers: int, seed: int = 7, epochs: int = EPOCHS) -> list[list[Any]]:
    service = ShardReadingService(workers, timeout_s=LIMIT_S, distributed=True)
    with DataLoader2(pipe, reading_service=service) as loader:
        loader.seed(seed)
        return [list(loader) for _ in range(epochs)]


def read_by_torch(pipe: IterDataPipe[Any], workers: int, seed: int = 7) -> list[list[Any]]:
    """Read with torch's loader, which shares a seed among ranks, and splits by rank if there is a process group."""
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(pipe, batch_size=None, num_workers=workers, persistent_workers=workers > 0, generator=generator)
    return [list(loader) for _ in range(EPOCHS)]


def train(pipe: IterDataPipe[Any], workers: int, *, joined: bool) -> dict[str, Any]:
    """Train a model that all ranks share, which synchronizes them at each step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    service = ShardReadingService(workers, timeout_s=LIMIT_S, distributed=True)
    epochs: list[Batches] = []

    def epoch(loader: Any) -> None:
        for keys, labels in loader:
            epochs[-1].append(list(keys))
            optimizer.zero_grad()
            model(labels.reshape(-1, 1).float()).square().mean().backward()
            optimizer.step()

    with DataLoader2(pipe, reading_service=service) as loader:
        loader.seed(7)
        for _ in range(EPOCHS):
            epochs.append([])
            if joined:
                with Join([model]):
                    epoch(loader)
            else:
                epoch(loader)
    return {"epochs": epochs, "weights": [each.tolist() for each in model.parameters()]}


def resampled(folder: Path) -> IterDataPipe[Any]:
    samples: IterDataPipe[Any] = (
        shards(folder).resample_wds_shards().load_wds_shards().group_samples().shuffle_samples(10)
    )
    pipe: IterDataPipe[Any] = samples.wds_decode().to_tuple("__key__", "cls").batch(4).collate().with_epoch(13)
    return pipe


def split(folder: Path) -> IterDataPipe[Any]:
    samples: IterDataPipe[Any] = shards(folder).sharding_filter().load_wds_shards().group_samples().shuffle_samples(10)
    pipe: IterDataPipe[Any] = samples.wds_decode().to_tuple("__key__", "cls").batch(4).collate()
    return pipe


def ordered(folder: Path) -> IterDataPipe[Any]:
    """The shards of a rank, each with its position in the global order."""
    pipe: IterDataPipe[Any] = shards(folder).enumerate().sharding_filter()
    return pipe


def keys(folder: Path) -> IterDataPipe[Any]:
    pipe: IterDataPipe[Any] = shards(folder).sharding_filter().load_wds_shards().group_samples().to_tuple("__key__")
    return pipe


def drawn(folder: Path) -> IterDataPipe[Any]:
    pipe: IterDataPipe[Any] = shards(folder).resample_wds_shards(24)
    return pipe


def run_all(folder: Path) -> dict[str, Any]:
    # torch's loader splits the pipeline that it is given, so each loader has its own pipeline.
    results: dict[str, Any] = {"drawn": read(drawn(folder), 2), "drawn by torch": read_by_torch(drawn(folder), 2)}
    for workers in (0, 3):
        results[f"keys by torch {workers}"] = read_by_torch(keys(folder), workers)
    for workers in (0, 1, 3):
        results[f"passes {workers}"] = read(ordered(folder).with_epoch(6), workers, epochs=7)
    for workers in (0, 2):
        results[f"resampled {workers}"] = train(resampled(folder), workers, joined=False)
        results[f"split {workers}"] = train(split(folder), workers, joined=True)
    return results


if __name__ == "__main__":
    gc.freeze()  # skip collecting imported modules at exit, which takes a second
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    place = Path(sys.argv[1])
    (place / f"{dist.get_rank()}.json").write_text(json.dumps(run_all(place)))
    dist.barrier()
    dist.destroy_process_group()
