"""Does training on a GPU wait for data?

    python benchmarks/bench_gpu.py --device cuda --json benchmarks/results/gpu.json

A ResNet-50 and a ViT-S/16 are trained in bfloat16, compiled by ``torch.compile``, on batches of 256 random resized
crops of 224 x 224 pixels, from shards of JPEG files as large as ImageNet's: about 500 x 375 pixels, and 110 KB. Loaders
decode on the CPU to page-locked bytes, which the loop copies to the GPU without blocking, or decode on the GPU. The GPU
normalizes the pixels. The limit is the same step on one batch that is already on the GPU.

"busy" is the share of the time in which the GPU computes steps, by CUDA events around each. Decoding on the GPU counts
as time between steps. "cores" is the number of cores that all processes take. The time to pin a batch and to copy it is
measured apart.

Equal work is checked at the first measurement of each loader: the pixels of some samples are compared with Pillow's,
unless it draws its own boxes. Loaders that fail, or are not installed, are left out, and the output says so. With
``--json``, the results are written after each measurement.

With ``--quick``, it runs on a CPU as well.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from contest import options, parse, write_report
from crops import SIZE, random_resized_crop
from datasets import IMAGENET, folder
from gpu_loaders import LOADERS, GpuLoader
from peer_loaders import read_pairs
from PIL import Image
from rich.console import Console
from tar_loaders import Batch
from training import Trainer, Training, opened, resnet50, vit_small

MODELS = {"ResNet-50": resnet50, "ViT-S/16": vit_small}
LIMIT = "data on the device"
#: The packages that decode, besides Pillow.
DECODERS = ("simplejpeg", "torchvision", "nvidia-dali-cuda120", "nvidia-dali-cuda130")
#: The number of samples whose pixels are compared, and the largest difference that counts as the same work, in levels
#: of 255.
COMPARED, MAX_DIFFERENCE = 16, 6.0


class WorkError(Exception):
    """A loader does not do the same work as the others."""


def expected_pixels(urls: list[str]) -> dict[int, Any]:
    """Return the pixels of the first samples as Pillow decodes and resizes them, by their labels."""
    pairs = islice(read_pairs(urls), COMPARED)
    return {label: random_resized_crop(Image.open(io.BytesIO(jpeg))).numpy().astype(np.int16) for jpeg, label in pairs}


def difference(batch: Batch, expected: dict[int, Any], size: int) -> float:
    """Return the mean absolute difference of the samples of a batch to Pillow's pixels."""
    images, labels = (tensor.cpu() for tensor in batch)
    if images.shape != (size, 3, SIZE, SIZE) or images.dtype != torch.uint8:
        raise WorkError(f"a batch of {tuple(images.shape)} {images.dtype} and {len(labels)} labels")
    found = [
        float(np.abs(image.numpy().astype(np.int16) - expected[label]).mean())
        for image, label in zip(images, labels.tolist(), strict=True)
        if label in expected
    ]
    if not found:
        raise WorkError("the first batch has none of the first samples")
    return sum(found) / len(found)


def on_device(size: int, device: torch.device) -> Iterator[Batch]:
    images = torch.randint(0, 256, (size, 3, SIZE, SIZE), dtype=torch.uint8, device=device)
    batch = images, torch.arange(size, device=device)
    return iter(lambda: batch, None)


def measure_copies(size: int, device: torch.device) -> dict[str, float]:
    """Return the seconds that it takes to pin a batch, until a call that copies it to the GPU returns, and in all."""
    memory = torch.zeros(size, 3, SIZE, SIZE, dtype=torch.uint8)
    found = {"pin_s": statistics.median(_seconds(memory.pin_memory)[0] for _ in range(20))}
    for name, batch in (("pinned", memory.pin_memory()), ("pageable", memory)):
        times = [_seconds(partial(batch.to, device, non_blocking=True)) for _ in range(20)]
        found[f"{name}_returns_s"], found[f"{name}_s"] = map(statistics.median, zip(*times, strict=True))
    return found


def _seconds(function: Callable[[], object]) -> tuple[float, float]:
    """Return when a function returned, and when the GPU had ended."""
    begin = time.perf_counter()
    function()
    returned = time.perf_counter() - begin
    torch.cuda.synchronize()
    return returned, time.perf_counter() - begin


