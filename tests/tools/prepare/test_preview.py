"""Previews of fields with any content."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from plain_codecs import encoded

from wds_datapipes.codecs import CODECS, UNSAFE
from wds_datapipes.codecs.encoding import EncoderChain
from wds_datapipes.codecs.images import IMAGE_EXTENSIONS
from wds_datapipes.codecs.media import AUDIO_EXTENSIONS, VIDEO_EXTENSIONS
from wds_datapipes.io.read_limits import ReadLimits
from wds_datapipes.tools.prepare.preview import preview_field

#: The name of a field for each module of codecs, its value, and the text of its preview.
VALUES: dict[str, tuple[Any, str, str]] = {
    "array_files:npy": (np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3), r"ndarray float32 \(2, 3\)", "^$"),
    "array_files:npz": ({"a": np.arange(5)}, "dict, 1 entry", r'\{"a": ".ndarray int64 \(5,\)."\}'),
    "plain_values:jsons": ({"a": [1, None, "Bär"]}, "dict, 1 entry", r'\{"a": \[1, null, "Bär"\]\}'),
    "plain_values:cbor": ([1, {"b": b"123"}], "list, 2 items", r'\[1, \{"b": ".bytes of 3: .*"\}\]'),
    "plain_values:msgpack": ({"b": True}, "dict, 1 entry", r'\{"b": true\}'),
    "plain_values:integer": (7, "int", "^7$"),
    "array_files:tenbin": ([np.ones(3, np.float32)], "list, 1 item", r"ndarray float32 \(3,\)"),
    "array_files:pth": (torch.tensor([1.0, float("nan")]), r"Tensor torch.float32 \(2,\)", "^$"),
    "plain_values:text": ("a cat\nsits", "text, 10 characters, 2 lines", "^a cat\nsits$"),
}


@pytest.mark.parametrize("extension", sorted(set(CODECS) - UNSAFE))
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_every_codec_of_the_table(extension: str, suffix: str) -> None:
    value, kind, text = VALUES[CODECS[extension]]
    field = f"a.{extension}{suffix}"
    data = EncoderChain({}).convert_field({"__key__": "a", field: value}, field)
    seen = preview_field(field, data)
    assert (seen.field, seen.size, seen.error, seen.picture) == (field, len(data), "", None)
    assert re.fullmatch(("gzip, " if suffix else "") + kind, seen.kind)
    assert re.search(text, seen.text)


@pytest.mark.parametrize("field", ["pth", "npy", "npz", "json", "jpg", *sorted(UNSAFE)])
def test_no_codec_runs_pickles_in_the_data(field: str, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (tmp_path / "evil").touch, ()

    file = io.BytesIO()
    if field == "pth":
        torch.save(Evil(), file)
    elif field == "npy":
        np.save(file, np.array([Evil()], object), allow_pickle=True)
    elif field == "npz":
        np.savez(file, a=np.array([Evil()], object))
    else:
        pickle.dump(Evil(), file)
    error = preview_field(field, file.getvalue()).error
    assert error == "not decoded, because decoding can run code" if field in UNSAFE else error
    assert not (tmp_path / "evil").exists()


def jpeg(width: int, height: int) -> bytes:
    return encoded(Image.effect_noise((width, height), 50).convert("RGB"), "JPEG")


def test_pictures_are_small_and_keep_their_shape() -> None:
    seen = preview_field("jpg", jpeg(1200, 600), pixels=100)
    assert seen.kind == "JPEG image, 1200 x 600, RGB"
    assert seen.picture is not None
    assert seen.picture.size == (100, 50)


def test_a_broken_image_still_shows_its_size() -> None:
    data = jpeg(300, 200)
    seen = preview_field("jpg", data[: len(data) // 2])
    assert (seen.kind, seen.picture) == ("JPEG image, 300 x 200, RGB", None)
    assert "truncated" in seen.error
    assert preview_field("png", data[:3]).error == "ValueError: the data are not in an image format that Pillow reads"


def test_an_image_that_would_take_all_memory_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wds_datapipes.tools.prepare.preview.LIMITS", ReadLimits(image_pixels=1000))
    seen = preview_field("jpg", jpeg(50, 30))
    assert seen.picture is None
    assert "50 x 30 = 1500 pixels, and the limit is image_pixels=1000" in seen.error


def test_decompression_bombs_are_not_unpacked(monkeypatch: pytest.MonkeyPatch, tracing: Any) -> None:
    monkeypatch.setattr("wds_datapipes.tools.prepare.preview.LIMITS", ReadLimits(member_bytes=1 << 20))
    data = gzip.compress(bytes(30 << 20), 1)
    tracing.start()
    seen = preview_field("txt.gz", data)
    assert tracing.get_traced_memory()[1] < 8 << 20
    assert seen.error.startswith("ReadLimitError: ")
    assert preview_field("txt.gz", gzip.compress(b"a") + gzip.compress(b"b")).text == "ab"
    assert "end" in preview_field("txt.gz", gzip.compress(b"a" * 999)[:-9]).error
    assert preview_field("txt.gz", b"abc").error


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (b"", "empty", ""),
        (b"a\tb\n", "text, 4 characters", "a\tb\n"),
        (b"\x00\x01", "bytes", "00 01"),
        (bytes(range(100)), "bytes", "00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f ..."),
        (b"\xff\xfe", "bytes", "ff fe"),
        ("Bär".encode(), "text, 3 characters", "Bär"),
        (b"\x1b[31m", "bytes", "1b 5b 33 31 6d"),
    ],
)
def test_fields_without_a_codec_are_text_or_bytes(data: bytes, kind: str, text: str) -> None:
    seen = preview_field("thing", data)
    assert (seen.kind, seen.text, seen.error) == (kind, text, "")


def test_long_and_nested_values_are_cut() -> None:
    value = json.dumps({f"k{n}": list(range(50)) for n in range(30)}).encode()
    assert len(preview_field("json", value, characters=100).text) == 103
    assert preview_field("json", b"[" * 100_000).error == "it is nested too deeply"
    assert preview_field("json", b"1" + b"0" * 4000, characters=100).text == f"1{'0' * 99}..."
    assert preview_field("json", b"null")[:2] == ("null", "null")


EXTENSIONS = sorted({*CODECS, *IMAGE_EXTENSIONS, *AUDIO_EXTENSIONS, *VIDEO_EXTENSIONS, "bin", "", "gz", "x.gz"})


@given(field=st.sampled_from(EXTENSIONS), data=st.binary(max_size=200))
@settings(max_examples=60, deadline=None)
def test_no_input_makes_it_fail(field: str, data: bytes) -> None:
    seen = preview_field(field, data)
    assert (seen.field, seen.size) == (field, len(data))
    assert seen.kind
    assert len(seen.text) <= 2003
