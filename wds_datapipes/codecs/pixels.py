"""Conversion of pixels between Pillow images, arrays and tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wds_datapipes.codecs.numpy_arrays import as_array

if TYPE_CHECKING:
    import torch

__all__ = ["deep_gray", "on_background", "pack", "spread", "unpack"]

#: How far floats may lie outside of 0 to 1, as after an interpolation; the same as webdataset allows.
TOLERANCE = 0.001


def deep_gray(image: Image.Image) -> NDArray[np.float32]:
    """The pixels of a gray image of 16 bits, from 0 to 1."""
    # PGM of 16 bits, and PNG in older Pillows, come as 32-bit integers; TIFF has such with any range.
    if not image.mode.startswith("I;16") and image.format not in ("PNG", "PPM"):
        raise ValueError(
            f"a {image.format} image of mode {image.mode!r} has 32 bits a pixel and no fixed range: "
            f"decode it with a function of your own"
        )
    gray: NDArray[np.float32] = np.divide(np.asarray(image), np.float32(65535), dtype=np.float32)
    return gray


def spread(gray: NDArray[np.float32], mode: str) -> NDArray[np.float32]:
    """Gray pixels as those of a mode with more channels; alpha is opaque."""
    if mode == "L":
        return gray
    pixels = np.ones((*gray.shape, len(mode)), np.float32)
    pixels[..., :3] = gray[..., np.newaxis]
    return pixels


def on_background(image: Image.Image, background: tuple[int, ...]) -> Image.Image:
    """Put a transparent image on a colour."""
    canvas = Image.new("RGBA", image.size, background)
    canvas.alpha_composite(image.convert("RGBA"))
    return canvas


def pack(pixels: NDArray[Any], container: str, *, floats: bool = False) -> NDArray[Any] | torch.Tensor:
    """Bring (H, W[, C]) pixels into the container's order, by one copy; ``floats`` also divides them by 255."""
    if container == "torch" and pixels.ndim == 3:
        pixels = pixels.transpose(2, 0, 1)
    result = np.empty(pixels.shape, np.float32 if floats else pixels.dtype)
    if floats:
        np.divide(pixels, np.float32(255), out=result)
    else:
        result[...] = pixels
    if container == "numpy":
        return result
    import torch

    return torch.from_numpy(result)


def unpack(value: Any) -> Image.Image:
    """Return the Pillow image of an array (H, W[, C]), a tensor ([C, ]H, W) or a Pillow image.

    Raises:
        TypeError: it is nothing of these, or has another dtype.
        ValueError: its shape or its range is not that of an image.
    """
    if isinstance(value, Image.Image):
        return value
    pixels = as_array(value)
    if not isinstance(value, np.ndarray) and pixels.ndim == 3:  # a tensor
        if pixels.shape[0] not in (1, 3, 4):
            raise ValueError("a tensor image has the shape (H, W) or (C, H, W), with 1, 3 or 4 channels C")
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    if pixels.ndim != 2 and (pixels.ndim != 3 or pixels.shape[2] not in (3, 4)):
        raise ValueError("an image array has the shape (H, W) or (H, W, C), with 1, 3 or 4 channels C")
    if not pixels.size:
        raise ValueError("it has no pixels")
    if pixels.dtype.kind == "f":
        pixels = _bytes_of(pixels)
    if pixels.dtype.kind == "u" and pixels.dtype.itemsize == 2 and pixels.ndim == 2:
        return Image.fromarray(np.ascontiguousarray(pixels, dtype="<u2"))
    if pixels.dtype != np.uint8 and (pixels.dtype != np.bool_ or pixels.ndim != 2):
        raise TypeError(f"pixels are uint8 or floats; gray ones also uint16 or bool, and not {pixels.dtype}")
    return Image.fromarray(np.ascontiguousarray(pixels))


def _bytes_of(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Floats from 0 to 1 as the nearest of 0 to 255: what was divided by 255 comes back."""
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= -TOLERANCE and high <= 1 + TOLERANCE):
        raise ValueError(f"floats in images are from 0 to 1, and these are from {low:.4g} to {high:.4g}")
    scaled: NDArray[np.uint8] = np.rint(np.clip(pixels.astype(np.float32), 0, 1) * 255).astype(np.uint8)
    return scaled
