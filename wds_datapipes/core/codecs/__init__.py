"""How the bytes of a field become a value: one file for each kind of field, found by the field's last extension."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

__all__ = ["DECODERS", "TRUSTED_DECODERS", "UNSAFE", "find_decoder"]

#: Extension -> "module:function", a function ``bytes -> value``. A module is imported when its first field comes.
#: Images, video and audio are not here: they stay bytes until a decoder for them is asked for.
DECODERS = {
    "cbor": "records:decode_cbor",
    "class": "scalars:decode_integer",
    "cls": "scalars:decode_integer",
    "cls2": "scalars:decode_integer",
    "count": "scalars:decode_integer",
    "htm": "text:decode_text",
    "html": "text:decode_text",
    "id": "scalars:decode_integer",
    "index": "scalars:decode_integer",
    "inx": "scalars:decode_integer",
    "jsn": "jsons:decode_json",
    "json": "jsons:decode_json",
    "mp": "records:decode_msgpack",
    "msg": "records:decode_msgpack",
    "msgpack": "records:decode_msgpack",
    "npy": "arrays:decode_npy",
    "npz": "arrays:decode_npz",
    "pickle": "pickled:decode_pickle",
    "pkl": "pickled:decode_pickle",
    "pth": "tensors:decode_pth",
    "pyd": "pickled:decode_pickle",
    "tb": "tenbin:decode_tenbin",
    "ten": "tenbin:decode_tenbin",
    "tenbin": "tenbin:decode_tenbin",
    "text": "text:decode_text",
    "transcript": "text:decode_text",
    "txt": "text:decode_text",
}

#: The extensions whose decoder can run code that is in the data. They are refused unless the caller trusts the shards.
UNSAFE = frozenset({"pickle", "pkl", "pyd"})

#: What decodes an extension instead, once the caller trusts the shards: the safe decoder reads less.
TRUSTED_DECODERS = {
    "pth": "tensors:decode_trusted_pth",
}


def find_decoder(extension: str, *, trusted: bool = False) -> Callable[[bytes], Any] | None:
    r"""Return the decoder of an extension, or ``None`` if its fields stay bytes.

    Whether an extension may be decoded at all is for the caller to ask: ``extension in UNSAFE``.

    >>> find_decoder("cls")(b"7\n"), find_decoder("bin")
    (7, None)
    """
    address = DECODERS.get(extension)
    if trusted:
        address = TRUSTED_DECODERS.get(extension, address)
    return None if address is None else _load(address)


@cache
def _load(address: str) -> Callable[[bytes], Any]:
    module, _, function = address.partition(":")
    decoder: Callable[[bytes], Any] = getattr(import_module(f"{__name__}.{module}"), function)
    return decoder
