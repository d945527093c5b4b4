"""Train on several ranks, save a checkpoint every few steps, and resume after a crash, on any number of ranks.

Run ``torchrun --standalone --nproc-per-node 2 train.py "train-{000..011}.tar"`` with shards of 8 x 8 gray images and
their classes. Run it again after a crash. At SIGTERM, it saves and stops. ``--read stream`` reads
whole shards one after the other, and ``--dcp`` saves with torch.distributed.checkpoint, to which each rank writes its
own part.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from wds_datapipes import IndexedSamples, ShardList, ShardReadingService, merge_states
from wds_datapipes.integrations.ranks import gather_states, outline_state, ranks_to_read

from torchdata.dataloader2 import DataLoader2  # isort: skip - the import above silences its deprecation warning

#: The dataset is divided into this many parts, and each rank reads the same parts in every epoch. Use at least as many
#: as the largest number of ranks you expect.
LANES = 16


@dataclass
class Run:
    """What a checkpoint contains, and what loads it."""

    read: str
    pipe: Any
    loader: Any
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    epoch: int = 0
    step: int = 0


def make_pipe(urls: str, batch_size: int, read: str = "index") -> Any:
    """Return the pipeline of this rank: its part of every global batch, or batches from its part of the shards."""
    if read == "index":
        samples = IndexedSamples(urls, global_batch_size=batch_size, lanes=LANES, remainder="pad")
        fields = ["__key__", "png", "cls", "__padding__"]
    else:
        samples = ShardList(urls).shuffle().sharding_filter().load_wds_shards().group_samples().shuffle_samples(20)
        fields = ["__key__", "png", "cls"]
    return samples.wds_decode("torchl").to_tuple(*fields).batch(batch_size // dist.get_world_size()).collate()


def make_loader(pipe: Any, workers: int = 1) -> DataLoader2[Any]:
    """Return the loader of this rank."""
    service = ShardReadingService(num_workers=workers, distributed=True, timeout_s=60)
    loader: DataLoader2[Any] = DataLoader2(pipe, reading_service=service)
    loader.seed(5)
    return loader


def in_step(loader: Any) -> Iterator[Any]:
    """Yield the batches of this rank, then empty batches until every rank has finished its epoch."""
    empty: Any = [], torch.empty(0, 1, 8, 8), torch.empty(0, dtype=torch.int64)
    for batch in chain(loader, repeat(empty)):
        any_left = torch.tensor(batch is not empty, dtype=torch.int32)
        dist.all_reduce(any_left, dist.ReduceOp.MAX)
        if not any_left:
            return
        yield batch


def make_model() -> torch.nn.Module:
    """Return a small network; double precision shows that only the order of a sum differs between runs."""
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    ).double()


def train_step(run: Run, images: torch.Tensor, labels: torch.Tensor, is_padding: torch.Tensor) -> float:
    """Train on this rank's part of a global batch, and return the loss of all of it."""
    losses = torch.nn.functional.cross_entropy(run.model(images.double()), labels, reduction="none")
    total = (losses * ~is_padding).sum()
    numbers = torch.stack([total.detach(), (~is_padding).sum().double()])
    dist.all_reduce(numbers)
    run.optimizer.zero_grad()
    (total * dist.get_world_size() / numbers[1]).backward()  # DistributedDataParallel averages over the ranks
    run.optimizer.step()
    return float(numbers[0] / numbers[1])


def save_file(run: Run, folder: Path) -> None:
    """Save a checkpoint as one file. It is written by rank 0, atomically: a crash leaves the complete file or none."""
    data = gather_states(run.loader.state_dict())
    if dist.get_rank() == 0:
        state = {"model": run.model.module.state_dict(), "optimizer": run.optimizer.state_dict()}
        torch.save({**state, "data": data, "epoch": run.epoch, "step": run.step}, folder / "checkpoint.part")
        (folder / "checkpoint.part").replace(folder / "checkpoint.pt")


def load_file(run: Run, folder: Path) -> None:
    """Load a checkpoint; every rank reads the whole file."""
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    run.model.module.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])
    run.loader.load_state_dict(saved["data"])
    run.epoch, run.step = saved["epoch"], saved["step"]


def save_parts(run: Run, folder: Path) -> None:
    """Save a distributed checkpoint; the file `latest` names it once it is complete."""
    model, optimizer = get_state_dict(run.model, run.optimizer)
    data = run.loader.state_dict() if run.read == "index" else texts_of(run.loader)  # that of all ranks, or of this one
    state = {"model": model, "optimizer": optimizer, "epoch": run.epoch, "step": run.step, **data}
    dcp.save(state, checkpoint_id=folder / f"step-{run.step}")
    if dist.get_rank() == 0:
        (folder / "latest").write_text(f"step-{run.step}")


