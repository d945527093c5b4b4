"""Read a stream of shards on several ranks, and save the state of each with torch.distributed.checkpoint.

Run ``torchrun --standalone --nproc-per-node 2 train_stream.py "train-{000..003}.tar" --save first --steps 3``, and then
on any number of ranks, with ``--load first --save second``.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from wds_datapipes import ShardList, ShardReadingService, merge_states

from torchdata.dataloader2 import DataLoader2  # isort: skip - the import above silences its deprecation warning


def make_loader(urls: str, workers: int = 1) -> DataLoader2[Any]:
    """Return the loader of this rank."""
    pipe = ShardList(urls).shuffle().sharding_filter().load_wds_shards().group_samples()
    pipe = pipe.shuffle_samples(20).wds_decode().to_tuple("__key__", "cls").batch(4)
    service = ShardReadingService(num_workers=workers, distributed=True, timeout_s=60)
    loader: DataLoader2[Any] = DataLoader2(pipe, reading_service=service)
    loader.seed(5)
    return loader


def key_of_rank() -> str:
    """Return the key under which this rank saves its state."""
    return f"data.{dist.get_rank()}-of-{dist.get_world_size()}"


def save(loader: Any, folder: str) -> None:
    """Save a checkpoint; each rank writes its own state. The state of the model belongs here, too."""
    dcp.save({key_of_rank(): loader.state_dict()["wds_datapipes"]}, checkpoint_id=folder)


def load(loader: Any, folder: str) -> list[str]:
    """Load a checkpoint: the state of this rank, or, on another number of ranks, those of all; return their keys."""
    saved, own = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata, key_of_rank()
    states: dict[str, Any] = dict.fromkeys([own] if own in saved else [key for key in saved if key.startswith("data.")])
    dcp.load(states, checkpoint_id=folder)
    loader.load_state_dict(states[own] if own in saved else merge_states([*states.values()]))
    return [*states]


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("urls")
    parser.add_argument("--load", help="folder of the checkpoint to resume from")
    parser.add_argument("--save", required=True, help="folder of the new checkpoint")
    parser.add_argument("--steps", type=int, help="number of steps; by default, to the end of the epoch")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    loader = make_loader(args.urls)
    if args.load:
        load(loader, args.load)
    seen = [key for batch in islice(loader, args.steps) for key, _ in batch]
    save(loader, args.save)
    loader.shutdown()
    Path(f"{args.save}-{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
