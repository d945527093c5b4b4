"""Does training wait for data, on a CPU or on a GPU?

    python benchmarks/bench_training.py --device cuda --workers 8 --json training.json --plot training.png

A ResNet-18 is trained on batches of 64 x 3 x 224 x 224 bytes from shards of photographs (the pipeline of
bench_end_to_end.py). Each step copies a batch to the device, converts it there to floats (on a GPU in bfloat16), and
runs forward, backward and SGD. The limit is the same step on one batch that is already on the device.

"idle" is the share of the time in which the device has no step to compute: on a GPU by CUDA events around each step,
on a CPU by the time that the loop waits for a batch. "pinned" loaders deliver page-locked tensors, which are copied
without blocking; without a GPU, they are omitted. ``--width 64`` is ResNet-18; smaller ones train in less time.

On a CPU, training and workers compete for the same cores, so idle shares there say little about a GPU.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import tar_loaders
import torch
from contest import options, parse, write_report
from datasets import PHOTOGRAPHS, folder
from peer_loaders import read_pairs
from plots import plot_bars
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tar_loaders import BATCH, Batch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 1000
#: The number of steps before anything is measured.
WARM_UP = 3
LIMIT = "data on the device"
LOADERS: dict[str, Callable[..., Iterable[Batch]]] = {
    "ours": tar_loaders.ours,
    "ours, DataLoader": tar_loaders.dataloader,
    "webdataset": tar_loaders.webdataset,
}


class Training(NamedTuple):
    """The results of one measurement."""

    samples_per_s: float
    step_ms: float
    """The mean time in which the device computes a step, in milliseconds."""
    idle: float
    """The share of the time in which the device has no step to compute."""


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both paths."""
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet18(width: int) -> nn.Sequential:
    """Return a ResNet-18 whose first layer has this many channels; 64 is the usual one."""
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage in range(4):
        outputs = width << stage
        layers += [Block(inputs, outputs, 1 if stage == 0 else 2), Block(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


class Trainer:
    """Trains a model on batches of bytes, and measures how long the device computes."""

    def __init__(self, device: torch.device, width: int) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"
        # Tensor cores prefer channels last.
        self.layout = torch.channels_last if self.is_gpu else torch.contiguous_format
        model = resnet18(width).to(device)
        self.model = model.to(memory_format=self.layout)  # type: ignore[call-overload]  # torch's types lack it
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Run forward, backward and the optimizer on a batch on the device."""
        pixels = images.to(memory_format=self.layout).float().div_(255)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_gpu):
            loss = functional.cross_entropy(self.model(pixels), labels % CLASSES)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def train(self, batches: Iterator[Batch], steps: int) -> Training:
        """Train after a warm-up; the batches must be enough for both."""
        for _ in range(WARM_UP):
            self._run(*next(batches))
        self._finish()
        spans = []
        samples = 0
        begin = time.perf_counter()
        for _ in range(steps):
            images, labels = next(batches)
            samples += len(labels)
            spans.append(self._run(images, labels))
        self._finish()
        elapsed = time.perf_counter() - begin
        busy = sum(span() for span in spans)
        return Training(samples / elapsed, 1e3 * busy / steps, max(0.0, 1 - busy / elapsed))

    def _run(self, images: Tensor, labels: Tensor) -> Callable[[], float]:
        """Copy a batch and run a step; return a function for the seconds that it took, which needs `_finish`."""
        images = images.to(self.device, non_blocking=True)
        labels = labels.to(self.device, non_blocking=True)
        if not self.is_gpu:
            begin = time.perf_counter()
            self.step(images, labels)
            elapsed = time.perf_counter() - begin
            return lambda: elapsed
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        self.step(images, labels)
        end.record()
        return lambda: start.elapsed_time(end) / 1e3

    def _finish(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)


@contextlib.contextmanager
def opened(loader: Iterable[Batch]) -> Iterator[Iterator[Batch]]:
    """Yield the batches of a loader, and stop its workers at the end."""
    batches = iter(loader)
    try:
        yield batches
    finally:
        del batches  # the iterator of a DataLoader ends its workers
        if callable(shutdown := getattr(loader, "shutdown", None)):
            shutdown()


def measure(trainer: Trainer, build: Callable[[], Iterable[Batch]] | None, steps: int) -> Training:
    """Train on the batches of a loader, or on one that is already on the device."""
    if build is None:
        images = torch.randint(0, 256, (BATCH, 3, 224, 224), dtype=torch.uint8, device=trainer.device)
        batch = images, torch.arange(BATCH, device=trainer.device)
        return trainer.train(iter(lambda: batch, None), steps)
    with opened(build()) as batches:
        return trainer.train(batches, steps)


def main() -> None:
    parser = options(__doc__, rounds=3)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1 (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="the number of worker processes (%(default)s)")
    parser.add_argument("--width", type=int, default=64, help="channels of the first layer (%(default)s: ResNet-18)")
    parser.add_argument("--steps", type=int, default=50, help="the number of measured steps (%(default)s)")
    arguments = parse(parser)
    if arguments.quick:
        arguments.rounds, arguments.width, arguments.steps = 1, 2, 2
    torch.manual_seed(0)
    trainer = Trainer(torch.device(arguments.device), arguments.width)
    urls = PHOTOGRAPHS["IMG"].write(folder(arguments.data), arguments.scale, multiple=16)
    samples = sum(1 for _ in read_pairs(urls))
    repeats = -(-(arguments.steps + WARM_UP + arguments.workers) * BATCH // samples)
    builds: dict[str, Callable[[], Iterable[Batch]] | None] = {LIMIT: None}
    for name, loader in LOADERS.items():
        builds[name] = partial(loader, urls * repeats, arguments.workers)
        if trainer.is_gpu:
            builds[f"{name}, pinned"] = partial(loader, urls * repeats, arguments.workers, pin_memory=True)
    found: dict[str, list[Training]] = {name: [] for name in builds}
    for _ in track(range(arguments.rounds), "training", transient=True):
        for name, build in builds.items():
            found[name].append(measure(trainer, build, arguments.steps))
    title = f"ResNet-18 (width {arguments.width}) on {_device_name(trainer.device)}, {arguments.workers} workers"
    show(title, found)
    facts = {"training": title, "limit": LIMIT, "runs": {n: [r._asdict() for r in runs] for n, runs in found.items()}}
    write_report(arguments.json, facts)
    rates = {name: statistics.median(run.samples_per_s for run in runs) for name, runs in found.items()}
    plot_bars(arguments.plot, rates, title, "samples/s")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def show(title: str, found: dict[str, list[Training]]) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("loader", no_wrap=True)
    for heading in ("samples/s", "of the limit", "ms/step", "idle"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, runs in found.items():
        middle = Training(*map(statistics.median, zip(*runs, strict=True)))
        pairs = zip(runs, found[LIMIT], strict=True)
        share = statistics.median(ours.samples_per_s / limit.samples_per_s for ours, limit in pairs)
        table.add_row(
            name, f"{middle.samples_per_s:,.0f}", f"{share:.0%}", f"{middle.step_ms:,.1f}", f"{middle.idle:.0%}"
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
