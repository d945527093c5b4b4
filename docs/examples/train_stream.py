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
from wds_datapipes.integrations.ranks import outline_state, ranks_to_read

from torchdata.dataloader2 import DataLoader2  # isort: skip - the import above silences its deprecation warning


def make_pipe(urls: str) -> Any:
    """Return the pipeline of all ranks."""
    pipe = ShardList(urls).shuffle().sharding_filter().load_wds_shards().group_samples()
    return pipe.shuffle_samples(20).wds_decode().to_tuple("__key__", "cls").batch(4)


def make_loader(pipe: Any, workers: int = 1) -> DataLoader2[Any]:
    """Return the loader of this rank."""
    service = ShardReadingService(num_workers=workers, distributed=True, timeout_s=60)
    loader: DataLoader2[Any] = DataLoader2(pipe, reading_service=service)
    loader.seed(5)
    return loader


def save(loader: Any, folder: str) -> None:
    """Save a checkpoint; each rank writes its own state. The state of the model belongs here, too."""
    state, name = loader.state_dict(), f"{dist.get_rank()}-of-{dist.get_world_size()}"
    texts = {f"data.{name}": state["wds_datapipes"], f"outline.{name}": outline_state(state)["wds_datapipes"]}
    dcp.save(texts, checkpoint_id=folder)


def load(loader: Any, folder: str, pipe: Any, workers: int = 1) -> dict[str, str]:
    """Load a checkpoint, saved by any number of ranks; return the states that this rank has read."""
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    outlines: dict[str, Any] = dict.fromkeys(key for key in saved if key.startswith("outline."))
    dcp.load(outlines, checkpoint_id=folder)
    ranks = ranks_to_read(
        [*outlines.values()], pipe, rank=dist.get_rank(), ranks=dist.get_world_size(), workers=workers
    )
    states: dict[str, Any] = dict.fromkeys(f"data.{rank}-of-{len(outlines)}" for rank in ranks)
    dcp.load(states, checkpoint_id=folder)
    others = [text for key, text in outlines.items() if key.replace("outline", "data") not in states]
    loader.load_state_dict(merge_states([*states.values(), *others]))
    return {**outlines, **states}


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("urls")
    parser.add_argument("--load", help="folder of the checkpoint to resume from")
    parser.add_argument("--save", required=True, help="folder of the new checkpoint")
    parser.add_argument("--steps", type=int, help="number of steps; by default, to the end of the epoch")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    pipe = make_pipe(args.urls)
    loader = make_loader(pipe)
    if args.load:
        load(loader, args.load, pipe)
    seen = [key for batch in islice(loader, args.steps) for key, _ in batch]
    save(loader, args.save)
    loader.shutdown()
    Path(f"{args.save}-{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
