"""Resize arrays of pixels, and copy them to the layout of arrays or tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wds_datapipes.codecs.crops import Box, Crop

__all__ = ["pack", "packed_shape", "resize_box"]


def resize_box(pixels: NDArray[Any], box: Box, crop: Crop) -> NDArray[Any]:
    """Return a box of (H, W[, C]) pixels, resized to the size of the crop; it may be a view."""
    import torch

    part = pixels[box.top : box.top + box.height, box.left : box.left + box.width]
    if part.shape[:2] != crop.size:
        writable = part if part.flags.writeable else part.copy()
        layers = torch.from_numpy(writable if part.ndim == 3 else writable[..., np.newaxis])
        # As (1, C, H, W) in the memory format "channels last", for which torch has the fastest kernel.
        image = layers[np.newaxis].permute(0, 3, 1, 2)
        with _one_thread():
            resized = torch.nn.functional.interpolate(image, crop.size, mode=crop.interpolation, antialias=True)
        part = resized[0].permute(1, 2, 0).numpy().reshape(*crop.size, *part.shape[2:])
        if crop.interpolation == "bicubic" and part.dtype == np.float32:  # overshoots, and torch clips bytes only
            part.clip(0, 1, out=part)
    return part[:, ::-1] if box.is_mirrored else part


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute in this thread only.

    For a single image, other threads gain little: they wait actively for the next one, and take the processors from the
    rest of the program. Workers have one thread anyway.
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
    """Return the shape of the pixels of a mode and a size (H, W) in a container."""
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
    """Split words into the bytes of each plane, the lowest first, in half of the time that strided bytes take."""
    words = np.ascontiguousarray(words)  # if they are mirrored, which would take longer than the copy
    for number, plane in enumerate(planes):
        np.right_shift(words, 8 * number, out=plane, casting="unsafe")
