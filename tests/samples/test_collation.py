"""Batches are collated as in webdataset; if that is impossible, there is an error."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from same_values import assert_same
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from webdataset.filters import default_collation_fn

from wds_datapipes import ImageDecoder, RandomResizedCrop, ShardList, ShardWriter, StatefulShards, collate_samples

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


@pytest.fixture
def photos(folder: Path) -> IterDataPipe[Any]:
    """Samples with images of different sizes."""
    with ShardWriter("a-%d.tar", verbose=False) as writer:
        for number in range(4):
            image = np.full((40 + number, 60, 3), 7, np.uint8)
            writer.write({"__key__": str(number), "jpg": image, "cls": number})
    samples: IterDataPipe[Any] = ShardList(f"{folder}/a-0.tar").load_wds_shards().group_samples()
    return samples


SIZES = (
    r"cannot stack the field 'jpg;png': .* shapes \(3, 40, 60\) and \(3, 41, 60\)\. Decode .*"
    r'wds_decode\(ImageDecoder\("torchrgb8", crop=RandomResizedCrop\(224\)\)\)'
)


@pytest.mark.parametrize("workers", [0, 1])
def test_images_of_different_sizes_lead_to_a_crop(photos: IterDataPipe[Any], workers: int) -> None:
    batches = photos.wds_decode("torchrgb8").to_tuple("jpg;png", "cls").map_tuple(None, int).batch(2).collate()
    with pytest.raises(RuntimeError, match=SIZES):
        list(DataLoader(batches, batch_size=None, num_workers=workers))
    crop = ImageDecoder("torchrgb8", crop=RandomResizedCrop(32))
    images, labels = next(iter(photos.wds_decode(crop).to_tuple("jpg;png", "cls").batch(4).collate()))
    assert (tuple(images.shape), labels.tolist()) == ((4, 3, 32, 32), [0, 1, 2, 3])
    with pytest.raises(ValueError, match=r"field 'jpg' has .*ImageDecoder\(crop=RandomResizedCrop\(224\)\)"):
        list(photos.wds_decode("torchrgb8").batch(2).collate(collate_fn=collate_samples))


#: Items that torch's ``.collate()`` refuses, and what the error says.
REFUSED: dict[str, tuple[list[Any], str]] = {
    "a sample": ([{"a": 1}], r"needs lists of samples, but got a dict: put \.batch\(n\) before it"),
    "a tuple": ([(torch.zeros(3), 1)], r"needs lists of samples, but got a tuple: put \.batch\(n\) before it"),
    "lengths": ([[(torch.zeros(2),), (torch.zeros(3),)]], r"element 0: .* \(2,\) and \(3,\)\. Pad .*ragged=\"list\""),
    "arrays": ([[{"a": np.zeros(2)}, {"a": np.zeros(3)}]], r"cannot stack the field 'a'.* \(2,\) and \(3,\)\. Pad"),
    "many shapes": ([[(np.zeros(n),) for n in range(9)]], r"\(0,\) and \(1,\) and \(2,\) and 6 others"),
    "types": ([[("a", 1), ("b", "c")]], "values of one type in element 1, but this batch has int, str"),
    "fields": ([[{"a": 1, "b": 2}, {"b": 2}]], "some lack the field 'a'"),
    "PIL images": ([[{"png": PICTURES[0]}]], r"the field 'png' is a Image\. Decode images with \.wds_decode\(\"torch"),
    "nothing": ([[(None,)]], "element 0 is a NoneType"),
    "lists": ([[{"json": [1]}, {"json": [1, 2]}]], "needs lists of one size in the field 'json'"),
    "dicts": ([[{"json": {"a": 1}}, {"json": {"b": 1}}]], "needs dicts of one size in the field 'json'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_batch_that_torch_refuses_is_explained(case: str) -> None:
    items, message = REFUSED[case]
    with pytest.raises((RuntimeError, TypeError), match=rf"\.collate\(\) .*{message}"):
        list(StatefulShards(IterableWrapper(items).collate()))


def test_without_a_loader_it_is_explained_after_stages_of_this_package() -> None:
    samples = IterableWrapper([{"__key__": f"{n}", "npy": np.zeros(n)} for n in range(3)]).to_tuple("npy")
    for batches in (samples.batch(3), pickle.loads(pickle.dumps(samples.batch(3)))):
        with pytest.raises(RuntimeError, match=r"\.collate\(\) cannot stack the field 'npy'"):
            list(batches.collate())


def fail(batch: list[Any]) -> None:
    raise RuntimeError(f"no {batch[0]}")


def test_an_error_of_a_function_for_batches_remains() -> None:
    with pytest.raises(RuntimeError, match="no 7"):
        list(StatefulShards(IterableWrapper([7, "a"]).batch(2).collate(collate_fn=fail)))
