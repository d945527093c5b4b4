"""Unbatching: the inverse of a collation."""

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
    """Return a value with tensors and arrays replaced by lists and numbers, and with its tuples unchanged."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        each_plain = [plain(each) for each in value]
        return each_plain if isinstance(value, list) else tuple(each_plain)
    return value


@given(names=st.sets(st.sampled_from(["number", "text", "array", "tensor"]), min_size=1), count=st.integers(1, 4))
def test_batches_collated_by_torch_are_unbatched(names: set[str], count: int) -> None:
    def sample(number: int) -> dict[str, Any]:
        numbers = torch.full((2,), number)
        values = {"number": number, "text": f"text {number}", "array": numbers.numpy(), "tensor": numbers}
        return {name: values[name] for name in names}

    samples = list(map(sample, range(count)))
    assert plain(list(unbatch_samples([default_collate(samples)] * 2))) == plain(samples) * 2


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ((torch.tensor([1, 2]), ["a", "b"]), [(1, "a"), (2, "b")]),
        ([torch.tensor([1, 2]), ("a", "b")], [[1, "a"], [2, "b"]]),
        (Pair(np.array([1, 2]), [None, 3]), [Pair(1, None), Pair(2, 3)]),
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
        ({"a": [1, 2], "b": torch.zeros(3)}, "'a' has 2 items and 'b' has 3. A list in a batch"),
        ({}, "got an empty dict"),
        ({"a": [1, 2], "b": torch.tensor(3)}, r"got a Tensor of shape \(\) in 'b'"),
        ({"a": [1, 2], "b": {"c": [3, 4]}}, "got a dict in 'b'.*to split dicts in a batch, take them out first"),
        ([{"__key__": "a", "x": [0]}, [1]], "got a dict in 0. To split lists of samples, use"),
        (3, "got a int in 0"),
    ],
)
def test_invalid_batches(batch: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        list(unbatch_samples([batch]))
