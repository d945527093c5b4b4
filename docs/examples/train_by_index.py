"""Train on indexed shards: the same global batches on any number of ranks, also after a restart with another number.

Run ``torchrun --standalone --nproc-per-node 2 train_by_index.py "train-{000..011}.tar"`` with shards of 8 x 8
gray images and their classes. Run it again after a crash, with the same number of ranks or a different one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from wds_datapipes import IndexedSamples, ShardReadingService

from torchdata.dataloader2 import DataLoader2  # isort: skip - the import above silences its deprecation warning

#: The dataset is divided into this many parts, and each rank reads the same parts in every epoch. Use at least as many
#: as the largest number of ranks you expect.
LANES = 16


def make_loader(urls: str, batch_size: int, workers: int) -> DataLoader2[Any]:
    """Return the loader of this rank, which has its part of every global batch."""
    samples = IndexedSamples(urls, global_batch_size=batch_size, lanes=LANES, remainder="pad")
    pipe = samples.wds_decode("torchl").to_tuple("__key__", "png", "cls", "__padding__")
    pipe = pipe.batch(batch_size // dist.get_world_size()).collate()
    service = ShardReadingService(num_workers=workers, distributed=True, timeout_s=60)
    loader: DataLoader2[Any] = DataLoader2(pipe, reading_service=service)
    loader.seed(5)
    return loader


def make_model() -> torch.nn.Module:
    """Return a small network; double precision shows that only the order of a sum differs between runs."""
    layers = [torch.nn.Flatten(), torch.nn.LazyLinear(32), torch.nn.ReLU(), torch.nn.Linear(32, 10)]
    return torch.nn.Sequential(*layers).double()


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    """Train on this rank's part of a global batch, and return the loss of all of it."""
    _, images, labels, is_padding = batch
    losses = torch.nn.functional.cross_entropy(model(images.double()), labels, reduction="none")
    total = (losses * ~is_padding).sum()
    numbers = torch.stack([total.detach(), (~is_padding).sum().double()])
    dist.all_reduce(numbers)
    optimizer.zero_grad()
    (total * dist.get_world_size() / numbers[1]).backward()  # DistributedDataParallel averages over the ranks
    optimizer.step()
    return float(numbers[0] / numbers[1])


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def save(path: Path, state: Any) -> None:
    """Save a state atomically: a crash leaves the complete file or none."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("urls")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="of the checkpoint and the log")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="of a global batch, a multiple of 16")
    parser.add_argument("--workers", type=int, default=1, help="of each rank")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--die-at", type=int, help="step at which the last rank kills itself, for a demonstration")
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)
    checkpoint, log = args.folder / "checkpoint.pt", args.folder / "log.jsonl"

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loader = make_loader(args.urls, args.batch_size, args.workers)
    torch.manual_seed(0)
    module = make_model()
    module(torch.zeros(1, 1, 8, 8).double())  # creates the weights of the lazy layer
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    epoch, step, lines = 0, 0, list[str]()
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["data"])
        epoch, step = saved["epoch"], saved["step"]
        lines = log.read_text().splitlines()[:step] if rank == 0 else []
    model = DistributedDataParallel(module)
    if rank == 0:
        log.write_text("".join(f"{line}\n" for line in lines))

    for number in range(epoch, args.epochs):
        started = time.perf_counter()
        for batch in loader:
            waited = time.perf_counter() - started
            if step == args.die_at and rank == ranks - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = train_step(model, optimizer, batch)
            step += 1
            keys, waits = gather(batch[0]), gather(waited)  # only for the log
            if rank == 0:
                facts = {"ranks": ranks, "loss": loss, "waited": waits, "keys": list(chain(*keys))}
                with log.open("a") as file:
                    print(json.dumps(facts), file=file)
            if step % args.save_every == 0 and rank == 0:
                state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "data": loader.state_dict()}
                save(checkpoint, {**state, "epoch": number, "step": step})
            started = time.perf_counter()
    loader.shutdown()
    if rank == 0:
        print(f"Finished after {step} steps with a loss of {loss:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
