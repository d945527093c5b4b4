"""A comparison of values in depth, with their types, for items whose arrays and tensors have no single truth value."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["assert_same"]

Array = NDArray[Any]


def assert_same(got: Any, sent: Any, *, ordered: bool = True) -> None:
    """Compare two values in depth, with their types, and the order of dicts unless told otherwise; NaN equals NaN."""
    assert type(got) is type(sent)
    if isinstance(sent, torch.Tensor):
        assert_same_tensor(got, sent)
    elif isinstance(sent, np.ndarray | np.generic):
        assert_same_array(np.asarray(got), np.asarray(sent))
    elif isinstance(sent, dict):
        assert got.keys() == sent.keys()
        assert not ordered or list(got) == list(sent)
        for key in sent:
            assert_same(got[key], sent[key], ordered=ordered)
    elif isinstance(sent, list | tuple):
        assert len(got) == len(sent)
        for got_part, sent_part in zip(got, sent, strict=True):
            assert_same(got_part, sent_part, ordered=ordered)
    elif dataclasses.is_dataclass(sent):
        assert_same(vars(got), vars(sent), ordered=ordered)
    elif isinstance(sent, float):
        assert got == sent or (got != got and sent != sent)
    else:
        assert got == sent


def assert_same_array(got: Array, sent: Array) -> None:
    assert got.dtype == sent.dtype
    assert got.shape == sent.shape
    if sent.dtype.names:
        for name in sent.dtype.names:  # padding between the fields has no meaning
            assert_same_array(got[name], sent[name])
    elif sent.dtype.hasobject:
        assert got.tolist() == sent.tolist()
    else:
        assert got.tobytes() == sent.tobytes()


def bits(tensor: torch.Tensor) -> bytes:
    """Return the elements as bytes, because not all types can be compared, and NaN does not equal itself."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    data: bytes = tensor.detach().view(sizes[tensor.element_size()]).numpy().tobytes()
    return data


def assert_same_tensor(got: torch.Tensor, sent: torch.Tensor) -> None:
    assert (got.dtype, got.shape, got.layout, got.requires_grad) == (
        sent.dtype,
        sent.shape,
        sent.layout,
        sent.requires_grad,
    )
    assert bits(got) == bits(sent)
