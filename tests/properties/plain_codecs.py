"""The effect of the stages that decode and encode, on samples in a list, and images as files."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import PIL.Image

from wds_datapipes.codecs.decoding import DecoderChain
from wds_datapipes.codecs.encoding import EncoderChain
from wds_datapipes.codecs.field_chain import convert_samples
from wds_datapipes.on_error.policy import check_on_error

__all__ = ["encoded", "photo", "wds_decode", "wds_encode"]


def wds_decode(
    samples: Iterable[Any], *decoders: Any, on_error: Any = "raise", **options: Any
) -> Iterator[dict[str, Any]]:
    check_on_error(on_error)
    named = {name: options.pop(name) for name in ("only", "partial", "allow_pickle", "limits") if name in options}
    return convert_samples(samples, DecoderChain(decoders, options, **named), on_error)


def wds_encode(samples: Iterable[Any], on_error: Any = "raise", **options: Any) -> Iterator[dict[str, Any]]:
    named = {name: options.pop(name) for name in ("only", "allow_pickle") if name in options}
    return convert_samples(samples, EncoderChain(options, **named), on_error)


def photo(height: int, width: int, mode: str = "RGB", seed: int = 3) -> PIL.Image.Image:
    """Return an image of smooth shapes."""
    shapes = np.random.default_rng(seed).integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), np.uint8)
    return PIL.Image.fromarray(shapes).resize((width, height), PIL.Image.Resampling.BICUBIC).convert(mode)


def encoded(image: PIL.Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()
