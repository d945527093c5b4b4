"""Training on a GPU with each loader, as bench_train.py measures it."""

from __future__ import annotations

import io
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from harness.crops import SIZE, Batch, random_resized_crop
from harness.datasets import IMAGENET
from harness.questions import write_results
from loaders.peers import read_pairs
from loaders.table import LOADERS, Loader
from PIL import Image

from measures.training import Trainer, Training, opened, resnet50, vit_small

__all__ = ["gpu"]

MODELS = {"ResNet-50": resnet50, "ViT-S/16": vit_small}
#: The duration of a measurement.
SECONDS = 12
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
        self.urls = IMAGENET.write(arguments.data, arguments.scale, multiple=16)
        self.expected = expected_pixels(self.urls)
        is_gpu = self.device.type == "cuda"
        models = {name: build(arguments.width) for name, build in MODELS.items()}
        self.trainers = {name: Trainer(self.device, model, is_compiled=is_gpu) for name, model in models.items()}
        self.facts: dict[str, Any] = {
            "device": torch.cuda.get_device_name(self.device) if is_gpu else "CPU",
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
        for name, loader in LOADERS.items():
            if loader.on_gpu is None or self.arguments.loaders not in name:
                continue
            for workers in self.arguments.workers or loader.gpu_workers:
                for model in MODELS:
                    if name not in self.facts["left_out"]:
                        self._measure(name, loader, workers, model)

    def _measure(self, name: str, loader: Loader, workers: int, model: str) -> None:
        begin = time.perf_counter()
        size = self.arguments.batch
        assert loader.on_gpu is not None
        try:
            with opened(loader.on_gpu(self.urls, workers, size, self.device)) as batches:
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
        write_results(self.arguments.results, "gpu", self.facts)

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


def gpu(arguments: Namespace) -> dict[str, Any]:
    """Measure all loaders, on a CPU if a quick run finds no GPU."""
    if arguments.quick:
        arguments.seconds, arguments.workers = 0, arguments.workers or [2]
        if not torch.cuda.is_available():
            arguments.device, arguments.batch, arguments.width = "cpu", 4, 4
    if arguments.seconds is None:
        arguments.seconds = SECONDS
    torch.manual_seed(0)
    benchmark = Benchmark(arguments)
    benchmark.run()
    return benchmark.facts
