"""Pixels: convert them between Pillow images, arrays and tensors, and resize them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wds_datapipes.codecs.array_files import as_array
from wds_datapipes.codecs.crops import Crop

#: The tolerance for floats slightly outside of 0 to 1, as after interpolation; the same as in webdataset.
TOLERANCE = 0.001


def deep_gray(image: Image.Image) -> NDArray[np.float32]:
    """Return the pixels of a 16-bit grayscale image, from 0 to 1."""
    # Pillow loads 16-bit PGM, and PNG in older versions, as 32-bit integers; those of TIFF may have any range.
    if not image.mode.startswith("I;16") and image.format not in ("PNG", "PPM"):
        raise ValueError(
            f"a {image.format} image of mode {image.mode!r} has 32 bits per pixel and no fixed range: decode it with a "
            f"custom function"
        )
    gray: NDArray[np.float32] = np.divide(np.asarray(image), np.float32(65535), dtype=np.float32)
    return gray


def spread(gray: NDArray[np.float32], mode: str) -> NDArray[np.float32]:
    """Expand grayscale pixels to a mode with more channels; alpha is opaque."""
    if mode == "L":
        return gray
    pixels = np.ones((*gray.shape, len(mode)), np.float32)
    pixels[..., :3] = gray[..., np.newaxis]
    return pixels


def unpack(value: Any) -> Image.Image:
    """Return the Pillow image of an array (H, W[, C]), a tensor ([C, ]H, W) or a Pillow image.

    Raises:
        TypeError: the type or dtype is not supported.
        ValueError: the shape or range is not that of an image.
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
        raise TypeError(f"pixels must be uint8 or floats, or for grayscale also uint16 or bool, not {pixels.dtype}")
    return Image.fromarray(np.ascontiguousarray(pixels))


def _bytes_of(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Convert floats from 0 to 1 to bytes by rounding, the inverse of the division by 255."""
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= -TOLERANCE and high <= 1 + TOLERANCE):
        raise ValueError(f"floats in images must be between 0 and 1, but these are from {low:.4g} to {high:.4g}")
    scaled: NDArray[np.uint8] = np.rint(np.clip(pixels.astype(np.float32), 0, 1) * 255).astype(np.uint8)
    return scaled


def resize_part(part: NDArray[Any], crop: Crop, *, is_mirrored: bool) -> NDArray[Any]:
    """Return the selected part of (H, W[, C]) pixels, resized to the size of the crop; it may be a view."""
    import torch

    if part.shape[:2] != crop.shape:
        part = np.require(part, requirements=["C", "W"])  # torch copies rows of pixels more slowly than numpy
        layers = torch.from_numpy(part if part.ndim == 3 else part[..., np.newaxis])
        # As (1, C, H, W) in the memory format "channels last", for which torch has the fastest kernel.
        image = layers[np.newaxis].permute(0, 3, 1, 2)
        with _one_thread():
            resized = torch.nn.functional.interpolate(image, crop.shape, mode=crop.interpolation, antialias=True)
        part = resized[0].permute(1, 2, 0).numpy().reshape(*crop.shape, *part.shape[2:])
        if crop.interpolation == "bicubic" and part.dtype == np.float32:  # it overshoots, and torch clips only bytes
            part.clip(0, 1, out=part)
    return part[:, ::-1] if is_mirrored else part


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute in this thread only.

    More threads gain little for a single image: they wait actively for the next one and take processors from the rest
    of the program. Workers have one thread anyway.
    """
    import torch

    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)


def packed_shape(mode: str, size: tuple[int, int], container: str) -> tuple[int, ...]:
    """Return the shape of pixels of a mode and a size (H, W) in a container."""
    if mode == "L":
        return size
    return (len(mode), *size) if container == "torch" else (*size, len(mode))


def pack(pixels: NDArray[Any], mode: str, container: str, out: NDArray[Any]) -> None:
    """Copy (H, W[, C]) pixels to ``out``, in the layout of the container; floats are from 0 to 1.

    A tensor drops channels beyond those of the mode.
    """
    if container == "torch" and mode != "L":
        if pixels.shape[2] == 4 and pixels.dtype == out.dtype == np.uint8:
            _split_words(pixels.view("<u4")[..., 0], out)
            return
        pixels = pixels.transpose(2, 0, 1)[: len(mode)]
    if out.dtype == pixels.dtype:
        out[...] = pixels
    else:
        np.divide(pixels, np.float32(255), out=out)


def _split_words(words: NDArray[np.uint32], planes: NDArray[np.uint8]) -> None:
    """Split words into planes of bytes, the lowest byte first, in half of the time that strided copies take."""
    words = np.ascontiguousarray(words)  # shifting mirrored words takes longer than copying them
    for number, plane in enumerate(planes):
        np.right_shift(words, 8 * number, out=plane, casting="unsafe")