class Benchmark:
    """Measures all loaders, and keeps the results."""

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.urls = IMAGENET.write(folder(arguments.data), arguments.scale, multiple=16)
        self.expected = expected_pixels(self.urls)
        is_gpu = self.device.type == "cuda"
        models = {name: build(arguments.width) for name, build in MODELS.items()}
        self.trainers = {name: Trainer(self.device, model, is_compiled=is_gpu) for name, model in models.items()}
        self.facts: dict[str, Any] = {
            "device": torch.cuda.get_device_name(self.device) if is_gpu else "the CPU",
            "batch": arguments.batch,
            "versions": dict(_versions()),
            "copies": measure_copies(arguments.batch, self.device) if is_gpu else {},
            "limit": {name: [] for name in MODELS},
            "runs": {name: [] for name in MODELS},
            "levels_off": {},
            "left_out": {},
        }

    def run(self) -> None:
        """Compile the models, and measure the limits and all loaders in each round."""
        for trainer in self.trainers.values():
            trainer.train(on_device(self.arguments.batch, self.device), duration_s=0)
        for _ in range(self.arguments.rounds):
            self._run_round()

    def _run_round(self) -> None:
        """Measure the limits, and then each loader with each number of workers and each model."""
        for model, trainer in self.trainers.items():
            limit = self._train(trainer, on_device(self.arguments.batch, self.device))
            self.facts["limit"][model].append(limit._asdict())
            print(f"{model}, {LIMIT}: {_line(limit)}", flush=True)
        for name in self.arguments.loaders:
            for workers in self.arguments.workers or LOADERS[name].workers:
                for model in MODELS:
                    if name not in self.facts["left_out"]:
                        self._measure(name, LOADERS[name], workers, model)

    def _measure(self, name: str, loader: GpuLoader, workers: int, model: str) -> None:
        begin = time.perf_counter()
        size = self.arguments.batch
        try:
            with opened(loader.build(self.urls, workers, size, self.device)) as batches:
                first = next(batches)
                to_first = time.perf_counter() - begin
                if name not in self.facts["levels_off"]:
                    off = difference(first, self.expected, size)
                    if loader.has_same_boxes and off > MAX_DIFFERENCE:
                        raise WorkError(f"its pixels differ by {off:.1f} levels from Pillow's")
                    self.facts["levels_off"][name] = off if loader.has_same_boxes else None
                found = self._train(self.trainers[model], chain([first], batches), workers)
        except Exception as error:  # noqa: BLE001 - the other loaders are measured anyway
            self.facts["left_out"][name] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
            print(f"left out: {name}, {workers} workers: {error}", flush=True)
        else:
            facts = {"loader": name, "workers": workers, "s_to_first": to_first, **found._asdict()}
            self.facts["runs"][model].append(facts)
            print(f"{model}, {name}, {workers} workers: {_line(found)}, {to_first:.2f} s to first", flush=True)
        write_report(self.arguments.json, self.facts)

    def _train(self, trainer: Trainer, batches: Iterator[Batch], multiple: int = 1) -> Training:
        seconds = self.arguments.seconds
        return trainer.train(batches, duration_s=seconds, warm_up_s=seconds / 4, multiple=multiple)


def _versions() -> Iterator[tuple[str, str]]:
    for package in DECODERS:
        with suppress(PackageNotFoundError):
            yield package, version(package)


def _line(found: Training) -> str:
    return (
        f"{found.samples_per_s:,.0f} images/s, {1 - found.idle:.0%} busy, "
        f"{found.step_ms:,.1f} ms/step, {found.cores:.1f} cores"
    )


def main() -> None:
    parser = options(__doc__, rounds=1)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu (%(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="the number of samples in a batch (%(default)s)")
    parser.add_argument("--width", type=int, default=64, help="channels of the models (%(default)s: the usual ones)")
    parser.add_argument("--seconds", type=float, default=12, help="the duration of a measurement (%(default)s)")
    parser.add_argument("--loaders", nargs="+", default=list(LOADERS), choices=LOADERS, help="the loaders (all)")
    parser.add_argument("--workers", nargs="+", type=int, help="the numbers of workers (those of each loader)")
    arguments = parse(parser)
    if arguments.quick:
        arguments.seconds, arguments.workers = 0, arguments.workers or [2]
        if not torch.cuda.is_available():
            arguments.device, arguments.batch, arguments.width = "cpu", 4, 4
    torch.manual_seed(0)
    benchmark = Benchmark(arguments)
    benchmark.run()
    Console(width=110).print(benchmark.facts["left_out"] or "No loader was left out.")


if __name__ == "__main__":
    main()
