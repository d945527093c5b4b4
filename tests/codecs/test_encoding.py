"""Encoding: round trips of the whole table, and refused values."""

from __future__ import annotations

import gzip
import io
import json
import re
from datetime import datetime, timezone
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import webdataset
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp
from PIL import Image
from plain_codecs import wds_decode, wds_encode

from wds_datapipes.codecs import CODECS, IMAGE_FORMATS, UNSAFE
from wds_datapipes.codecs.array_files import DTYPES
from wds_datapipes.errors import EncodeError, UnsafeInputError

PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
ARRAYS = hnp.arrays(
    st.sampled_from(["u1", "<i4", ">i4", "f8", "f2", "?", "U3", "c8"]), hnp.array_shapes(min_dims=0, min_side=0)
)
TENSORS = hnp.arrays(st.sampled_from(["u1", "i8", "f4", "?"]), hnp.array_shapes(min_dims=0, min_side=0)).map(
    torch.from_numpy
)


def nested(plain: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        plain,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    )


JSON = nested(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text())
RECORDS = nested(PLAIN | st.binary()).filter(lambda value: not isinstance(value, bytes))
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])).filter(
    lambda name: not name.endswith(".npy")
)
TENBIN = st.lists(
    st.sampled_from(sorted(DTYPES)).flatmap(lambda name: hnp.arrays(name, hnp.array_shapes(min_dims=0, min_side=0))),
    max_size=3,
)

#: Extension -> values that must survive a round trip unchanged.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("class", "cls", "cls2", "count", "id", "index", "inx"), st.integers()),
    **dict.fromkeys(("htm", "html", "text", "transcript", "txt"), st.text()),
    **dict.fromkeys(("jsn", "json"), JSON),
    **dict.fromkeys(("mp", "msg", "msgpack"), RECORDS),
    "cbor": RECORDS | st.integers() | st.just(datetime(2026, 1, 2, tzinfo=timezone.utc)),
    "npy": ARRAYS,
    "npz": st.dictionaries(NAMES, ARRAYS, max_size=3),
    **dict.fromkeys(("pickle", "pkl", "pyd"), RECORDS | st.complex_numbers(allow_nan=False)),
    "pth": TENSORS | st.dictionaries(st.text(), TENSORS | st.integers(), max_size=3),
    **dict.fromkeys(("tb", "ten", "tenbin"), TENBIN),
}


def encode(field: str, value: Any, **options: Any) -> Any:
    [sample] = wds_encode([{"__key__": "k", "__url__": "s.tar", field: value}], **options)
    assert list(sample) == ["__key__", "__url__", field]
    return sample[field]


def decode(field: str, data: bytes, *decoders: str, allow_pickle: bool = False) -> Any:
    [sample] = wds_decode([{field: data}], *decoders, allow_pickle=allow_pickle)
    return sample[field]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray | np.generic):
        equal = np.array_equal(left, right, equal_nan=left.dtype.kind in "fc")
        return equal and (left.dtype.newbyteorder("=") == right.dtype.newbyteorder("="))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left.nan_to_num(), right.nan_to_num())
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


def test_the_table_contains_every_extension() -> None:
    assert sorted(VALUES) == list(CODECS)
    theirs = set(webdataset.writer.default_handlers)
    assert theirs <= {*CODECS, *IMAGE_FORMATS}
    assert {*CODECS, *IMAGE_FORMATS} - theirs == {"pkl", "pnm", "webp"}


@pytest.mark.parametrize("extension", VALUES)
def test_encoded_values_are_decoded(extension: str) -> None:
    allow_pickle = extension in UNSAFE

    @settings(max_examples=25, deadline=None)
    @given(VALUES[extension])
    def law(value: Any) -> None:
        data = encode(extension, value, allow_pickle=allow_pickle)
        assert type(data) is bytes
        assert same(decode(extension, data, allow_pickle=allow_pickle), value)
        assert encode(extension, value, allow_pickle=allow_pickle) == data
        packed = encode(f"a.{extension}.gz", value, allow_pickle=allow_pickle)
        assert gzip.decompress(packed) == data
        assert packed[4:8] == bytes(4)  # no time

    law()


