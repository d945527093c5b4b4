"""Crops: the part of an image that `ImageDecoder` decodes and resizes."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from random import Random
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, cast

from wds_datapipes.arguments import check_choice, checks_calls

Interpolation: TypeAlias = Literal["bilinear", "bicubic"]

#: The maximum number of boxes of the requested area and aspect ratio to draw until one fits into the image.
ATTEMPTS = 10
#: The module ``random``, whose functions are the methods of its global generator.
GLOBAL_RNG = cast(Random, random)


class Box(NamedTuple):
    """A part of an image, in pixels from its upper left corner, and whether to mirror it left to right."""

    left: int
    top: int
    width: int
    height: int
    is_mirrored: bool = False


@dataclass(frozen=True)
class Crop(ABC):
    """Base class of crops, which select a box in each image to be resized to a fixed size.

    Boxes are resized with antialiasing. The pixels differ from Pillow's by at most one level of 255.

    Args:
        size: the height and width of the result in pixels: a number, or a pair of both.
        interpolation: ``"bilinear"`` or ``"bicubic"``.
    """

    size: int | tuple[int, int]
    _: KW_ONLY
    interpolation: Interpolation = "bilinear"

    #: Whether `select` draws random numbers.
    is_random: ClassVar[bool] = False

    def __post_init__(self) -> None:
        shape: Any = self.shape
        if not (len(shape) == 2 and all(isinstance(side, int) and side >= 1 for side in shape)):
            raise ValueError(f"size must be at least 1 pixel, or a pair (height, width), not {self.size!r}")
        check_choice("interpolation", self.interpolation, Interpolation)

    @property
    def shape(self) -> tuple[int, int]:
        """The height and width of the result."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    @abstractmethod
    def select(self, width: int, height: int, rng: Random) -> Box:
        """Return the box for an image of this size; it must lie within the image."""


@checks_calls
@dataclass(frozen=True)
class RandomResizedCrop(Crop):
    """Crops a random part of each image and resizes it, like torchvision's transform of the same name.

    Args:
        size: the height and width of the result in pixels: a number, or a pair of both.
        scale: the smallest and the largest area of the part, as fractions of the area of the image.
        ratio: the smallest and the largest ratio of the part's width to its height, drawn on a logarithmic scale.
        flip_probability: the probability of mirroring the part left to right.
        interpolation: ``"bilinear"`` or ``"bicubic"``.

    Raises:
        ValueError: a range is empty or out of bounds.

    Examples:
        >>> import random
        >>> crop = RandomResizedCrop(224, flip_probability=0.5)
        >>> box = crop.select(640, 480, random.Random(7))
        >>> 0 <= box.left <= 640 - box.width and 0 <= box.top <= 480 - box.height
        True
    """

    _: KW_ONLY
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip_probability: float = 0.0

    is_random = True

    def __post_init__(self) -> None:
        super().__post_init__()
        scale: Any = self.scale
        ratio: Any = self.ratio
        if not (len(scale) == 2 and 0 < scale[0] <= scale[1] <= 1):
            raise ValueError(f"scale must be two fractions of the area, such as (0.08, 1.0), not {self.scale!r}")
        if not (len(ratio) == 2 and 0 < ratio[0] <= ratio[1]):
            raise ValueError(f"ratio must be two ratios of width to height, such as (0.75, 1.33), not {self.ratio!r}")
        if not 0 <= self.flip_probability <= 1:
            raise ValueError(f"flip_probability must be from 0 to 1, not {self.flip_probability!r}")

    def select(self, width: int, height: int, rng: Random) -> Box:
        """Return a random box, or, if none fits, the largest centered one with an allowed ratio."""
        is_mirrored = rng.random() < self.flip_probability
        low, high = map(math.log, self.ratio)
        for _ in range(ATTEMPTS):
            area = width * height * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(low, high))
            wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < wide <= width and 0 < tall <= height:
                return Box(rng.randint(0, width - wide), rng.randint(0, height - tall), wide, tall, is_mirrored)
        wide = min(width, max(1, round(height * self.ratio[1])))
        tall = min(height, max(1, round(width / self.ratio[0])))
        return Box((width - wide) // 2, (height - tall) // 2, wide, tall, is_mirrored)


@checks_calls
@dataclass(frozen=True)
class CenterCrop(Crop):
    """Crops the central square of each image and resizes it, as usual in validation.

    Args:
        size: the height and width of the result in pixels.
        resize: the length that the short side would have if the whole image were resized first: with a size of 224, 256
            selects the middle seven eighths of the short side, as usual for ImageNet. By default, the square spans the
            whole short side.
        interpolation: ``"bilinear"`` or ``"bicubic"``.

    Raises:
        ValueError: ``resize`` is less than ``size``.

    Examples:
        >>> import random
        >>> CenterCrop(224, resize=256).select(640, 512, random.Random())
        Box(left=96, top=32, width=448, height=448, is_mirrored=False)
    """

    size: int
    _: KW_ONLY
    resize: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resize is not None and self.resize < self.size:
            raise ValueError(f"resize must be at least the size of the crop, {self.size} pixels, not {self.resize!r}")

    def select(self, width: int, height: int, rng: Random) -> Box:  # noqa: ARG002 - the interface of crops
        """Return the box in the center."""
        side = max(1, round(min(width, height) * self.size / (self.resize or self.size)))
        return Box((width - side) // 2, (height - side) // 2, side, side)
