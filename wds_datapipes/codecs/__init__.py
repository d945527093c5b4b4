"""Codecs by extension: the table of decoders and encoders, with one module per kind of field."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

__all__ = ["CODECS", "IMAGE_FORMATS", "TRUSTED_CODECS", "UNSAFE", "Codec", "describe_value", "find_codec"]

#: The codecs as "module:name", and the extensions of each. A module is imported when a field first needs it. Images,
#: video and audio are not included: they stay bytes unless the user passes a decoder.
_EXTENSIONS = {
    "plain_values:integer": "cls cls2 class count index inx id",
    "plain_values:text": "txt text transcript html htm",
    "plain_values:jsons": "json jsn",
    "plain_values:msgpack": "mp msgpack msg",
    "plain_values:cbor": "cbor",
    "plain_values:pickled": "pyd pickle pkl",
    "array_files:npy": "npy",
    "array_files:npz": "npz",
    "array_files:pth": "pth",
    "array_files:tenbin": "ten tenbin tb",
}

#: Pillow's formats for encoding, and the extensions of each; ``image`` and ``img`` come from webdataset.
_IMAGE_EXTENSIONS = {
    "JPEG": "jpg jpeg image img",
    "PNG": "png",
    "PPM": "ppm pgm pbm pnm",
    "TIFF": "tif tiff",
    "WEBP": "webp",
}


def _by_extension(table: dict[str, str]) -> dict[str, str]:
    return dict(sorted((extension, value) for value, words in table.items() for extension in words.split()))


CODECS, IMAGE_FORMATS = _by_extension(_EXTENSIONS), _by_extension(_IMAGE_EXTENSIONS)

#: Extensions whose decoders can run code from the data. They are rejected unless the caller trusts the shards.
UNSAFE = frozenset({"pickle", "pkl", "pyd"})

#: Codecs that replace the safe ones if the caller trusts the shards, because they support more values.
TRUSTED_CODECS = {"pth": "array_files:trusted_pth"}


class Codec(NamedTuple):
    """A codec for one kind of field: ``decode`` inverts ``encode``."""

    decode: Callable[[bytes], Any]
    #: Raises an error for values that it cannot encode faithfully.
    encode: Callable[[Any], bytes]
    #: The values that ``encode`` accepts; completes "It takes ...".
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