@settings(deadline=None)
@given(st.binary(), st.sampled_from([*CODECS, *IMAGE_FORMATS, "bin", "unknown"]))
def test_bytes_are_never_encoded_again(data: bytes, extension: str) -> None:
    for value in (data, bytearray(data), memoryview(data)):
        assert encode(extension, value) == data
        assert encode(extension, value, **{extension: repr}) == data
    packed = gzip.compress(data)
    assert encode(f"{extension}.gz", packed) == packed
    with pytest.raises(EncodeError, match=r"field 'txt.gz' of sample 'k'.*uncompressed bytes.*could not be read back"):
        encode("txt.gz", b"a cat")


#: Field, a value that must be refused, and the text of the message.
REFUSED: list[tuple[str, Any, str]] = [
    ("cls", None, r"holds None.*by the cls codec.*It takes an int"),
    ("cls", True, r"the bool True"),
    ("cls", torch.tensor([1, 2]), r"a torch\.Tensor of torch\.int64 and shape \(2,\)"),
    ("txt", None, r"holds None.*It takes a str"),
    ("txt", "half \ud800", "UnicodeEncodeError"),
    ("json", {1, 2}, "a set.*not JSON serializable.*It takes None, bool, int, float"),
    ("json", float("nan"), "the float nan.*not JSON compliant"),
    ("mp", 2**70, "OverflowError"),
    ("npy", [1, 2], "a list.*It takes a NumPy array or a tensor"),
    ("npy", np.array([None]), "numpy.ndarray of object.*would require pickle"),
    ("npy", np.ma.array([1, 2], mask=[False, True]), "MaskedArray is not a plain array"),
    ("npz", [np.ones(2)], "a list.*It takes a dict"),
    ("npz", {"a.npy": np.ones(2)}, "'a.npy' is not a valid name of an array"),
    ("ten", np.ones(2, np.bool_), "tenbin does not support the dtype bool, only f2"),
    ("jpg", np.ones((4, 4, 3)) * 2, r"float64 and shape \(4, 4, 3\).*between 0 and 1, but these are from 2 to 2"),
    ("jpg", np.ones((4, 4, 4), np.uint8), "does not support the mode 'RGBA', only L RGB CMYK"),
    ("png", np.ones((4, 4), np.int64), "pixels must be uint8 or floats"),
    ("png", np.ones((4, 4, 2), np.uint8), r"shape \(H, W\) or \(H, W, C\)"),
    ("png", torch.ones(5, 5, 3), r"a torch\.Tensor of torch\.float32.*has the shape \(H, W\) or \(C, H, W"),
    ("png", "a.png", r"the str 'a\.png'.*by the png codec.*It takes an array"),
    ("webp", Image.new("F", (4, 4)), r"PIL\.Image\.Image of mode F.*does not support the mode 'F'"),
    ("pts", [1, 2], r"a list, which cannot be encoded by any codec.*only codecs for cbor class.*Bytes are written"),
]


@pytest.mark.parametrize(("field", "value", "text"), REFUSED)
def test_a_value_that_cannot_be_written_faithfully_is_refused(field: str, value: Any, text: str) -> None:
    with pytest.raises(EncodeError, match=rf"field '{re.escape(field)}' of sample 'k' in shard 's.tar' .*") as caught:
        encode(field, value)
    assert re.search(text, str(caught.value))
    assert str(caught.value).endswith("ytes are written unchanged")


class Model:
    """An object that torch saves as a pickle that can run code."""

    def __init__(self) -> None:
        self.weights = torch.ones(2)


def test_pickles_are_refused_unless_allowed() -> None:
    with pytest.raises(UnsafeInputError, match=r"field 'pkl.gz' of sample 'k'.*allow_pickle=True"):
        encode("pkl.gz", {"a": 1}, on_error="skip")
    with pytest.raises(UnsafeInputError, match=r"field 'pth' of sample 'k'.*holds more than tensors"):
        encode("pth", Model())
    assert decode("pth", encode("pth", Model(), allow_pickle=True), allow_pickle=True).weights.sum() == 2


def test_only_the_viewed_part_of_a_tensor_is_saved() -> None:
    batch = torch.zeros(1000, 10)
    assert len(encode("pth", batch[3])) < 2000
    assert torch.equal(decode("pth", encode("pth", batch[3])), batch[3])


def test_numbers_of_other_packages_are_classes() -> None:
    for value in (np.int16(5), torch.tensor([5])):
        assert encode("cls", value) == b"5"


