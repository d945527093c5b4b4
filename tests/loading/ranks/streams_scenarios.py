"""Two ranks that save and load the states of mixtures and of streams. Run by torchrun; each writes its items as JSON.

Each run of a pipeline is interrupted twice: in the middle of an epoch, and between two epochs.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from wds_datapipes import ShardList, ShardReadingService

from torchdata.dataloader2 import DataLoader2  # isort: skip  # its banner is silenced by the import above

#: How many items of the epoch the loop has taken when the first state is saved.
CUT = 3

Pipe = Any


def split(folder: Path, name: str) -> Pipe:
    return ShardList(f"{folder}/{name}{{0..3}}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()


def drawn(folder: Path) -> Pipe:
    return ShardList(f"{folder}/a{{0..3}}.tar").resample_wds_shards().load_wds_shards().group_samples()


def mixture(folder: Path) -> Pipe:
    mixed = split(folder, "a").mix_samples(split(folder, "b"), weights=[2, 1], stop="all")
    return mixed.shuffle_samples(4).to_tuple("__key__")


def mixed_stream(folder: Path) -> Pipe:
    mixed = drawn(folder).mix_samples(split(folder, "b"), weights=[2, 1], stop="never")
    return mixed.shuffle_samples(4).to_tuple("__key__").with_epoch(9)


def recipe(folder: Path) -> Pipe:
    """Draw shards, as in "Equal epochs on every rank"."""
    samples = drawn(folder).shuffle_samples(6)
    return samples.wds_decode().to_tuple("__key__", "cls").batch(3).collate().with_epoch(7)


def run(make: Callable[[], Pipe], workers: int) -> dict[str, Any]:
    def new(state: Any = None) -> Any:
        loader: Any = DataLoader2(make(), reading_service=ShardReadingService(workers, distributed=True))
        loader.seed(5)
        if state is not None:
            loader.load_state_dict(state)
        return loader

    def keys(items: Any) -> list[Any]:
        return [item[0] for item in items]

    with new() as loader:
        whole = [keys(loader) for _ in range(3)]
    with new() as loader:
        epochs = [keys(loader)]
        head = keys(itertools.islice(loader, CUT))
        state = loader.state_dict()
    with new(state) as loader:
        epochs.append(head + keys(loader))
        state = loader.state_dict()
    with new(state) as loader:
        epochs.append(keys(loader))
    return {"whole": whole, "epochs": epochs}


def main() -> None:
    gc.freeze()  # skip collecting imported modules at exit, which takes a second
    folder = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    results = {
        f"{make.__name__} {workers}": run(lambda make=make: make(folder), workers)  # type: ignore[misc]  # mypy does not see its default
        for make in (mixture, mixed_stream, recipe)
        for workers in range(3)
    }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
