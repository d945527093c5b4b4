"""The random resized crops of all loaders, with the same boxes, drawn from the size of the image.

Training draws a new box each time. Here the size of the image is the seed, so that loaders that know nothing of each
other cut the same box, and their pixels can be compared.
"""

from __future__ import annotations

import math
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

__all__ = [
    "AREA",
    "ATTEMPTS",
    "BATCH",
    "PASSES",
    "RATIO",
    "SIZE",
    "Batch",
    "Cut",
    "crop_pair",
    "draw_cut",
    "random_resized_crop",
]

#: The number of samples in a batch.
BATCH = 64
#: How often training reads a list of shards: more often than it takes.
PASSES = 100
#: 64 x 3 x 224 x 224 bytes, and 64 labels.
Batch = tuple[torch.Tensor, torch.Tensor]

#: The height and width of the result in pixels.
SIZE = 224
#: The area of a box relative to the image, and its width relative to its height: torchvision's defaults.
AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
#: The number of attempts before the largest possible box is used.
ATTEMPTS = 10


class Cut(NamedTuple):
    """A box in pixels, and whether to mirror it left to right."""

    left: int
    top: int
    width: int
    height: int
    is_mirrored: bool


def draw_cut(width: int, height: int) -> Cut:
    """Draw a box by the rule of torchvision's ``RandomResizedCrop``, and a flip."""
    random = Random(width << 16 | height)
    is_mirrored = random.random() < 0.5
    for _ in range(ATTEMPTS):
        area = width * height * random.uniform(*AREA)
        ratio = math.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            return Cut(random.randint(0, width - wide), random.randint(0, height - tall), wide, tall, is_mirrored)
    wide, tall = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    return Cut((width - wide) // 2, (height - tall) // 2, wide, tall, is_mirrored)


def random_resized_crop(image: Image.Image) -> torch.Tensor:
    """Crop, resize and flip an image with Pillow, as torchvision does; the result is (3, 224, 224) bytes."""
    image = image if image.mode == "RGB" else image.convert("RGB")
    cut = draw_cut(*image.size)
    part = image.crop((cut.left, cut.top, cut.left + cut.width, cut.top + cut.height))
    part = part.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    if cut.is_mirrored:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.asarray(part).transpose(2, 0, 1).copy())


def crop_pair(pair: tuple[Image.Image, int]) -> tuple[torch.Tensor, int]:
    return random_resized_crop(pair[0]), pair[1]
