"""Two ranks that save and load their own states. Run by torchrun; each writes what it has read as JSON."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from wds_datapipes import ShardList, ShardReadingService

# Silenced by the import above.
from torchdata.dataloader2 import DataLoader2, DistributedReadingService, SequentialReadingService  # isort: skip

CUTS = (0, 1, 4, 6)


def own() -> Any:
    return ShardReadingService(2, distributed=True)


def sequential() -> Any:
    return SequentialReadingService(DistributedReadingService(), ShardReadingService(2))


def keys(loader: Any) -> list[str]:
    return [key for (key,) in loader]


def shuffled(pipe: Any) -> Any:
    return pipe.shuffle_samples(3)


#: These resume by replay.
REPLAYED: dict[str, Callable[[Any], Any]] = {
    "unbatched": lambda pipe: pipe.shuffle_samples(3).batch(3).unbatch_samples(collated=False).shuffle_samples(4),
    "composed": lambda pipe: pipe.compose(itertools.chain).shuffle_samples(4),
    "joined": lambda pipe: pipe.add_columns(("/", "/./"), fields=[]),
    "cached": lambda pipe: pipe.cache_samples().shuffle_samples(4),
    "shuffled by torch": lambda pipe: pipe.shuffle(buffer_size=5),
}


def run(
    folder: Path, new_service: Callable[[], Any], build: Callable[[Any], Any] = shuffled, cuts: Sequence[int] = CUTS
) -> dict[str, Any]:
    shards = ShardList(f"{folder}/{{0..4}}.tar").shuffle().sharding_filter()
    pipe = build(shards.load_wds_shards().group_samples()).to_tuple("__key__")

    def new() -> Any:
        loader: Any = DataLoader2(pipe, reading_service=new_service())
        loader.seed(5)
        return loader

    with new() as loader:
        whole = [keys(loader) for _ in range(3)]
    found = []
    for cut in cuts:
        with new() as loader:
            keys(loader)
            head = keys(itertools.islice(loader, cut)) if cut else iter(loader) and []
            state = loader.state_dict()
        assert head == whole[1][:cut]
        with new() as loader:
            loader.load_state_dict(state)
            found.append([len(head), keys(loader), keys(loader)])
    return {"whole": whole, "cuts": found}


def main() -> None:
    gc.freeze()  # skip collecting imported modules at exit, which takes a second
    folder = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    results = {"own": run(folder, own), "sequential": run(folder, sequential)}
    results |= {name: run(folder, own, build, [6]) for name, build in REPLAYED.items()}
    results["cached, sequential"] = run(folder, sequential, REPLAYED["cached"], [6])
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
