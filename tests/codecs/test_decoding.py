"""The choice of a decoder for each field, and the errors of decoders."""

from __future__ import annotations

import gzip
import pickle
from typing import Any

import pytest
from error_facts import naming
from plain_codecs import wds_decode

from wds_datapipes.codecs.extensions import ByExtension, handle_extension
from wds_datapipes.errors import DecodeError
from wds_datapipes.hints import SKIP


def decode(sample: dict[str, Any], *decoders: Any, **options: Any) -> dict[str, Any]:
    [decoded] = wds_decode([sample], *decoders, **options)
    return decoded


def test_samples_are_new_and_in_order_and_keys_with_two_underscores_are_never_touched() -> None:
    sample = {"__key__": b"\xff", "__meta.json": b"{}", "__x.gz": 3, "_one.txt": b"t", "bin": b"x", "cls": b"1"}
    before = dict(sample)
    decoded = decode(sample)
    assert decoded == {**before, "_one.txt": "t", "cls": 1}
    assert list(decoded) == list(before)
    assert sample == before


def test_the_order_is_gz_keyword_given_basic() -> None:
    asked: list[str] = []

    def asks(name: str, value: Any = None) -> Any:
        def ask(*arguments: Any) -> Any:
            asked.append(f"{name}{arguments}")
            return value

        return ask

    sample = {"txt.gz": gzip.compress(b"t")}
    assert decode(sample, asks("first"), asks("second"), txt=asks("keyword")) == {"txt.gz": "t"}
    assert asked == ["keyword(b't',)", "first('txt', b't')", "second('txt', b't')"]
    assert decode(sample, asks("first", 1), asks("second", 2)) == {"txt.gz": 1}
    assert decode(sample, asks("first", 1), txt=asks("keyword", 0)) == {"txt.gz": 0}


def test_the_longer_keyword_comes_first() -> None:
    both = {"png": lambda data: "image", "seg.png": lambda data: "mask"}
    for keywords in (both, dict(reversed(both.items()))):
        assert decode({"png": b"", "seg.png": b"", "a.seg.png": b"", "oldseg.png": b""}, **keywords) == {
            "png": "image",
            "seg.png": "mask",
            "a.seg.png": "mask",
            "oldseg.png": "image",
        }


@pytest.mark.parametrize(
    ("extensions", "taken", "left"),
    [
        ("jpg", ["jpg", "JPG", "a.jpg", "a.Jpg"], ["jpeg", "xjpg", "jpg.a", ""]),
        ("seg.jpg", ["seg.jpg", "a.seg.JPG"], ["jpg", "aseg.jpg", "seg.a.jpg"]),
        ([".jpg", "png"], ["jpg", "png"], ["gif"]),
    ],
)
def test_handle_extension_matches_whole_trailing_parts(extensions: Any, taken: list[str], left: list[str]) -> None:
    decoder = handle_extension(extensions, len)
    assert isinstance(decoder, ByExtension)
    for field in taken:
        assert decode({field: b"four"}, decoder) == {field: 4}
        assert decoder(field, b"four") == 4
    for field in left:
        assert decode({field: b"four"}, decoder) == {field: b"four"}
        assert decoder(field, b"four") is None


def test_only_names_whole_fields() -> None:
    sample = {"jpg": b"1", "cls": b"1", "a.cls": b"1", "txt": 5}
    for only in ("cls x", ["cls"], {"cls"}, iter(["cls"])):
        assert decode(sample, only=only) == {**sample, "cls": 1}


def test_values_that_are_not_bytes_pass_only_with_partial() -> None:
    sample = {"__key__": "a", "cls": 7, "txt": b"t", "x": None}
    assert decode(sample, partial=True) == {**sample, "txt": "t"}
    with pytest.raises(DecodeError, match=naming("'cls'", "'a'", "int", "partial=True")):
        decode(sample)
    with pytest.raises(DecodeError, match=naming("'x'", "NoneType")):
        decode({"x": None})


def test_the_error_names_shard_sample_field_decoder_and_cause() -> None:
    def parse(data: bytes) -> int:
        raise KeyError("label")

    with pytest.raises(DecodeError) as caught:
        decode({"__key__": "d/7", "__url__": "http://x/s.tar", "a.bin": b"0123456789abcdefgh"}, bin=parse)
    text = str(caught.value)
    assert "field 'a.bin' of sample 'd/7' in shard 'http://x/s.tar' cannot be decoded by " in text
    assert "parse (for bin): KeyError: 'label'. The data is 18 bytes starting with b'0123456789abcdef'" in text
    assert caught.value.hints == (SKIP,)
    assert isinstance(caught.value.__cause__, KeyError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_items_that_are_not_samples_are_refused() -> None:
    with pytest.raises(TypeError, match="got a tuple: put it after group_samples"):
        list(wds_decode([(b"1", b"2")], on_error="skip"))
