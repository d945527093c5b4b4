"""Codecs by extension: the table of decoders and encoders, one module for each kind of field."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from wds_datapipes.codecs.codec import Codec

__all__ = ["CODECS", "IMAGE_FORMATS", "TRUSTED_CODECS", "UNSAFE", "find_codec"]

#: Extension -> "module:name" of its `Codec`. A module is imported when its first field comes.
#: Video and audio are not here: they stay bytes until a decoder for them is asked for. The same holds for images.
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

#: Extensions of images that are encoded -> Pillow's name of the format; ``image`` and ``img`` are webdataset's.
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

#: The extensions whose decoder can run code that is in the data. They are refused unless the caller trusts the shards.
UNSAFE = frozenset({"pickle", "pkl", "pyd"})

#: What stands for an extension instead, once the caller trusts the shards: the safe codec knows less.
TRUSTED_CODECS = {
    "pth": "torch_tensors:trusted_pth",
}


def find_codec(extension: str, *, trusted: bool = False) -> Codec | None:
    r"""Return the codec of an extension, or ``None`` if its fields stay bytes.

    Whether an extension may be decoded or encoded at all is for the caller to ask: ``extension in UNSAFE``.

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
