"""Codec of ``torch.save``: ``pth``. Tensors are loaded to the CPU."""

from __future__ import annotations

import pickle
from io import BytesIO
from typing import Any

from wds_datapipes.codecs.codec import Codec
from wds_datapipes.errors import UnsafeCodecError

__all__ = ["decode_pth", "decode_trusted_pth", "encode_pth", "encode_trusted_pth", "pth", "trusted_pth"]

#: How the archives begin that ``torch.save`` has written since torch 1.6. The parts carry checksums, so one that loads
#: up to its pickle and is refused there is sound, and holds more than weights.
ZIP_MAGIC = b"PK\x03\x04"


def decode_pth(data: bytes) -> Any:
    """Load tensors, and plain Python values that hold them; other objects could run code and are refused.

    Raises:
        UnsafeCodecError: the file holds other objects.
    """
    import torch

    try:
        return torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not data.startswith(ZIP_MAGIC):
            raise
        raise UnsafeCodecError(
            f"it holds more than tensors, and loading it can run any code ({_reason(error)})"
        ) from error


def decode_trusted_pth(data: bytes) -> Any:
    """Load tensors only, if that is all there is, and anything else by a full unpickling, which can run any code."""
    import torch

    try:
        return torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return torch.load(BytesIO(data), map_location="cpu", weights_only=False)  # reached with unsafe=True alone


def encode_pth(value: Any) -> bytes:
    """Save tensors, and plain Python values that hold them; what `decode_pth` would refuse is refused here.

    Raises:
        UnsafeCodecError: it is more than that.
    """
    data = encode_trusted_pth(value)
    decode_pth(data)
    return data


def encode_trusted_pth(value: Any) -> bytes:
    """Save anything that torch saves. Of a tensor that shows a part of a larger one, the part is saved alone."""
    import torch

    is_dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    if is_dense and value.untyped_storage().nbytes() > value.nbytes:
        value = value.clone()
    file = BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _reason(error: pickle.UnpicklingError) -> str:
    """What was refused, out of torch's long advice on how to load it all the same."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if "WeightsUnpickler error" in line), lines[0] if lines else "no reason given")


pth = Codec(decode_pth, encode_pth, "a tensor, or plain values, lists and dicts that hold tensors")
trusted_pth = Codec(decode_trusted_pth, encode_trusted_pth, "whatever torch.save can save")
