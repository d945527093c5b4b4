"""Decoders that are functions of a name and bytes, including those written for webdataset."""

from __future__ import annotations

import gzip
import pickle
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import webdataset
from error_facts import naming
from torch.utils.data.datapipes.iter import IterableWrapper
from webdataset import autodecode

from wds_datapipes import Continue
from wds_datapipes.errors import DecodeError

SAMPLE = {"__key__": "a", "png": b"p", "seg.png": b"s", "JPG": b"j", "cls": b"7"}


def ends_in_png(key: str, data: bytes) -> Any:
    """As in webdataset's README."""
    if not key.endswith(".png"):
        return None
    return "image", data


def ends_in_one_of(key: str, data: bytes) -> Any:
    return ("image", data) if key.lower().endswith((".png", ".jpg")) else None


def is_mask(key: str, data: bytes) -> Any:
    return ("mask", data) if key.endswith(".seg.png") else None


def decode(sample: dict[str, Any], *decoders: Any, **options: Any) -> dict[str, Any]:
    [decoded] = IterableWrapper([sample]).wds_decode(*decoders, **options)
    assert isinstance(decoded, dict)
    return decoded


#: One that webdataset makes.
own = autodecode.handle_extension("seg.png", lambda data: ("mask", data))


@pytest.mark.parametrize("function", [ends_in_png, ends_in_one_of, is_mask, own, autodecode.basichandlers])
def test_functions_written_for_webdataset_decode_the_same(function: Callable[[str, bytes], Any]) -> None:
    assert decode(SAMPLE, function) == webdataset.autodecode.Decoder([function])(SAMPLE)


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


def test_a_continued_field_is_passed_on_as_bytes() -> None:
    decoded = decode({"zz": zlib.compress(b"7")}, zz=lambda data: Continue(".cls", zlib.decompress(data)))
    assert decoded == {"zz": 7}
    assert decode({"png.zz": zlib.compress(b"p")}, ends_in_png, partial(inflate, Continue)) == {"png.zz": b"p"}
    with pytest.raises(DecodeError, match=naming("Continue('cls', ...)", "bytes", "not a str")):
        decode({"zz": b""}, zz=lambda data: Continue("cls", "7"))  # type: ignore[arg-type]
    with pytest.raises(DecodeError, match=r"field 'cls\.zz' .* cannot be decoded by the cls codec"):
        decode({"__key__": "a", "cls.zz": zlib.compress(b"seven")}, partial(inflate, Continue))


def test_a_name_that_a_decoder_keeps_is_a_plain_string() -> None:
    name = decode({"left.Seg.png": b""}, lambda field, data: field)["left.Seg.png"]
    for kept in (name, pickle.loads(pickle.dumps(name))):
        assert kept == "left.Seg.png"
        assert {"left.Seg.png": 1}[kept] == 1
        assert kept.endswith((".Seg.png", ".left.Seg.png"))
        assert kept.lower().endswith(".left.seg.png")
        assert not kept.endswith((".eg.png", ".seg.png", ".x.left.Seg.png"))
