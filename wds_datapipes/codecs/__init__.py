"""Codecs by extension: the table of decoders and encoders, with one module per kind of field."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

__all__ = ["CODECS", "IMAGE_FORMATS", "TRUSTED_CODECS", "UNSAFE", "Codec", "describe_value", "find_codec"]

#: Maps extensions to "module:name" of their `Codec`. A module is imported with its first field. Images, video and audio
#: are not included: they stay bytes unless a decoder is passed.
CODECS = {
    "cbor": "msgpack_cbor:cbor",
    "class": "integers:integer",
    "cls": "integers:integer",
    "cls2": "integers:integer",
    "count": "integers:integer",
    "htm": "text:text",
    "html": "text:text",
    "id": "integers:integer",
    "index": "integers:integer",
    "inx": "integers:integer",
    "jsn": "json_values:jsons",
    "json": "json_values:jsons",
    "mp": "msgpack_cbor:msgpack",
    "msg": "msgpack_cbor:msgpack",
    "msgpack": "msgpack_cbor:msgpack",
    "npy": "numpy_arrays:npy",
    "npz": "numpy_arrays:npz",
    "pickle": "pickles:pickled",
    "pkl": "pickles:pickled",
    "pth": "torch_tensors:pth",
    "pyd": "pickles:pickled",
    "tb": "tenbin:tenbin",
    "ten": "tenbin:tenbin",
    "tenbin": "tenbin:tenbin",
    "text": "text:text",
    "transcript": "text:text",
    "txt": "text:text",
}

#: Maps extensions of images to Pillow's formats for encoding; ``image`` and ``img`` come from webdataset.
IMAGE_FORMATS = {
    "image": "JPEG",
    "img": "JPEG",
    "jpeg": "JPEG",
    "jpg": "JPEG",
    "pbm": "PPM",
    "pgm": "PPM",
    "png": "PNG",
    "pnm": "PPM",
    "ppm": "PPM",
    "tif": "TIFF",
    "tiff": "TIFF",
    "webp": "WEBP",
}

#: Extensions whose decoder can run code in the data. They are refused unless the caller trusts the shards.
UNSAFE = frozenset({"pickle", "pkl", "pyd"})

#: Codecs used instead if the caller trusts the shards, as the safe ones support fewer values.
TRUSTED_CODECS = {
    "pth": "torch_tensors:trusted_pth",
}


class Codec(NamedTuple):
    """A codec for one kind of field: ``decode`` inverts ``encode``."""

    decode: Callable[[bytes], Any]
    #: Raises an error for values that it cannot encode faithfully.
    encode: Callable[[Any], bytes]
    #: The values that ``encode`` accepts, to complete the sentence "It takes ...".
    takes: str


def find_codec(extension: str, *, trusted: bool = False) -> Codec | None:
    r"""Return the codec of an extension, or ``None`` if its fields stay bytes.

    The caller must check ``extension in UNSAFE``.

    >>> find_codec("cls").decode(b"7\n"), find_codec("cls").encode(7), find_codec("bin")
    (7, b'7', None)
    """
    address = CODECS.get(extension)
    if trusted:
        address = TRUSTED_CODECS.get(extension, address)
    return None if address is None else _load(address)


@cache
def _load(address: str) -> Codec:
    module, _, name = address.partition(":")
    codec: Codec = getattr(import_module(f"{__name__}.{module}"), name)
    return codec


def describe_value(value: object) -> str:
    """Describe a value for a message: its type, and the dtype and shape of an array.

    >>> describe_value(None), describe_value({"a": 1}), describe_value("seven")
    ('None', 'a dict', "the str 'seven'")
    """
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if value is None:
        return "None"
    if isinstance(value, bool | int | float | str):
        shown = repr(value[:40] if isinstance(value, str) else value)
        return f"the {name} {shown[:50]}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"a {name} of {value.dtype} and shape {tuple(value.shape)}"
    if callable(getattr(value, "getbands", None)):  # a Pillow image
        return f"a {name} of mode {getattr(value, 'mode', '')}"
    return f"a {name}"
