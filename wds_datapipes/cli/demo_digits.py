"""The handwritten digits that scikit-learn brings along, written as shards."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from wds_datapipes.extras import require
from wds_datapipes.writing.tar_writer import TarWriter

__all__ = ["TEST_SHARDS", "TRAIN_SHARDS", "write_digits"]

TRAIN_SHARDS, TEST_SHARDS = 12, 3


def write_digits(folder: Path, *, seed: int) -> tuple[list[Path], list[Path]]:
    """Write 1,797 scans of handwritten digits, each as a PNG file and a class file, to tar archives.

    Args:
        folder: the folder to write to, which exists.
        seed: decides which fifth of the scans is held out.

    Returns:
        The shards to train from, and those that are held out.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    datasets = require("sklearn.datasets", extra="demo", purpose="write the digits")
    digits = datasets.load_digits()
    order = list(range(len(digits.target)))
    random.Random(seed).shuffle(order)
    split = len(order) * 4 // 5
    parts = {"train": (order[:split], TRAIN_SHARDS), "test": (order[split:], TEST_SHARDS)}
    written = []
    for name, (numbers, count) in parts.items():
        paths = [folder / f"{name}-{shard:03d}.tar" for shard in range(count)]
        for shard, path in enumerate(paths):
            write_shard(path, [(n, digits.images[n], digits.target[n]) for n in numbers[shard::count]])
        written.append(paths)
    return written[0], written[1]


def write_shard(path: Path, scans: Iterable[tuple[int, Any, int]]) -> None:
    """Write scans, each with its number, its pixels from 0 to 16 and its digit, as PNG files, white on black."""
    with TarWriter(path) as shard:
        for number, pixels, digit in scans:
            shard.write({"__key__": f"{number:04d}", "png": pixels / 16, "cls": digit})
