"""Train on ImageNet, with the options of PyTorch's example: from files, a stream of shards, or indexed shards.

Run ``torchrun --standalone --nproc-per-node 8 main.py --loader indexed -a resnet50 -b 2048 --lr 0.8 SHARDS``, and after
a crash the same with ``--resume auto``. Without torchrun, it trains on one device.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from batches import Batch, Loader, Settings
from file_loader import DummyImages, FileLoader, ImageFiles
from mixing import mix_batch
from models import build_model
from shard_loader import ShardLoader, StreamLoader, index_samples, stream_samples
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

#: The mean and the standard deviation of the colors in ImageNet.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def make_parser() -> argparse.ArgumentParser:
    """Return the options; most have the names and defaults of PyTorch's example."""
    parser = argparse.ArgumentParser(description="Train on ImageNet", formatter_class=argparse.MetavarTypeHelpFormatter)
    add = parser.add_argument
    add(
        "data",
        type=str,
        metavar="DATA",
        nargs="?",
        default="imagenet",
        help="folder of the images, or folder or URL of the shards",
    )
    add("--loader", type=str, default="shards", choices=["files", "shards", "indexed"], help="default: shards")
    add("-a", "--arch", type=str, default="tiny", help="tiny, or a model of torchvision such as resnet50")
    add("-j", "--workers", type=int, default=4, help="loading processes of each rank")
    add("--epochs", type=int, default=90)
    add("--start-epoch", type=int, default=0, help="number of the first epoch, without --resume")
    add("-b", "--batch-size", type=int, default=256, help="samples in a batch, over all ranks")
    add("--lr", "--learning-rate", type=float, default=0.1, help="divided by 10 every 30 epochs")
    add("--momentum", type=float, default=0.9)
    add("--wd", "--weight-decay", type=float, default=1e-4, dest="weight_decay")
    add("-p", "--print-freq", type=int, default=10, help="steps between two lines")
    add("--resume", type=str, help='a checkpoint; "auto" is the latest one in --output, if there is any')
    add("-e", "--evaluate", action="store_true", help="only validate")
    add("--pretrained", action="store_true", help="start with the weights of torchvision")
    add("--dist-backend", type=str, choices=["nccl", "gloo"], help="default: nccl with GPUs, gloo without")
    add("--seed", type=int, help="of the weights and the order; random by default")
    add("--gpu", type=int, help="number of the GPU, without torchrun")
    add("--no-accel", action="store_true", help="train on the CPU")
    add("--dummy", action="store_true", help="noise in place of images, to measure the rest")
    add("--output", type=Path, default=Path(), help="folder of the checkpoints")
    add("--save-every", type=int, default=1000, help="steps between two checkpoints within an epoch")
    add("--mixup", type=float, default=0.0, help="alpha of Mixup, such as 0.2; 0 is off")
    add("--cutmix", type=float, default=0.0, help="alpha of CutMix, such as 1.0; 0 is off")
    add("--size", type=int, default=224, help="height and width of the images")
    add("--num-classes", type=int, default=1000)
    return parser


def start_ranks(args: argparse.Namespace) -> torch.device:
    """Join the process group of torchrun, or make one of this process alone; return the device of this rank."""
    on_gpu = torch.cuda.is_available() and not args.no_accel
    backend = args.dist_backend or ("nccl" if on_gpu else "gloo")
    number = args.gpu or 0
    if "LOCAL_RANK" in os.environ:
        if args.gpu is not None:
            raise SystemExit("torchrun gives each rank its own GPU. Leave --gpu out")
        number = int(os.environ["LOCAL_RANK"])
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if args.batch_size % dist.get_world_size():
        raise SystemExit(
            f"{dist.get_world_size()} ranks cannot share batches of {args.batch_size}: change --batch-size"
        )
    device = torch.device("cuda", number) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    return device


def load_checkpoint(args: argparse.Namespace) -> dict[str, Any]:
    """Load the checkpoint to resume from; an empty one if there is none."""
    if args.resume is None:
        return {}
    path = args.output / "checkpoint.pt" if args.resume == "auto" else Path(args.resume)
    if args.resume == "auto" and not path.exists():
        return {}
    saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    for name in ("arch",) if args.evaluate else ("arch", "loader"):
        if saved["options"][name] != getattr(args, name):
            raise SystemExit(f"{path} was saved with --{name} {saved['options'][name]}, not {getattr(args, name)}")
    say(f"Resuming from {path}: epoch {saved['epoch']}, step {saved['step']}")
    return saved


def make_loader(args: argparse.Namespace, settings: Settings, split: str) -> Loader:
    """Return the loader of a split for this rank."""
    if args.dummy:
        length = 1_281_167 if split == "train" else 50_000
        return FileLoader(DummyImages(length, args.size, args.num_classes), settings, shuffle=split == "train")
    if args.loader == "files":
        images = ImageFiles(settings.data, split, settings.decoder(split))
        return FileLoader(images, settings, shuffle=split == "train")
    if args.loader == "indexed":
        return ShardLoader(index_samples(settings, split), settings, split)
    loader = StreamLoader if split == "train" else ShardLoader
    return loader(stream_samples(settings, split), settings, split)


