"""A small image classifier, trained from tar shards: the pipeline, the network and the loop, for you to copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterDataPipe
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ImageDecoder, LoadingReport, ShardList, ShardReadingService
from wds_datapipes.cli.demo_survey import Dataset, Part

__all__ = ["Epoch", "ImageFormat", "Network", "augment", "held_out_pipe", "predict", "train", "training_pipe"]

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ImageFormat:
    """What the network sees: square images of one size, gray or in colour."""

    size: int
    channels: int

    def decoder(self) -> ImageDecoder:
        """Return what decodes images of any size, and large JPEG files at a fraction of it."""
        return ImageDecoder("torchl8" if self.channels == 1 else "torchrgb8", min_size=self.size)


# The pipeline ------------------------------------------------------------------------------------------------------


def training_pipe(data: Dataset, images: ImageFormat, *, batch_size: int = 64) -> IterDataPipe[Batch]:
    """Read the training samples in a new random order each epoch, each image changed a little.

    Shards are shuffled and dealt to the workers before anything is read, and samples are shuffled before they are
    decoded, while they are small.
    """
    shards = ShardList(data.training.shards).shuffle().sharding_filter()
    samples = read(shards, data.training).shuffle_samples(1000)
    batches: IterDataPipe[Batch] = decode(samples, data, images).map_tuple(augment).batch(batch_size).collate()
    return batches


def held_out_pipe(data: Dataset, images: ImageFormat, *, batch_size: int = 256) -> IterDataPipe[Batch]:
    """Read the held-out samples in their order, as they are."""
    samples = read(ShardList(data.held_out.shards), data.held_out)
    batches: IterDataPipe[Batch] = decode(samples, data, images).batch(batch_size).collate()
    return batches


def read(shards: IterDataPipe[str], part: Part) -> IterDataPipe[dict[str, Any]]:
    """Read shards to samples whose fields are bytes."""
    samples: IterDataPipe[dict[str, Any]] = shards.load_wds_shards().group_samples().filter(part.holds)
    return samples


def decode(samples: IterDataPipe[dict[str, Any]], data: Dataset, images: ImageFormat) -> IterDataPipe[Batch]:
    """Turn samples into an image of float32 (C, H, W) and the number of its class."""
    fields = [*data.image_field.split(";"), data.label_field]
    decoded = samples.wds_decode(images.decoder(), only=fields).to_tuple(data.image_field, data.label_field)
    pairs: IterDataPipe[Batch] = decoded.map_tuple(partial(fit, size=images.size), data.class_of)
    return pairs


def fit(image: Tensor, *, size: int) -> Tensor:
    """Bring uint8 pixels, (H, W) or (C, H, W), to float32 (C, size, size) from 0 to 1."""
    pixels = image.reshape(1, -1, *image.shape[-2:]) / 255
    if pixels.shape[-2:] != (size, size):
        pixels = F.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
    return pixels[0]


def augment(image: Tensor) -> Tensor:
    """Turn an image by up to 10 degrees, shift it by up to 6 % of its size, and add a little noise."""
    angle = torch.empty(()).uniform_(-math.pi / 18, math.pi / 18)
    shift = torch.empty(2, 1).uniform_(-0.12, 0.12)  # the coordinates go from -1 to 1
    cos, sin = angle.cos(), angle.sin()
    movement = torch.cat([torch.stack([cos, -sin, sin, cos]).reshape(2, 2), shift], dim=1)
    grid = F.affine_grid(movement[None], [1, *image.shape], align_corners=False)
    moved = F.grid_sample(image[None], grid, padding_mode="reflection", align_corners=False)[0]
    return (moved + 0.03 * torch.randn_like(moved)).clamp(0, 1)


# The network -------------------------------------------------------------------------------------------------------


class Network(nn.Sequential):
    """A small convolutional network for images of any size from 8 x 8 on."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__(
            *convolution(channels, 32),
            *convolution(32, 64),
            nn.MaxPool2d(2),
            *convolution(64, 128),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(128 * 4 * 4, classes),
        )


def convolution(inputs: int, outputs: int) -> list[nn.Module]:
    """Return the layers of one step of the network."""
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]


# The loop ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Epoch:
    """How one epoch went: the mean loss, the two accuracies from 0 to 1, and training samples a second."""

    number: int
    loss: float
    training_accuracy: float
    held_out_accuracy: float
    samples_per_s: float


def train(
    data: Dataset,
    images: ImageFormat,
    *,
    epochs: int,
    workers: int,
    seed: int,
    watch: Callable[[Iterable[Batch], int], Iterable[Batch]],
    report: Callable[[Epoch], None],
) -> tuple[Network, LoadingReport]:
    """Train a network, and return it with what its workers have done.

    Args:
        data: what to train on.
        images: what the network sees of it.
        epochs: how often every sample is seen.
        workers: how many processes read, decode and augment.
        seed: the same one gives the same run.
        watch: passes on the batches of an epoch, which has the number given, and may show how far it is.
        report: is told of each epoch when it is over.
    """
    torch.manual_seed(seed)
    network = Network(images.channels, len(data.labels))
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    with DataLoader2(training_pipe(data, images), reading_service=ShardReadingService(workers)) as loader:
        loader.seed(seed)
        for number in range(1, epochs + 1):
            started = perf_counter()
            network.train()
            losses, right, count = 0.0, 0, 0
            for pictures, classes in watch(loader, number):
                scores = network(pictures)
                loss = F.cross_entropy(scores, classes)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
                optimizer.step()
                losses += loss.item() * len(classes)
                right += int((scores.argmax(1) == classes).sum())
                count += len(classes)
            schedule.step()
            rate = count / (perf_counter() - started)
            report(Epoch(number, losses / count, right / count, accuracy(network, data, images), rate))
    return network, loader.reading_service.report()


def predict(network: Network, data: Dataset, images: ImageFormat) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the held-out images in batches, with their classes and those that the network takes them for."""
    network.eval()
    for pictures, classes in held_out_pipe(data, images):
        with torch.inference_mode():
            yield pictures, classes, network(pictures).argmax(1)


def accuracy(network: Network, data: Dataset, images: ImageFormat) -> float:
    """Return the part of the held-out samples that the network gets right."""
    right = sum(int((found == classes).sum()) for _, classes, found in predict(network, data, images))
    return right / data.held_out.count