def load_parts(run: Run, folder: Path) -> None:
    """Load a checkpoint, saved by any number of ranks."""
    path = folder / (folder / "latest").read_text()
    model, optimizer = get_state_dict(run.model, run.optimizer)
    data = run.loader.state_dict() if run.read == "index" else {}  # to be replaced
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0, "step": 0, **data}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    if run.read == "index":
        run.loader.load_state_dict({key: state[key] for key in data})
    else:
        load_texts(run.loader, path, run.pipe)
    run.epoch, run.step = state["epoch"], state["step"]


def texts_of(loader: Any) -> dict[str, str]:
    """Return the state of this rank, and its outline for ranks that need not read the state."""
    state, name = loader.state_dict(), f"{dist.get_rank()}-of-{dist.get_world_size()}"
    return {f"data.{name}": state["wds_datapipes"], f"outline.{name}": outline_state(state)["wds_datapipes"]}


def load_texts(loader: Any, path: Path, pipe: Any, workers: int = 1) -> dict[str, str]:
    """Load the states that this rank takes over, and the outlines of the others; return all texts that were read."""
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    outlines: dict[str, Any] = dict.fromkeys(key for key in saved if key.startswith("outline."))
    dcp.load(outlines, checkpoint_id=path)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    needed = ranks_to_read([*outlines.values()], pipe, rank=rank, ranks=ranks, workers=workers)
    states: dict[str, Any] = dict.fromkeys(f"data.{number}-of-{len(outlines)}" for number in needed)
    dcp.load(states, checkpoint_id=path)
    others = [text for key, text in outlines.items() if key.replace("outline", "data") not in states]
    loader.load_state_dict(merge_states([*states.values(), *others]))
    return {**outlines, **states}


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("urls")
    parser.add_argument("--read", choices=["index", "stream"], default="index")
    parser.add_argument("--dcp", action="store_true", help="save with torch.distributed.checkpoint")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="of the checkpoint and the log")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="of a global batch, a multiple of 16")
    parser.add_argument("--workers", type=int, default=1, help="of each rank")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--die-at", type=int, help="step at which the last rank kills itself, for a demonstration")
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)
    log, stopped = args.folder / "log.jsonl", args.folder / "stopped"
    signals: list[int] = []
    signal.signal(
        signal.SIGTERM, lambda number, _: signals.append(number)
    )  # before workers start, which then ignore it

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pipe = make_pipe(args.urls, args.batch_size, args.read)
    run = Run(args.read, pipe, make_loader(pipe, args.workers), model, optimizer)
    lines: list[str] = []
    if (args.folder / ("latest" if args.dcp else "checkpoint.pt")).exists():
        (load_parts if args.dcp else load_file)(run, args.folder)
        lines = log.read_text().splitlines()[: run.step] if rank == 0 else []
    if rank == 0:
        log.write_text("".join(f"{line}\n" for line in lines))
        stopped.unlink(missing_ok=True)

    for epoch in range(run.epoch, args.epochs):
        run.epoch = epoch
        started = time.perf_counter()
        for keys, images, labels, *padding in run.loader if args.read == "index" else in_step(run.loader):
            waited = time.perf_counter() - started
            if run.step == args.die_at and rank == ranks - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = train_step(run, images, labels, *padding or [torch.zeros(len(labels), dtype=torch.bool)])
            run.step += 1
            every, waits, asked = zip(*gather((keys, waited, bool(signals))), strict=True)  # the keys only for the log
            if rank == 0:
                facts = {"epoch": epoch, "ranks": ranks, "loss": loss, "waited": waits, "keys": [*chain(*every)]}
                with log.open("a") as file:
                    print(json.dumps(facts), file=file)
            if any(asked) or run.step % args.save_every == 0:
                (save_parts if args.dcp else save_file)(run, args.folder)
            if any(asked):  # on all ranks after the same step, whichever received the signal
                if rank == 0:
                    stopped.touch()
                    print(f"Stopped after {run.step} steps", flush=True)
                run.loader.shutdown()
                dist.destroy_process_group()
                return
            started = time.perf_counter()
    run.loader.shutdown()
    if rank == 0:
        print(f"Finished after {run.step} steps with a loss of {loss:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
