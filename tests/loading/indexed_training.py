"""One rank of a run that trains on indexed samples; `test_indexed_batches` starts all of them.

RANK=0 WORLD_SIZE=2 python indexed_training.py FOLDER BATCH EPOCHS WORKERS STOP STATE
"""

from __future__ import annotations

import json
import os
import signal
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import IndexedSamples, ShardReadingService, merge_states
from wds_datapipes.index import read_manifest


def train(folder: Path, batch: int, epochs: int, workers: int, stop: int, state: str) -> None:
    """Train, and record the keys and the loss of each global batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    samples: Any = IndexedSamples(read_manifest(folder / "manifest.json"), batch_size=batch, remainder="pad")
    pipe = samples.wds_decode("torchrgb").to_tuple("__key__", "png", "cls").batch(batch // ranks).collate()
    torch.manual_seed(0)
    module = torch.nn.Linear(192, 2).double()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    service = ShardReadingService(num_workers=workers, distributed=True)
    with DataLoader2(pipe, reading_service=service) as loader, (folder / f"{rank}.log").open("w") as log:
        loader.seed(5)
        if state:
            saved = [torch.load(file) for file in sorted(Path(state).glob("*.pt"))]
            loader.load_state_dict(merge_states([each["loader"] for each in saved]))
            module.load_state_dict(saved[0]["model"])
            optimizer.load_state_dict(saved[0]["optimizer"])
        model = DistributedDataParallel(module)
        step = 0
        # The state is in the middle of the first epoch.
        for _ in range(epochs):
            for keys, images, labels in loader:
                loss = torch.nn.functional.cross_entropy(model(images.double().flatten(1)), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
                optimizer.step()
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                parts: list[Any] = [None] * ranks
                dist.all_gather_object(parts, list(keys))
                print(json.dumps([list(chain.from_iterable(parts)), float(mean) / ranks]), file=log, flush=True)
                step += 1
                if step == stop:
                    own = {"loader": loader.state_dict(), "model": module.state_dict()}
                    torch.save({**own, "optimizer": optimizer.state_dict()}, folder / f"{rank}.pt")
                    dist.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    folder, *numbers, state = sys.argv[1:]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    batch, epochs, workers, stop = map(int, numbers)
    train(Path(folder), batch, epochs, workers, stop, state)
    dist.destroy_process_group()
