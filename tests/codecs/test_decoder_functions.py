"""Decoders that are functions of a name and bytes, including those written for webdataset."""

from __future__ import annotations

import copy
import gzip
import pickle
import re
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import webdataset
from torch.utils.data.datapipes.iter import IterableWrapper
from webdataset import autodecode

from wds_datapipes import Continue
from wds_datapipes.codecs.extensions import FieldName
from wds_datapipes.errors import DecodeError

SAMPLE = {"__key__": "a", "png": b"p", "seg.png": b"s", "JPG": b"j", "cls": b"7"}


def ends_in_png(key: str, data: bytes) -> Any:
    """As in webdataset's README."""
    if not key.endswith(".png"):
        return None
    return "image", data


def ends_in_one_of(key: str, data: bytes) -> Any:
    return ("image", data) if key.lower().endswith((".png", ".jpg")) else None


def has_extension(key: str, data: bytes) -> Any:
    return ("image", data) if re.sub(r".*[.]", "", key) == "png" else None


def is_mask(key: str, data: bytes) -> Any:
    return ("mask", data) if key.endswith(".seg.png") else None


def last_part(key: str, data: bytes) -> Any:
    return ("image", data) if key.split(".")[-1].lower() in {"png", "jpg"} else None


def all_but_text(key: str, data: bytes) -> Any:
    return None if key.endswith(".cls") else ("image", data)


def decode(sample: dict[str, Any], *decoders: Any, **options: Any) -> dict[str, Any]:
    [decoded] = IterableWrapper([sample]).wds_decode(*decoders, **options)
    assert isinstance(decoded, dict)
    return decoded


@pytest.mark.parametrize(
    "function",
    [ends_in_png, ends_in_one_of, has_extension, is_mask, last_part, all_but_text, autodecode.basichandlers],
)
def test_functions_written_for_webdataset_decode_alike(function: Callable[[str, bytes], Any]) -> None:
    assert decode(SAMPLE, function) == webdataset.autodecode.Decoder([function])(SAMPLE)


def test_webdatasets_own_function_for_an_extension() -> None:
    decoder = autodecode.handle_extension("seg.png", lambda data: ("mask", data))
    assert decode(SAMPLE, decoder) == webdataset.autodecode.Decoder([decoder])(SAMPLE)


def test_a_name_is_the_plain_string_in_everything_but_its_extensions() -> None:
    name = FieldName("left.Seg.png")
    assert name == "left.Seg.png"
    assert hash(name) == hash("left.Seg.png")
    assert {"left.Seg.png": 1}[name] == 1
    assert name.endswith(("png", ".png", ".Seg.png", ".left.Seg.png"))
    assert name.endswith(".png", 4)
    assert not name.endswith((".eg.png", ".seg.png", ".x.left.Seg.png"))
    assert name.lower().endswith(".left.seg.png")
    assert not FieldName("").endswith(".png")
    assert FieldName("").endswith("")
    for again in (copy.deepcopy(name), pickle.loads(pickle.dumps(name))):
        assert again == name
        assert again.endswith(".left.Seg.png")
    with pytest.raises(TypeError):
        name.endswith(3)  # type: ignore[arg-type]


def inflate(make: Callable[[str, bytes], Any], key: str, data: bytes) -> Any:
    return make(key[: -len(".zz")], zlib.decompress(data)) if key.endswith(".zz") else None


@pytest.mark.parametrize("make", [Continue, webdataset.autodecode.Continue])
@pytest.mark.parametrize(
    ("field", "data", "value"),
    [
        ("cls.zz", b"7", 7),
        ("json.zz", b'{"a": 1}', {"a": 1}),
        ("a.txt.zz", b"text", "text"),
        ("png.zz", b"p", ("image", b"p")),
        ("seg.png.zz", b"s", ("image", b"s")),
        ("bin.zz", b"left", b"left"),
        ("txt.gz.zz", gzip.compress(b"twice", mtime=0), "twice"),
    ],
)
def test_continued_fields_go_to_the_following_decoders(
    make: Callable[[str, bytes], Any], field: str, data: bytes, value: Any
) -> None:
    sample = {"__key__": "a", field: zlib.compress(data), "png": b"x"}
    decoded = decode(sample, partial(inflate, make), ends_in_png)
    assert decoded == {"__key__": "a", field: value, "png": ("image", b"x")}
    assert list(decoded) == list(sample)


def test_continued_fields_do_not_go_to_previous_decoders() -> None:
    assert decode({"png.zz": zlib.compress(b"p")}, ends_in_png, partial(inflate, Continue)) == {"png.zz": b"p"}


def test_a_function_for_an_extension_may_continue() -> None:
    decoded = decode({"zz": zlib.compress(b"7")}, zz=lambda data: Continue(".cls", zlib.decompress(data)))
    assert decoded == {"zz": 7}


def test_continued_fields_are_bytes() -> None:
    with pytest.raises(DecodeError, match=r"Continue\('cls', \.\.\.\) must hold the bytes to decode next, not a str"):
        decode({"zz": b""}, zz=lambda data: Continue("cls", "7"))  # type: ignore[arg-type]


def test_a_value_of_a_class_of_that_name_is_a_value() -> None:
    value = type("Continue", (), {})()
    assert decode({"zz": b""}, zz=lambda data: value)["zz"] is value


def test_a_decoder_that_fails_after_continuing_is_named() -> None:
    with pytest.raises(DecodeError, match=r"field 'cls\.zz' .* cannot be decoded by the cls codec"):
        decode({"__key__": "a", "cls.zz": zlib.compress(b"seven")}, partial(inflate, Continue))
