"""The shards and pipelines that the tests of data-parallel groups share."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from wds_datapipes import IndexedSamples, ShardList
from wds_datapipes.testing import build_shard

__all__ = ["BATCH", "EPOCHS", "KEYS", "flat", "indexed", "key_of", "stream", "write_shards"]

EPOCHS = 3
BATCH = 8  # over all ranks
SIZES = (5, 1, 9, 12, 3, 7, 4)
KEYS = sorted(f"{shard}/{number}" for shard, size in enumerate(SIZES) for number in range(size))


def write_shards(folder: Path) -> Path:
    for shard, size in enumerate(SIZES):
        build_shard(folder / f"{shard}.tar", [{"__key__": f"{shard}/{number}", "cls": "1"} for number in range(size)])
    return folder


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


def stream(folder: Path, ranks: int) -> Any:
    shards = ShardList(str(folder / "*.tar")).shuffle().sharding_filter()
    return shards.load_wds_shards().group_samples().shuffle_samples(10).map(key_of).batch(BATCH // ranks)


def indexed(folder: Path, ranks: int) -> Any:
    samples: Any = IndexedSamples(str(folder / "*.tar"), global_batch_size=BATCH)
    return samples.map(key_of).batch(BATCH // ranks)


def flat(batches: Any) -> list[str]:
    return list(chain.from_iterable(batches))