def test_text_that_is_json_is_a_json_string_and_is_written_as_it_is_if_given_as_bytes() -> None:
    text = json.dumps({"a": 1})
    assert decode("json", encode("json", text)) == text
    assert decode("json", encode("json", text.encode())) == {"a": 1}
    assert decode("json", encode("json", "\ud800ä")) == "\ud800ä"  # half of a surrogate pair


def test_keywords_come_first_and_the_longer_one_before() -> None:
    options: dict[str, Any] = {"pts": lambda value: bytes(value), "seg.pts": lambda value: b"seg"}
    assert encode("pts", [1, 2], **options) == b"\1\2"
    assert encode("left.SEG.PTS", [1, 2], **options) == b"seg"
    assert gzip.decompress(encode("pts.gz", [1, 2], **options)) == b"\1\2"
    with pytest.raises(EncodeError, match=r"TypeError: it returned the str '\[1\]', not bytes"):
        encode("pts", [1], pts=str)


PIXELS = hnp.arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9), st.just(3)))
GRAY = hnp.arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9)))


@pytest.mark.parametrize("extension", ["png", "tiff", "webp", "ppm"])
def test_images_round_trip_from_every_form(extension: str) -> None:
    @settings(max_examples=10, deadline=None)
    @given(PIXELS, GRAY)
    def law(pixels: np.ndarray, gray: np.ndarray) -> None:
        tensor = torch.from_numpy(pixels).permute(2, 0, 1)
        floats = (pixels / 255).astype(np.float32)
        forms: list[Any] = [tensor, Image.fromarray(pixels), pixels / 255, floats, tensor / 255]
        for form in [*forms, np.ascontiguousarray(pixels[::-1])[::-1]]:
            data = encode(extension, form)
            np.testing.assert_array_equal(decode(extension, data, "rgb8"), pixels)
            assert torch.equal(decode(extension, data, "torch"), tensor / 255)
        for form in (gray, gray[..., None], torch.from_numpy(gray), torch.from_numpy(gray)[None], gray / 255):
            np.testing.assert_array_equal(decode(extension, encode(extension, form), "l8"), gray)

    law()


def test_images_of_other_modes_round_trip() -> None:
    pixels = np.random.default_rng(0).integers(1, 256, (5, 7, 4), np.uint8)
    for extension in ("png", "webp", "tif"):
        np.testing.assert_array_equal(decode(extension, encode(extension, pixels), "rgba8"), pixels)
    for extension, order in (("png", "<"), ("tif", ">"), ("pgm", ">"), ("pnm", "<")):
        gray = np.array([[0, 1, 257], [65535, 4096, 30000]], f"{order}u2")
        found = decode(extension, encode(extension, gray), "l")
        np.testing.assert_array_equal(np.rint(found * 65535).astype("u2"), gray)
    bits = np.array([[True, False, True], [False, False, True]])
    np.testing.assert_array_equal(decode("pbm", encode("pbm", bits), "l8"), bits * np.uint8(255))


@pytest.mark.parametrize("extension", ["jpg", "img"])
def test_jpeg_is_written_as_webdataset_does(extension: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    data = encode(extension, pixels)
    assert data == webdataset.writer.imageencoder(pixels, "jpg")
    assert Image.open(io.BytesIO(data)).format == "JPEG"


def test_an_extension_takes_options() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    full, some, little = (len(encode("jpg", pixels, jpg=options)) for options in ({}, {"quality": 90}, {"quality": 20}))
    assert full > some > little
    assert encode("webp", pixels, webp={"quality": 90})[12:16] == b"VP8 "
    assert encode("webp", pixels)[12:16] == b"VP8L"
    assert encode("webp", pixels, webp={"quality": 90, "lossless": True})[12:16] == b"VP8L"
    assert encode("seg.png", pixels, **{"seg.png": {"compress_level": 0}}) != encode("png", pixels)


def test_tensors_that_are_stored_in_another_way_are_resolved() -> None:
    pair = torch.tensor([1 + 2j, 3 - 4j])
    for value, wanted in ((pair.conj(), [1 - 2j, 3 + 4j]), (pair.conj().imag, [-2, 4]), (pair.real, [1, 3])):
        for extension in ("npy", "npz"):
            found = decode(extension, encode(extension, value if extension == "npy" else {"a": value}))
            np.testing.assert_array_equal(found if extension == "npy" else found["a"], wanted)
    trained = torch.nn.Parameter(torch.ones(2))
    np.testing.assert_array_equal(decode("npy", encode("npy", trained)), [1, 1])
