"""A training run that saves its state every few steps, and may die; run by torchrun.

The arguments are the folder of the shards, the folder for what it saves, and the step at which rank 1 kills itself, or
0 for never. It goes on from the last step that all ranks have saved, with as many ranks as it has now.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService, merge_states

SAVE_EVERY = 3
EPOCHS = 2


def numbers(sample: dict[str, Any]) -> tuple[str, torch.Tensor, torch.Tensor]:
    label = float(sample["cls"])
    return sample["__key__"], torch.tensor([label, 1.0]), torch.tensor([2.0 * label + 1.0])


def make_loader(shards: Path) -> DataLoader2[Any]:
    pipe = ShardList(f"{shards}/*.tar").shuffle().sharding_filter().load_wds_shards().group_samples()
    pipe = pipe.shuffle_samples(10).wds_decode().map(numbers).batch(4).collate()
    loader: DataLoader2[Any] = DataLoader2(pipe, reading_service=ShardReadingService(2, distributed=True, timeout_s=60))
    loader.seed(5)
    return loader


def save(folder: Path, step: int, saved: dict[str, Any]) -> None:
    """Save the state of a rank, which is there whole or not at all."""
    path = folder / f"{step:04}-{dist.get_rank()}.pt"
    torch.save(saved, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def latest(folder: Path) -> list[dict[str, Any]]:
    """Return what all ranks had saved at the last step that all of them have saved."""
    steps: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.pt")):
        steps.setdefault(path.name.partition("-")[0], []).append(path)
    whole = [paths for paths in steps.values() if len(paths) == 2]
    return [torch.load(path, weights_only=False) for path in whole[-1]] if whole else []


def main(shards: Path, folder: Path, dies_at: int) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = make_loader(shards)
    epoch, step, keys = 0, 0, list[str]()
    if found := latest(folder):
        saved = found[rank] if ranks == len(found) else found[0]
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        epoch, step = saved["epoch"], saved["step"]
        keys = saved["keys"] if ranks == len(found) else [key for each in found for key in each["keys"]]
        loader.load_state_dict(merge_states([each["data"] for each in found]))
    for number in range(epoch, EPOCHS):
        for names, inputs, targets in loader:
            if rank == 1 and step == dies_at - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss: Any = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            keys += [f"{number}/{name}" for name in names]
            step += 1
            if step % SAVE_EVERY == 0 and ranks == 2:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                save(folder, step, {**state, "epoch": number, "step": step, "keys": keys, "data": loader.state_dict()})
    loader.shutdown()
    weights = [value.tolist() for value in model.module.state_dict().values()]
    (folder / f"{rank}-of-{ranks}.json").write_text(json.dumps({"keys": keys, "weights": weights}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
