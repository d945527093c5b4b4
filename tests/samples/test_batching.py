"""Unbatching: the inverse of a collation, with any nesting."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from wds_datapipes.samples.batching import unbatch_samples

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - a plain one, as torch's collate knows them


def plain(value: Any) -> Any:
    """A value with its tensors and arrays as lists and numbers, and its tuples unchanged."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        each_plain = [plain(each) for each in value]
        return each_plain if isinstance(value, list) else tuple(each_plain)
    return value


LEAVES = st.sampled_from(["number", "text", "array", "tensor"])
DICTS = st.dictionaries(st.sampled_from("xy"), LEAVES, min_size=1)
SHAPES = st.dictionaries(st.sampled_from("abc"), LEAVES | DICTS, min_size=1)


def built(shape: Any, number: int) -> Any:
    """A sample of a shape, with values that identify its number."""
    if isinstance(shape, dict):
        return {key: built(each, number) for key, each in shape.items()}
    return {
        "number": number,
        "text": f"text {number}",
        "array": np.full((2, 3), number),
        "tensor": torch.full((2,), number),
    }[shape]


@given(shape=SHAPES, count=st.integers(1, 4))
def test_batches_collated_by_torch_are_unbatched(shape: Any, count: int) -> None:
    samples = [built(shape, number) for number in range(count)]
    assert plain(list(unbatch_samples([default_collate(samples)] * 2))) == plain(samples) * 2


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ((torch.tensor([1, 2]), ["a", "b"]), [(1, "a"), (2, "b")]),
        ([torch.tensor([1, 2]), ("a", "b")], [[1, "a"], [2, "b"]]),
        (Pair(np.array([1, 2]), [None, 3]), [Pair(1, None), Pair(2, 3)]),
        ({"x": (np.array([1, 2]), {"y": [b"a", b"b"]})}, [{"x": (1, {"y": b"a"})}, {"x": (2, {"y": b"b"})}]),
        ({"x": [[1, 2], [3]]}, [{"x": [1, 2]}, {"x": [3]}]),  # a column of lists
        (["a", "b"], ["a", "b"]),
        ({"x": np.zeros((0, 2)), "y": []}, []),
        ({"x": [torch.zeros(1), torch.zeros(2)]}, [{"x": [0.0]}, {"x": [0.0, 0.0]}]),  # ragged
    ],
)
def test_handwritten_batches(batch: Any, samples: list[Any]) -> None:
    taken = list(unbatch_samples([batch]))
    assert plain(taken) == samples
    assert list(map(type, taken)) == [type(batch) if not isinstance(batch, list) or taken[0] != "a" else str] * len(
        taken
    )


def test_numbers_in_tensors_stay_tensors() -> None:
    ((number, real),) = unbatch_samples([(torch.tensor([1], dtype=torch.int16), np.array([2.0], dtype=np.float32))])
    assert (type(number), number.dtype, number.shape) == (torch.Tensor, torch.int16, ())
    assert type(real) is np.float32


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"a": [1, 2], "b": {"c": torch.zeros(3)}}, r"batch\['a'\] has 2 items and batch\['b'\]\['c'\] has 3. A li"),
        ({}, "got a dict without columns"),
        ({"a": [1, 2], "b": torch.tensor(3)}, r"got a Tensor of shape \(\) in batch\['b'\]"),
        ([{"__key__": "a", "x": [0]}], r"got a str in batch\[0\]\['__key__'\]. To split lists of samples, use"),
        (3, "got a int in batch"),
    ],
)
def test_invalid_batches(batch: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        list(unbatch_samples([batch]))
