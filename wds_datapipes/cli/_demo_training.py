"""The pipeline, the network and the training loop of the demo, for you to copy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterDataPipe
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ImageDecoder, LoadingReport, ShardList, ShardReadingService
from wds_datapipes.cli._meter import ProgressMeter
from wds_datapipes.cli.demo import Dataset

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Epoch", "Training"]


@dataclass(frozen=True)
class Epoch:
    """One epoch: the mean loss, the two accuracies from 0 to 1, and training samples a second."""

    loss: float
    training_accuracy: float
    held_out_accuracy: float
    samples_per_s: float


class SampleReader:
    """Turns samples into an image of float32 (C, H, W) and the number of its class; workers get a copy of it."""

    def __init__(self, data: Dataset, size: int, is_gray: bool) -> None:
        self.data, self.size = data, size
        # Large JPEG files are decoded at a fraction of their size.
        self._decoder = ImageDecoder("torchl8" if is_gray else "torchrgb8", min_size=size)

    def read(self, shards: IterDataPipe[str], *, is_training: bool) -> IterDataPipe[tuple[Tensor, int]]:
        """Read shards to pairs, the training samples in a random order and each changed a little."""
        data = self.data
        samples: IterDataPipe[Any] = shards.load_wds_shards().group_samples()
        if data.held_out_keys:
            samples = samples.filter(self.is_training_sample if is_training else self.is_held_out_sample)
        if is_training:
            samples = samples.shuffle_samples(1000)  # before they are decoded, while they are small
        samples = samples.wds_decode(self._decoder, only=[*data.image_field.split(";"), data.label_field])
        pairs: IterDataPipe[tuple[Tensor, int]] = samples.to_tuple(data.image_field, data.label_field)
        pairs = pairs.map_tuple(self.resize, self.class_of)
        return pairs.map_tuple(augment) if is_training else pairs

    def is_training_sample(self, sample: dict[str, Any]) -> bool:
        """Whether a sample of a single shard is one to train on."""
        return sample["__key__"] not in self.data.held_out_keys

    def is_held_out_sample(self, sample: dict[str, Any]) -> bool:
        """Whether a sample of a single shard is held out."""
        return sample["__key__"] in self.data.held_out_keys

    def class_of(self, value: Any) -> int:
        """Return the number of the class of a label."""
        return self.data.labels.index(int(value))

    def resize(self, image: Tensor) -> Tensor:
        """Turn uint8 pixels, (H, W) or (C, H, W), into float32 (C, size, size) from 0 to 1."""
        pixels, size = image.reshape(1, -1, *image.shape[-2:]) / 255, (self.size, self.size)
        return (pixels if pixels.shape[-2:] == size else F.interpolate(pixels, size, mode="area"))[0]


def augment(image: Tensor) -> Tensor:
    """Turn an image by up to 10 degrees, shift it by up to 6 % of its size, and add a little noise."""
    angle = torch.empty(()).uniform_(-math.pi / 18, math.pi / 18)
    shift = torch.empty(2, 1).uniform_(-0.12, 0.12)  # the coordinates go from -1 to 1
    cos, sin = angle.cos(), angle.sin()
    movement = torch.cat([torch.stack([cos, -sin, sin, cos]).reshape(2, 2), shift], dim=1)
    grid = F.affine_grid(movement[None], [1, *image.shape], align_corners=False)
    moved = F.grid_sample(image[None], grid, padding_mode="reflection", align_corners=False)[0]
    return (moved + 0.03 * torch.randn_like(moved)).clamp(0, 1)


def build_network(channels: int, classes: int) -> nn.Sequential:
    """Return a small convolutional network for images of any size from 8 x 8 on."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((channels, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]
    layers.insert(6, nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(0.3), nn.Linear(2048, classes))


class Training:
    """A run: the loader with its worker processes, the network and the optimizer.

    Args:
        data: what to train on.
        size: the width and height of the network's input.
        is_gray: whether images have one channel, instead of three.
        epochs: how often every sample is seen.
        workers: how many processes read, decode and augment.
        seed: the same one gives the same run.
    """

    def __init__(self, data: Dataset, *, size: int, is_gray: bool, epochs: int, workers: int, seed: int) -> None:
        # Threads without a core of their own beside the workers wait for each other, which costs more than they give.
        torch.set_num_threads(max(1, torch.get_num_threads() - workers))
        torch.manual_seed(seed)
        self.data, self.reader = data, SampleReader(data, size, is_gray)
        self.network = build_network(1 if is_gray else 3, len(data.labels))
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=2e-3, weight_decay=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, epochs)
        shards = ShardList(data.training).shuffle().sharding_filter()
        batches = self.reader.read(shards, is_training=True).batch(64).collate()
        self.loader: DataLoader2[Any] = DataLoader2(batches, reading_service=ShardReadingService(workers))
        self.loader.seed(seed)

    def run_epoch(self, meter: ProgressMeter) -> Epoch:
        """Train on every sample once, and measure the accuracy on those that are held out."""
        started = perf_counter()
        self.network.train()
        losses, right, count = 0.0, 0, 0
        for images, classes in self.loader:
            scores = self.network(images)
            loss = F.cross_entropy(scores, classes)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
            self.optimizer.step()
            losses += loss.item() * len(classes)
            right += int((scores.argmax(1) == classes).sum())
            count += len(classes)
            meter.add(samples=len(classes))
        self.schedule.step()
        rate = count / (perf_counter() - started)
        correct = sum(label == found for _, label, found in self.predictions())
        return Epoch(losses / count, right / count, correct / self.data.counts[1], rate)

    def predictions(self) -> Iterator[tuple[Tensor, int, int]]:
        """Yield the held-out images in their order, with their classes and those that the network takes them for."""
        self.network.eval()
        pairs = self.reader.read(ShardList(self.data.held_out), is_training=False)
        for images, classes in pairs.batch(256).collate():
            with torch.inference_mode():
                yield from zip(images, classes.tolist(), self.network(images).argmax(1).tolist(), strict=True)

    def training_samples(self) -> Iterator[tuple[Tensor, int]]:
        """Yield training samples as the network sees them."""
        return iter(self.reader.read(ShardList(self.data.training), is_training=True))

    def report(self) -> LoadingReport:
        """Return what the workers have done."""
        report: LoadingReport = self.loader.reading_service.report()
        return report

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.loader.shutdown()
