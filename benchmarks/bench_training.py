"""Does training on a CPU wait for data?

    python benchmarks/bench_training.py --workers 2 --json training.json --plot training.png

A ResNet-18 is trained on batches of 64 x 3 x 224 x 224 bytes from shards of photographs (the pipeline of
bench_end_to_end.py). Each step converts a batch to floats, and runs forward, backward and SGD. The limit is the same
step on one batch that is already there.

"idle" is the share of the time in which the loop waits for a batch. Training and workers compete for the same cores, so
it says little about a GPU: bench_gpu.py measures that. ``--width 64`` is ResNet-18; smaller ones train in less time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from functools import partial

import tar_loaders
import torch
from contest import options, parse, write_report
from datasets import PHOTOGRAPHS, folder
from plots import plot_bars
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tar_loaders import BATCH, Batch
from training import PASSES, Trainer, Training, opened, resnet18

LIMIT = "data on the device"
LOADERS: dict[str, Callable[..., Iterable[Batch]]] = {
    "ours": tar_loaders.ours,
    "ours, DataLoader": tar_loaders.dataloader,
    "webdataset": tar_loaders.webdataset,
}


def measure(trainer: Trainer, build: Callable[[], Iterable[Batch]] | None, duration_s: float) -> Training:
    """Train on the batches of a loader, or on one that is already on the device."""
    if build is None:
        images = torch.randint(0, 256, (BATCH, 3, 224, 224), dtype=torch.uint8)
        batch = images, torch.arange(BATCH)
        return trainer.train(iter(lambda: batch, None), duration_s=duration_s)
    with opened(build()) as batches:
        return trainer.train(batches, duration_s=duration_s)


def main() -> None:
    parser = options(__doc__, rounds=3)
    parser.add_argument("--workers", type=int, default=2, help="the number of worker processes (%(default)s)")
    parser.add_argument("--width", type=int, default=64, help="channels of the first layer (%(default)s: ResNet-18)")
    parser.add_argument("--seconds", type=float, default=20, help="the duration of a measurement (%(default)s)")
    arguments = parse(parser)
    if arguments.quick:
        arguments.rounds, arguments.width, arguments.seconds = 1, 2, 0
    torch.manual_seed(0)
    trainer = Trainer(torch.device("cpu"), resnet18(arguments.width))
    urls = PHOTOGRAPHS["IMG"].write(folder(arguments.data), arguments.scale, multiple=16) * PASSES
    builds = {name: partial(loader, urls, arguments.workers) for name, loader in LOADERS.items()}
    found: dict[str, list[Training]] = {name: [] for name in (LIMIT, *builds)}
    for _ in track(range(arguments.rounds), "training", transient=True):
        for name, runs in found.items():
            runs.append(measure(trainer, builds.get(name), arguments.seconds))
    title = f"ResNet-18 (width {arguments.width}) on the CPU, {arguments.workers} workers"
    show(title, found)
    facts = {"training": title, "limit": LIMIT, "runs": {n: [r._asdict() for r in runs] for n, runs in found.items()}}
    write_report(arguments.json, facts)
    rates = {name: statistics.median(run.samples_per_s for run in runs) for name, runs in found.items()}
    plot_bars(arguments.plot, rates, title, "samples/s")


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
