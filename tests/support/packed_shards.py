"""Shards of texts of different lengths, and pipelines that pack them into planned rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from wds_datapipes import IndexedSamples
from wds_datapipes.index import EpochOptions, Pack, ShardIndex
from wds_datapipes.testing import build_shard

#: The maximum number of characters in a row.
ROW = 32


def write_texts(folder: Path, sizes: Sequence[int], *, longest: int = ROW) -> str:
    """Write shards with these numbers of texts, and return their pattern; the key of a text is unique."""
    rng = Random(7)
    for shard, size in enumerate(sizes):
        texts = [min(int(rng.lognormvariate(2, 0.8)), longest) for _ in range(size)]
        build_shard(
            folder / f"{shard}.tar", [{"__key__": f"{shard}-{n}", "txt": "x" * text} for n, text in enumerate(texts)]
        )
    return f"{folder}/{{0..{len(sizes) - 1}}}.tar"


def lengths_of(index: ShardIndex) -> Any:
    return index.sample_sizes


def as_tokens(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": [*sample["txt"]]}


def planned(shards: Any, step: int, *, exclude: Any = None, samples: int | None = None, **options: Any) -> Any:
    """Return the samples of planned rows; other options are those of `Pack` or of `IndexedSamples`."""
    names = ("row", "window", "balance", "cost", "second", "long_samples")
    settings: dict[str, Any] = {"length": lengths_of, "row": ROW, "window": 40}
    settings |= {name: options.pop(name) for name in names if name in options}
    pack = Pack(**settings)
    epoch = EpochOptions(pack=pack, window_shards=2, exclude=exclude, samples=samples)
    return IndexedSamples(shards, global_batch_size=step, epoch=epoch, **options)


def joined_key(row: dict[str, Any]) -> str:
    return "+".join(row["__key__"])


def packed(shards: Any, step: int, ranks: int = 1, **options: Any) -> Any:
    """Return the batches of a rank, as the keys of the samples in each row."""
    rows = planned(shards, step, **options).map_samples(as_tokens).pack_rows("tokens")
    return rows.map(joined_key).batch(step // ranks)
