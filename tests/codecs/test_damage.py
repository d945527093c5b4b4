"""Fields with damage at the beginning, in the middle, at the end or after it, as the reference libraries read them.

A damaged field is an error, or, if its format has no checksum, the value that the reference library returns, too.
Sound and video are in ``test_media.py``.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import cbor2
import msgpack
import numpy as np
import PIL.Image
import pytest
import torch
import webdataset.tenbin
from plain_codecs import encoded, photo

from wds_datapipes.codecs import CODECS, UNSAFE, find_codec
from wds_datapipes.codecs.images import ImageDecoder

NOISE = np.random.default_rng(7).normal(size=(20, 30))


def saved(save: Callable[..., Any], *values: Any, **named: Any) -> bytes:
    file = io.BytesIO()
    save(file, *values, **named)
    return file.getvalue()


def load(data: bytes) -> Any:
    found = np.load(io.BytesIO(data), allow_pickle=False)
    return found if isinstance(found, np.ndarray) else dict(found)


def load_tensors(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


VALUES = {"numbers": list(range(200)), "text": "grüße" * 30, "nothing": None}
#: Extension -> data, and the reference's function.
FIELDS: dict[str, tuple[bytes, Callable[[bytes], Any]]] = {
    "npy": (saved(np.save, NOISE), load),
    "npz": (saved(np.savez_compressed, a=NOISE, b=NOISE[0]), load),
    "pth": (saved(lambda file: torch.save({"w": torch.from_numpy(NOISE)}, file)), load_tensors),
    "ten": (bytes(webdataset.tenbin.encode_buffer([NOISE, NOISE[0]])), webdataset.tenbin.decode_buffer),
    "cbor": (cbor2.dumps(VALUES), cbor2.loads),
    "msgpack": (msgpack.packb(VALUES), msgpack.unpackb),
    "json": (json.dumps(VALUES).encode(), json.loads),
    "txt": (("grüße " * 50).encode(), bytes.decode),
    "cls": (b"123456", int),
}


def damages(data: bytes) -> Iterator[bytes]:
    middle = len(data) // 2
    for end in (0, 1, len(data) // 10, middle, len(data) - len(data) // 10, len(data) - 1):
        yield data[:end]
    for start, count in ((0, 1), (0, 8), (middle, 4), (len(data) - 8, 8), (len(data) - 1, 1)):
        yield data[:start] + bytes(255 - byte for byte in data[start : start + count]) + data[start + count :]
    yield data[:middle] + bytes(min(len(data) - middle, 300)) + data[middle + 300 :]
    yield data[:middle] + data[middle + 7 :]
    yield data + b"garbage!" * 10
    yield data + bytes(512)


def outcome(decode: Callable[[bytes], Any], data: bytes) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return repr(decode(data))
    except Exception:
        return "an error"


def test_every_codec_has_a_field() -> None:
    assert {find_codec(extension) for extension in FIELDS} == {find_codec(each) for each in {*CODECS} - UNSAFE}


@pytest.mark.parametrize("extension", FIELDS)
def test_a_damaged_field_is_what_the_reference_says(extension: str) -> None:
    data, reference = FIELDS[extension]
    codec = find_codec(extension)
    assert codec is not None
    assert outcome(codec.decode, data) == outcome(reference, data) != "an error"
    for damaged in damages(data):
        assert outcome(codec.decode, damaged) in ("an error", outcome(reference, damaged))


#: Format -> the modes of Pillow that it stores.
IMAGES = {
    "AVIF": ("RGB", "RGBA"),
    "BMP": ("1", "L", "P", "RGB"),
    "DDS": ("RGB", "RGBA"),
    "GIF": ("1", "L", "P", "RGB"),
    "JPEG": ("L", "RGB", "CMYK"),
    "JPEG2000": ("L", "RGB", "RGBA"),
    "PCX": ("1", "L", "P", "RGB"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA"),
    "PPM": ("1", "L", "RGB"),
    "QOI": ("RGB", "RGBA"),
    "SGI": ("L", "RGB", "RGBA"),
    "TGA": ("1", "L", "P", "RGB", "RGBA"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"),
    "WEBP": ("L", "RGB", "RGBA"),
}


def read_rgb(data: bytes) -> Any:
    image = PIL.Image.open(io.BytesIO(data))
    image.load()
    return np.asarray(image.convert("RGB")).tobytes()


@pytest.mark.parametrize("form", IMAGES)
def test_a_damaged_image_is_what_pillow_says(form: str) -> None:
    decoder = ImageDecoder("rgb8")
    for mode in IMAGES[form]:
        for height, width in ((1, 1), (37, 53), (3, 1000)):
            data = encoded(photo(height, width, mode), form)
            for damaged in (data, *damages(data)):
                found = outcome(lambda data: decoder.decode(data).tobytes(), damaged)
                assert found == outcome(read_rgb, damaged), (mode, height, width)
