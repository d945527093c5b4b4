"""Codec of ``torch.save``: ``pth``. Tensors are loaded onto the CPU."""

from __future__ import annotations

import pickle
from io import BytesIO
from typing import Any

from wds_datapipes.codecs import Codec
from wds_datapipes.errors import UnsafeInputError

__all__ = ["decode_pth", "decode_trusted_pth", "encode_pth", "encode_trusted_pth", "pth", "trusted_pth"]

#: The magic bytes of archives written by ``torch.save`` since torch 1.6. Their parts have checksums, so a file that is
#: rejected at its pickle is not damaged, but holds more than tensors.
ZIP_MAGIC = b"PK\x03\x04"


def decode_pth(data: bytes) -> Any:
    """Load tensors and plain Python containers of them; other objects could run code and are rejected.

    Raises:
        UnsafeInputError: the file holds other objects.
    """
    import torch

    try:
        return torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not data.startswith(ZIP_MAGIC):
            raise
        raise UnsafeInputError(
            f"it holds more than tensors, and loading it can run arbitrary code ({_reason(error)})"
        ) from error


def decode_trusted_pth(data: bytes) -> Any:
    """Load tensors safely, and any other objects by unpickling, which can run arbitrary code."""
    import torch

    try:
        return torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return torch.load(BytesIO(data), map_location="cpu", weights_only=False)  # only with allow_pickle=True


def encode_pth(value: Any) -> bytes:
    """Save tensors and plain Python containers of them; values that `decode_pth` would reject are rejected.

    Raises:
        UnsafeInputError: the value holds other objects.
    """
    data = encode_trusted_pth(value)
    decode_pth(data)
    return data


def encode_trusted_pth(value: Any) -> bytes:
    """Save anything that torch can save. For a view of a larger tensor, only the view is saved."""
    import torch

    is_dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    if is_dense and value.untyped_storage().nbytes() > value.nbytes:
        value = value.clone()
    file = BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _reason(error: pickle.UnpicklingError) -> str:
    """Extract the reason from torch's long message."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if "WeightsUnpickler error" in line), lines[0] if lines else "no reason given")


pth = Codec(decode_pth, encode_pth, "a tensor, or plain values, lists and dicts that hold tensors")
trusted_pth = Codec(decode_trusted_pth, encode_trusted_pth, "any value that torch.save supports")
