"""Batches are collated as in webdataset; if that is impossible, there is an error."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from same_values import assert_same
from webdataset.filters import default_collation_fn

from wds_datapipes import collate_samples

PICTURES = [Image.new("L", (2, 2), color) for color in (0, 255)]


class Point(NamedTuple):
    x: int
    y: str


#: Samples that both collate identically.
ALIKE: dict[str, list[Any]] = {
    "numbers": [(1, 1.5, True, 2**40), (2, 2.5, False, -1)],
    "numbers of several types": [(1, True), (2.5, 2)],
    "numbers of numpy": [(np.float64(1), np.int64(2), np.float32(3)), (np.float64(1), np.int64(2), np.float32(3))],
    "text": [("a", b"x"), ("bcd", b"")],
    "nothing first": [(None,), (3,)],
    "images": [(picture, 1) for picture in PICTURES],
    "arrays": [(np.zeros((2, 3), np.uint8), np.array(1)), (np.ones((2, 3), np.uint8), np.array(2))],
    "tensors": [(torch.zeros(2, 3), torch.tensor(1)), (torch.ones(2, 3), torch.tensor(2))],
    "lists": [([1, 2, 3], [1, 2]), ([], [3, 4])],
    "tuples in samples": [((1, 2), "a"), ((1,), "b")],
    "dicts in samples": [({"boxes": [1]}, 1), ({"other": None}, 2)],
    "dicts": [{"__key__": "a", "json": {"a": [1]}, "cls": 1}, {"__key__": "b", "json": {}, "cls": 2}],
    "dicts in another order": [{"a": 1, "b": "x"}, {"b": "y", "a": 2}],
    "samples that are lists": [[1, "a"], [2, "b"]],
    "named tuples": [Point(1, "a"), Point(2, "b")],
    "one sample": [({"a": 1}, torch.zeros(3), 4)],
}


@pytest.mark.parametrize("options", [{}, {"combine_scalars": False}, {"combine_tensors": False}], ids=str)
@pytest.mark.parametrize("name", ALIKE)
def test_batches_are_those_of_webdataset(name: str, options: dict[str, Any]) -> None:
    ours, theirs = collate_samples(ALIKE[name], **options), default_collation_fn(ALIKE[name], **options)
    assert_same(ours, theirs, ordered=False)


#: Tensors and arrays of different shapes; webdataset raises an AssertionError without a name, or worse.
RAGGED: dict[str, list[Any]] = {
    "tensors": [(torch.zeros(2),), (torch.zeros(3),)],
    "arrays": [(np.zeros((2, 3)),), (np.zeros((2, 2)),)],
    "tensors and nothing": [(torch.zeros(2),), (None,)],
    "arrays and tensors": [(np.zeros(2),), (torch.zeros(2),)],
}


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_fields_are_an_error_or_a_list(name: str) -> None:
    samples = RAGGED[name]
    with pytest.raises(
        ValueError, match=r"the same shape, but field 0 has .*, .*\. Pad them first, or keep them in a "
    ):
        collate_samples(samples)
    if name != "arrays and tensors":  # webdataset makes an array of these
        with pytest.raises((AssertionError, TypeError, AttributeError)):
            default_collation_fn(samples)
    [column] = collate_samples(samples, ragged="list")
    assert all(one is two for one, (two,) in zip(column, samples, strict=True))
    assert_same(collate_samples(samples, combine_tensors=False), (column,))


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        ([], ValueError, "at least one sample"),
        ([{"a": 1}, {"b": 1}], ValueError, r"same fields, but sample 0 has \['a'\] and sample 1 has \['b'\]"),
        ([(1, 2), (1,)], ValueError, r"same fields, but sample 0 has \[0, 1\] and sample 1 has \[0\]"),
        (["ab"], TypeError, "dicts or tuples, but got a str"),
    ],
)
def test_invalid_batches(samples: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        collate_samples(samples)
