"""Train on several ranks, save a checkpoint every few steps, and resume from it after a crash.

Run ``torchrun --standalone --nproc-per-node 2 train_and_resume.py "train-{0..7}.tar"``, and run it again after a crash,
with the same number of ranks or a different one.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from wds_datapipes import ShardList, ShardReadingService, merge_states

from torchdata.dataloader2 import DataLoader2  # isort: skip - the import above silences its deprecation warning

BATCH_SIZE = 4


def as_tensors(sample: dict[str, Any]) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Return the key, the input and the target of a sample."""
    value = float(sample["cls"])
    return sample["__key__"], torch.tensor([value, 1.0]), torch.tensor([2.0 * value + 1.0])


def make_loader(urls: str) -> DataLoader2[Any]:
    """Return the loader of this rank."""
    pipe = ShardList(urls).shuffle().sharding_filter().load_wds_shards().group_samples()
    pipe = pipe.shuffle_samples(20).wds_decode().map(as_tensors).batch(BATCH_SIZE).collate()
    service = ShardReadingService(num_workers=2, distributed=True, timeout_s=60)
    loader: DataLoader2[Any] = DataLoader2(pipe, reading_service=service)
    loader.seed(5)
    return loader


def synchronize_batches(loader: DataLoader2[Any]) -> Iterator[Any]:
    """Yield the batches of this rank, then empty batches until every rank has finished its epoch."""
    empty: Any = [], torch.empty(0, 2), torch.empty(0, 1)
    for batch in chain(loader, repeat(empty)):
        any_left = torch.tensor(batch is not empty, dtype=torch.int32)
        dist.all_reduce(any_left, dist.ReduceOp.MAX)
        if not any_left:
            return
        yield batch


def save(path: Path, state: Any) -> None:
    """Save a state atomically: a crash leaves the complete file or none."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def checkpoint_path(folder: Path, step: int, rank: int, ranks: int) -> Path:
    """Return the path of the checkpoint of a rank at a step."""
    return folder / f"{step:06}-{rank}-of-{ranks}.pt"


def load_latest(folder: Path) -> list[Any]:
    """Load the checkpoints of all ranks at the latest step that every rank has saved."""
    for path in sorted(folder.glob("*-0-of-*.pt"), reverse=True):
        step, _, _, ranks = path.stem.split("-")
        paths = [checkpoint_path(folder, int(step), rank, int(ranks)) for rank in range(int(ranks))]
        if all(each.exists() for each in paths):
            return [torch.load(each, weights_only=True) for each in paths]
    return []


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("urls")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=3, help="steps between two checkpoints")
    parser.add_argument("--die-at", type=int, help="step at which the last rank kills itself, for a demonstration")
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5)
    loader = make_loader(args.urls)
    epoch, step, seen = 0, 0, list[str]()

    if found := load_latest(args.folder):
        same_ranks = len(found) == ranks
        own = found[rank if same_ranks else 0]  # the model is the same on all ranks
        model.module.load_state_dict(own["model"])
        optimizer.load_state_dict(own["optimizer"])
        epoch, step = own["epoch"], own["step"]
        if same_ranks:
            seen = own["seen"]
        elif rank == 0:
            seen = [key for each in found for key in each["seen"]]
        loader.load_state_dict(merge_states([each["data"] for each in found]))
        if rank == 0:
            print(f"Resuming from step {step} (world size: {len(found)} before, {ranks} now)", flush=True)

    for number in range(epoch, args.epochs):
        for keys, inputs, targets in synchronize_batches(loader):
            if step == args.die_at and rank == ranks - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = (model(inputs) - targets).square().sum() / BATCH_SIZE  # 0 for an empty batch
            loss.backward()
            optimizer.step()
            seen += [f"epoch {number}: {key}" for key in keys]  # only for the demonstration
            step += 1
            if step % args.save_every == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"epoch": number, "step": step, "seen": seen, "data": loader.state_dict()}
                save(checkpoint_path(args.folder, step, rank, ranks), state)
                # Other ranks may not have saved this step yet, but all have saved the previous one.
                checkpoint_path(args.folder, step - 2 * args.save_every, rank, ranks).unlink(missing_ok=True)
    loader.shutdown()

    seen_by_all: list[Any] = [None] * ranks
    dist.all_gather_object(seen_by_all, seen)
    if rank == 0:
        save(args.folder / "end.pt", {"model": model.module.state_dict(), "seen": seen_by_all})
        print(f"Finished after {step} steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
