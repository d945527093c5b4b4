"""Models, and a training loop that measures how long the device has no step to compute."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from harness.crops import Batch
from harness.processes import cpu_seconds
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Trainer", "Training", "opened", "resnet18", "resnet50", "vit_small"]

CLASSES = 1000
#: The least number of steps before anything is measured.
WARM_UP = 3
#: The mean and the standard deviation of each channel of ImageNet, in levels of 255.
MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


class Training(NamedTuple):
    """The results of one measurement."""

    samples_per_s: float
    step_ms: float
    """The mean time in which the device computes a step, in milliseconds."""
    idle: float
    """The share of the time in which the device has no step to compute."""
    cores: float
    """The number of cores that all processes of the program take on average."""


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)]


class Block(nn.Module):
    """A residual block of two convolutions, or a bottleneck block of three."""

    def __init__(self, inputs: int, width: int, stride: int, *, is_bottleneck: bool) -> None:
        super().__init__()
        outputs = width * 4 if is_bottleneck else width
        if is_bottleneck:
            first = [*convolution(inputs, width, 1), nn.ReLU(inplace=True), *convolution(width, width, 3, stride)]
            last = convolution(width, outputs, 1)
        else:
            first, last = convolution(inputs, width, 3, stride), convolution(width, outputs, 3)
        self.body = nn.Sequential(*first, nn.ReLU(inplace=True), *last)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both paths."""
        return functional.relu(self.body(x) + self.shortcut(x))


def _resnet(width: int, depths: Iterable[int], *, is_bottleneck: bool) -> nn.Sequential:
    layers: list[nn.Module] = [*convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, depth in enumerate(depths):
        for number in range(depth):
            stride = 2 if stage and not number else 1
            layers.append(Block(inputs, width << stage, stride, is_bottleneck=is_bottleneck))
            inputs = (width << stage) * (4 if is_bottleneck else 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def resnet18(width: int = 64) -> nn.Module:
    """Return a ResNet-18 whose first layer has this many channels; 64 is the usual one."""
    return _resnet(width, (2, 2, 2, 2), is_bottleneck=False)


def resnet50(width: int = 64) -> nn.Module:
    """Return a ResNet-50; the usual one has 25.6 million parameters."""
    return _resnet(width, (3, 4, 6, 3), is_bottleneck=True)


class VisionTransformer(nn.Module):
    """A vision transformer of 224 x 224 pixels in patches of 16 x 16."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 14 * 14 + 1, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits of each image."""
        patches = self.patches(pixels).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(patches), -1, -1), patches], 1) + self.positions
        logits: Tensor = self.head(self.encoder(tokens)[:, 0])
        return logits


def vit_small(width: int = 64) -> nn.Module:
    """Return a ViT-S/16 whose heads have this many channels; the usual one has 22 million parameters."""
    return VisionTransformer(6 * width, 6, 12)


class Trainer:
    """Trains a model on batches of bytes, and measures how long the device computes.

    On a GPU, it computes in bfloat16, and ``is_compiled`` passes the model through ``torch.compile``.
    """

    def __init__(self, device: torch.device, model: nn.Module, *, is_compiled: bool = False) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"
        # Tensor cores prefer channels last.
        self.layout = torch.channels_last if self.is_gpu else torch.contiguous_format
        self.model = model.to(device).to(memory_format=self.layout)  # type: ignore[call-overload]  # torch's types lack it
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.mean, self.deviation = (
            torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEAN, DEVIATION)
        )
        self.loss: Callable[[Tensor, Tensor], Tensor] = torch.compile(self._loss) if is_compiled else self._loss

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        pixels = (images.to(memory_format=self.layout).float() - self.mean) / self.deviation
        return functional.cross_entropy(self.model(pixels), labels % CLASSES)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Run forward, backward and the optimizer on a batch on the device."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_gpu):
            loss = self.loss(images, labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def train(
        self, batches: Iterator[Batch], *, duration_s: float, warm_up_s: float = 0, multiple: int = 1
    ) -> Training:
        """Train for some time after a warm-up; there must be enough batches.

        The number of steps is a multiple of a number, such as that of the workers, whose batches arrive together.
        """
        self._train(batches, warm_up_s, WARM_UP, multiple)
        cpu = cpu_seconds()
        begin = time.perf_counter()
        samples, spans = self._train(batches, duration_s, 1, multiple)
        elapsed = time.perf_counter() - begin
        busy = sum(span() for span in spans)
        cores = (cpu_seconds() - cpu) / elapsed
        return Training(samples / elapsed, 1e3 * busy / len(spans), max(0.0, 1 - busy / elapsed), cores)

    def _train(
        self, batches: Iterator[Batch], duration_s: float, steps: int, multiple: int
    ) -> tuple[int, list[Callable[[], float]]]:
        """Train for some time, and at least for some steps; return the number of samples, and the time of each step."""
        samples = 0
        spans: list[Callable[[], float]] = []
        begin = time.perf_counter()
        while len(spans) < steps or len(spans) % multiple or time.perf_counter() - begin < duration_s:
            images, labels = next(batches)
            samples += len(labels)
            spans.append(self._run(images, labels))
        if self.is_gpu:
            torch.cuda.synchronize(self.device)
        return samples, spans

    def _run(self, images: Tensor, labels: Tensor) -> Callable[[], float]:
        """Copy a batch and run a step; return a function for the seconds that it took, once the device has ended."""
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