def say(line: str) -> None:
    """Print a line on one rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)


class Run:
    """A training run: what it consists of, and its position."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = start_ranks(args)
        saved = load_checkpoint(args)
        seeds = [args.seed if args.seed is not None else Random().getrandbits(31)]
        dist.broadcast_object_list(seeds, device=self.device)
        self.seed: int = saved.get("seed", seeds[0])
        torch.manual_seed(self.seed)
        model = build_model(args.arch, args.num_classes, pretrained=args.pretrained).to(self.device)
        self.optimizer = torch.optim.SGD(
            model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
        )
        settings = Settings(args.data, args.batch_size, args.workers, args.size, self.seed)
        splits = ["val"] if args.evaluate else ["val", "train"]
        self.loaders = {split: make_loader(args, settings, split) for split in splits}
        self.epoch, self.step, self.best = args.start_epoch, 0, 0.0
        if saved:
            model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.epoch, self.step, self.best = saved["epoch"], saved["step"], saved["best"]
            if not args.evaluate:
                self.loaders["train"].load_state_dict(saved["data"])
        self.model = DistributedDataParallel(model, device_ids=[self.device] if self.device.type == "cuda" else None)

    def to_device(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return normalized images, labels, and the weights of the samples: 0 for padding."""
        mean, std = (torch.tensor(color, device=self.device).reshape(3, 1, 1) for color in (MEAN, STD))
        images = batch.images.to(self.device, non_blocking=True).float().div_(255)
        weights = (~batch.is_padding).float().to(self.device, non_blocking=True)
        return (images - mean) / std, batch.labels.to(self.device, non_blocking=True), weights

    def train_epoch(self) -> None:
        """Train for an epoch, or for the rest of one."""
        args, ranks = self.args, dist.get_world_size()
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = args.lr * 0.1 ** (self.epoch // 30)
        self.loaders["train"].set_epoch(self.epoch)
        started = time.perf_counter()
        for batch in self.loaders["train"]:
            waited = time.perf_counter() - started
            images, labels, weights = self.to_device(batch)
            rng = Random(f"{self.seed} {self.step} {dist.get_rank()}")
            mixed, targets = mix_batch(images, labels, args.num_classes, rng, mixup=args.mixup, cutmix=args.cutmix)
            output = self.model(mixed)
            loss = (cross_entropy(output, targets, reduction="none") * weights).sum()
            sums = torch.stack([loss.detach(), *count_correct(output, labels, weights), weights.sum()])
            dist.all_reduce(sums)
            self.optimizer.zero_grad()
            (loss * ranks / sums[-1]).backward()  # DistributedDataParallel averages over the ranks
            self.optimizer.step()
            self.step += 1
            if self.step % args.print_freq == 0:
                seconds = time.perf_counter() - started
                say(f"Epoch {self.epoch} step {self.step}: {seconds:.3f} s, data {waited:.3f} s, {describe(sums)}")
            if self.step % args.save_every == 0:
                self.save()
            started = time.perf_counter()
        self.epoch += 1

    @torch.no_grad()
    def validate(self) -> float:
        """Validate each image once, on whichever rank reads it; return the accuracy in percent."""
        self.model.eval()
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)  # each rank has its own statistics of batches, and those of rank 0 are saved
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        for batch in self.loaders["val"]:
            images, labels, weights = self.to_device(batch)
            output = self.model.module(images)  # without the wrapper, which would wait for the other ranks
            loss = cross_entropy(output, labels, reduction="none").sum()
            sums += torch.stack([loss, *count_correct(output, labels, weights), weights.sum()])
        dist.all_reduce(sums)
        say(f"Validation: {describe(sums)} on {int(sums[3])} images")
        return float(100 * sums[1] / sums[3])

    def save(self, *, is_best: bool = False) -> None:
        """Save a checkpoint atomically; all ranks call this after the same step."""
        state = {
            "data": self.loaders["train"].state_dict(),
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "options": {"arch": self.args.arch, "loader": self.args.loader},
            "epoch": self.epoch,
            "step": self.step,
            "best": self.best,
            "seed": self.seed,
        }
        if dist.get_rank() == 0:
            self.args.output.mkdir(parents=True, exist_ok=True)
            path = self.args.output / "checkpoint.pt"
            torch.save(state, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
            if is_best:
                shutil.copyfile(path, path.with_name("best.pt"))

    def finish(self) -> None:
        """End the workers, and leave the process group."""
        for loader in self.loaders.values():
            loader.shutdown()
        dist.destroy_process_group()


def count_correct(output: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """Return how many images have their class in the first place, and in the first five."""
    top = output.topk(min(5, output.shape[1])).indices == labels[:, None]
    return [(top[:, :places].any(1) * weights).sum() for places in (1, 5)]


def describe(sums: torch.Tensor) -> str:
    """Return the mean loss and the accuracies."""
    loss, first, fifth, count = sums.tolist()
    count = count or math.nan
    return f"loss {loss / count:.6f}, Acc@1 {100 * first / count:.2f}, Acc@5 {100 * fifth / count:.2f}"


def main() -> None:
    """Run one rank."""
    args = make_parser().parse_args()
    run = Run(args)
    if args.evaluate:
        run.validate()
    while not args.evaluate and run.epoch < args.epochs:
        run.train_epoch()
        accuracy = run.validate()
        is_best, run.best = accuracy > run.best, max(accuracy, run.best)
        run.save(is_best=is_best)
    run.finish()


if __name__ == "__main__":
    main()
