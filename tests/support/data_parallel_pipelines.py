"""The shards, pipelines and loaders that tests of data-parallel groups share, and the loader of many other tests."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from numbered_shards import key_of, write_numbered

from wds_datapipes import IndexedSamples, ShardList, ShardReadingService

# Silenced by the import above.
from torchdata.dataloader2 import DataLoader2  # isort: skip

__all__ = [
    "BATCH",
    "EPOCHS",
    "KEYS",
    "LIMIT_S",
    "flat",
    "indexed",
    "key_of",
    "open_loader",
    "open_service",
    "stream",
    "write_shards",
]

EPOCHS = 3
BATCH = 8  # over all ranks
LIMIT_S = 120.0
SIZES = (5, 1, 9, 12, 3, 7, 4)
KEYS = sorted(f"{shard}-{number}" for shard, size in enumerate(SIZES) for number in range(size))


def write_shards(folder: Path) -> Path:
    write_numbered(folder, SIZES)
    return folder


def stream(folder: Path, ranks: int) -> Any:
    shards = ShardList(str(folder / "*.tar")).shuffle().sharding_filter()
    return shards.load_wds_shards().group_samples().shuffle_samples(10).map(key_of).batch(BATCH // ranks)


def indexed(folder: Path, ranks: int) -> Any:
    samples: Any = IndexedSamples(str(folder / "*.tar"), global_batch_size=BATCH)
    return samples.map(key_of).batch(BATCH // ranks)


def flat(batches: Any) -> list[str]:
    return list(chain.from_iterable(batches))


def open_service(
    pipe: Any, workers: int = 0, state: Any = None, *, distributed: Any = None, seed: int | None = 7
) -> Any:
    """Return a `DataLoader2` with a `ShardReadingService`, which resumes from a state if one is given."""
    return open_loader(pipe, ShardReadingService(workers, distributed=distributed), state, seed=seed)


def open_loader(pipe: Any, service: Any, state: Any = None, *, seed: int | None = 7) -> Any:
    """Return a `DataLoader2` with a reading service, which resumes from a state if one is given."""
    loader: Any = DataLoader2(pipe, reading_service=service)
    if seed is not None:
        loader.seed(seed)
    if state is not None:
        loader.load_state_dict(state)
    return loader
