"""The extra ``turbo``: the same pixels as Pillow's, and damaged files are left to Pillow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_codecs import encoded, photo

from wds_datapipes.codecs import jpeg
from wds_datapipes.codecs.crops import CenterCrop, RandomResizedCrop
from wds_datapipes.codecs.images import ImageDecoder


@contextmanager
def without_turbo() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jpeg, "_simplejpeg", lambda: None)
        yield


def file_of(height: int, width: int, mode: str = "RGB", **options: Any) -> bytes:
    return encoded(photo(height, width, mode, seed=height * width), "JPEG", **{"quality": 90, **options})


#: Chroma subsampling 4:4:4, 4:2:2 and 4:2:0, and files that do not store their rows one after the other.
options_of_files = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["RGB", "L", "CMYK"]),
        "subsampling": st.integers(0, 2),
        "progressive": st.booleans(),
        "restart_marker_rows": st.integers(0, 2),
        "quality": st.integers(20, 100),
    }
)


@settings(max_examples=80)
@given(
    st.integers(1, 200),
    st.integers(1, 200),
    options_of_files,
    st.sampled_from([None, 1, 5, 30]),
    st.sampled_from(["rgb8", "torchrgb8", "cropped"]),
    st.integers(0, 99),
)
def test_pixels_are_those_of_pillow(
    height: int, width: int, options: dict[str, Any], min_size: int | None, kind: str, seed: int
) -> None:
    data = file_of(height, width, **options)
    assert (jpeg.open_jpeg(data) is None) == (options["mode"] == "CMYK")
    crop = RandomResizedCrop(16, flip_probability=0.5) if kind == "cropped" else None
    decoder = ImageDecoder("rgb8" if crop else kind, crop=crop, min_size=min_size)
    random.seed(seed)
    found = np.asarray(decoder.decode(data)).astype(int)
    random.seed(seed)
    with without_turbo():
        wanted = np.asarray(decoder.decode(data)).astype(int)
    assert found.shape == wanted.shape
    # Pillow bundles another release of libjpeg.
    assert np.abs(found - wanted).max() <= 1


def test_a_truncated_file_is_an_error_with_and_without_a_crop() -> None:
    data = file_of(100, 100)
    for crop in (None, CenterCrop(20)):
        for end in (len(data) // 2, len(data) - 30):
            with pytest.raises(OSError, match="truncated"):
                ImageDecoder("rgb8", crop=crop).decode(data[:end])


@settings(max_examples=50)
@given(st.integers(20, 2000), st.integers(0, 255), st.booleans())
def test_a_damaged_file_decodes_as_with_pillow(position: int, byte: int, cropped: bool) -> None:
    data = bytearray(file_of(100, 100))
    data[position % len(data)] = byte
    decoder = ImageDecoder("rgb8", crop=CenterCrop(100) if cropped else None)

    def outcome() -> Any:
        try:
            return decoder.decode(bytes(data)).astype(int)
        except (OSError, ValueError, SyntaxError) as error:
            return type(error)

    found = outcome()
    with without_turbo():
        wanted = outcome()
    if isinstance(wanted, type) or isinstance(found, type):
        assert found is wanted
    else:
        assert np.abs(found - wanted).max() <= 1


def test_damage_in_the_rows_of_a_crop_is_not_hidden_by_the_rest() -> None:
    """libjpeg's warning about the unread rows must not replace a warning about the rows that are read."""
    rows = file_of(160, 160, restart_marker_rows=1)
    marker = rows.index(b"\xff\xd1")
    damaged = rows[:marker] + b"\xff\xd5" + rows[marker + 2 :]
    file = jpeg.open_jpeg(damaged)
    assert file is not None
    assert file.read(rows=80) is None
    intact = jpeg.open_jpeg(rows)
    assert intact is not None
    assert intact.read(rows=80) is not None
