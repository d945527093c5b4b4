"""The items that loaders deliver in bench_transport.py, made at almost no cost."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterDataPipe

__all__ = ["BURST", "FAST", "KINDS", "Kind", "Source"]

KEY = "09d"
#: The number of samples in a burst.
BURST = 40


class Kind(NamedTuple):
    """A kind of items.

    Attributes:
        items: yields items forever.
        samples: the number of samples in an item.
        tensor: returns the tensor of an item that the loop reads, if there is one.
    """

    items: Callable[[], Iterator[Any]]
    samples: int = 1
    tensor: Callable[[Any], torch.Tensor] | None = None


def small() -> Iterator[Any]:
    text = os.urandom(200)
    for number in itertools.count():
        yield {"__key__": format(number, KEY), "txt": text, "cls": number % 1000}


def img() -> Iterator[Any]:
    images = [os.urandom(100_000) for _ in range(64)]  # as many as in a list, because a pickle stores each object once
    for number in itertools.count():
        yield {"__key__": format(number, KEY), "jpg": images[number % 64], "cls": number % 1000}


def lists() -> Iterator[Any]:
    samples = img()
    while True:
        yield list(itertools.islice(samples, 64))


def array() -> Iterator[Any]:
    image = torch.randint(0, 256, (3, 182, 183), dtype=torch.uint8)
    for number in itertools.count():
        yield {"__key__": format(number, KEY), "image": image.clone(), "cls": number % 1000}


def batches() -> Iterator[Any]:
    images = torch.randint(0, 256, (64, 3, 224, 224), dtype=torch.uint8)
    labels = torch.arange(64)
    while True:
        yield images.clone(), labels.clone()


def bursts() -> Iterator[Any]:
    """Yield forty samples at once, every quarter of a second; a sample is the time at which it was produced."""
    while True:
        for _ in range(BURST):
            yield time.monotonic()
        time.sleep(0.25)


def rare() -> Iterator[Any]:
    while True:
        time.sleep(0.5)
        yield 1


KINDS = {
    "SMALL": Kind(small),
    "IMG": Kind(img),
    "LISTS": Kind(lists, 64),
    "ARRAY": Kind(array, 1, lambda sample: sample["image"]),
    "BATCHES": Kind(batches, 64, lambda batch: batch[0]),
    "bursts": Kind(bursts),
    "rare": Kind(rare),
}
#: The kinds that are delivered at full speed.
FAST = ("SMALL", "IMG", "LISTS", "ARRAY", "BATCHES")


class Source(IterDataPipe[Any]):
    """Yields items of one kind in every worker; also works as an ``IterableDataset``."""

    _is_child_datapipe = False

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        yield from KINDS[self.kind].items()
