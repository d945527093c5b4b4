"""Crops: the boxes that are drawn, and images that are cropped while they are decoded."""

from __future__ import annotations

import io
import math
import random
from typing import Any

import numpy as np
import PIL.ExifTags
import PIL.Image
import PIL.ImageOps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_codecs import encoded, photo
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes.codecs.crops import Box, CenterCrop, Crop, RandomResizedCrop
from wds_datapipes.codecs.images import IMAGE_SPECS, ImageDecoder


class WholeImage(Crop):
    def select(self, width: int, height: int, rng: random.Random) -> Box:
        return Box(0, 0, width, height)


class FixedBox(Crop):
    def __init__(self, box: Box, size: tuple[int, int]) -> None:
        super().__init__(size)
        self.box = box

    def select(self, width: int, height: int, rng: random.Random) -> Box:
        return self.box


sides = st.integers(1, 3000)


@given(width=sides, height=sides, seed=st.integers(0, 1000), low=st.floats(0.01, 1), wide=st.floats(0.2, 5))
def test_random_boxes_are_inside_the_image(width: int, height: int, seed: int, low: float, wide: float) -> None:
    crop = RandomResizedCrop(8, scale=(low, 1.0), ratio=(min(1, wide), max(1, wide)))
    box = crop.select(width, height, random.Random(seed))
    assert box.width >= 1
    assert box.height >= 1
    assert 0 <= box.left <= width - box.width
    assert 0 <= box.top <= height - box.height


def test_random_boxes_have_the_areas_and_ratios_of_the_transform() -> None:
    crop = RandomResizedCrop(224, flip_probability=0.25)
    rng = random.Random(5)
    boxes = [crop.select(500, 400, rng) for _ in range(4000)]
    areas = np.array([box.width * box.height / 200_000 for box in boxes])
    ratios = np.array([box.width / box.height for box in boxes])
    assert 0.075 < areas.min() < 0.1
    assert 0.95 < areas.max() <= 1
    # Areas are uniform, but those that do not fit with their ratio are redrawn.
    assert abs(areas.mean() - 0.445) < 0.02
    assert abs(np.log(ratios).mean()) < 0.06
    assert math.log(3 / 4) - 0.02 < np.log(ratios).min()
    assert np.log(ratios).max() < math.log(4 / 3) + 0.02
    assert abs(np.mean([box.is_mirrored for box in boxes]) - 0.25) < 0.03


def test_an_image_without_a_fitting_box_is_cropped_in_its_center() -> None:
    crop = RandomResizedCrop(8, scale=(1.0, 1.0))
    assert crop.select(1000, 10, random.Random(0))[:4] == (493, 0, 13, 10)
    assert crop.select(10, 1000, random.Random(0))[:4] == (0, 493, 10, 13)


@given(width=sides, height=sides)
def test_a_center_crop_takes_its_part_of_the_short_side(width: int, height: int) -> None:
    box = CenterCrop(224, resize=256).select(width, height, random.Random())
    assert box.width == box.height == max(1, round(min(width, height) * 7 / 8))
    assert abs(2 * box.left + box.width - width) <= 1
    assert abs(2 * box.top + box.height - height) <= 1
    side = min(width, height)
    assert CenterCrop(100).select(width, height, random.Random())[2:4] == (side, side)


@pytest.mark.parametrize("spec", [spec for spec, result in IMAGE_SPECS.items() if result.mode != "RGBA"])
@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_each_spec_is_cropped_as_pillow_crops_it(spec: str, form: str) -> None:
    mode = IMAGE_SPECS[spec].mode
    image = photo(90, 120)
    data = encoded(image, form, **({"quality": 95} if form == "JPEG" else {}))
    box = Box(17, 9, 80, 70, is_mirrored=True)
    whole = PIL.Image.open(io.BytesIO(data)).convert(mode)
    part = whole.crop((17, 9, 97, 79)).resize((24, 32), PIL.Image.Resampling.BILINEAR)
    wanted = np.asarray(part.transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT), np.float32)
    found = np.asarray(ImageDecoder(spec, crop=FixedBox(box, (32, 24))).decode(data), np.float32)
    if spec.startswith("torch") and mode != "L":
        found = found.transpose(1, 2, 0)
    if IMAGE_SPECS[spec].floats:
        found = found * 255
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= 1


@pytest.mark.parametrize("mode", ["LA", "P", "RGBA", "1", "I;16"])
@pytest.mark.parametrize("spec", ["rgb8", "torchrgba8", "torchl8", "pil"])
def test_images_of_all_modes_are_cropped(mode: str, spec: str) -> None:
    image = photo(40, 60)
    if mode == "I;16":
        image = PIL.Image.fromarray(np.arange(2400, dtype=np.uint16).reshape(40, 60) * 27)
    data = encoded(image if mode == "I;16" else image.convert(mode), "PNG")
    plain = ImageDecoder(spec).decode(data)
    same = ImageDecoder(spec, crop=WholeImage((40, 60))).decode(data)
    assert type(plain) is type(same)
    np.testing.assert_array_equal(np.asarray(same), np.asarray(plain))
    half = ImageDecoder(spec, crop=WholeImage((20, 30))).decode(data)
    shape = np.asarray(plain).shape
    assert np.asarray(half).shape == tuple({40: 20, 60: 30}.get(side, side) for side in shape)
    assert abs(np.asarray(half, float).mean() - np.asarray(plain, float).mean()) < 2


@pytest.mark.parametrize("min_size", [1, 60, 241])
def test_min_size_applies_to_the_cropped_part(min_size: int) -> None:
    data = encoded(photo(480, 640), "JPEG", quality=95)
    box = Box(100, 120, 300, 240)
    exact = ImageDecoder("rgb8", crop=FixedBox(box, (30, 30))).decode(data).astype(int)
    found = ImageDecoder("rgb8", crop=FixedBox(box, (30, 30)), min_size=min_size).decode(data).astype(int)
    assert found.shape == (30, 30, 3)
    assert np.abs(found - exact).mean() < 12
    if min_size > 120:
        np.testing.assert_array_equal(found, exact)


def test_bicubic_differs_from_bilinear_and_stays_in_range() -> None:
    image = PIL.Image.fromarray((np.indices((40, 40)).sum(0) % 2 * 65535).astype(np.uint16))
    data = encoded(image, "PNG")
    bilinear = ImageDecoder("l", crop=CenterCrop(64)).decode(data)
    bicubic = ImageDecoder("l", crop=CenterCrop(64, interpolation="bicubic")).decode(data)
    assert not np.allclose(bilinear, bicubic)
    assert bicubic.min() >= 0
    assert bicubic.max() <= 1


def test_the_representation_can_be_evaluated() -> None:
    names = {"ImageDecoder": ImageDecoder, "RandomResizedCrop": RandomResizedCrop, "CenterCrop": CenterCrop}
    for crop in (RandomResizedCrop((3, 4), flip_probability=0.5), CenterCrop(3, resize=4)):
        decoder = ImageDecoder("rgb8", crop=crop)
        assert vars(eval(repr(decoder), names).crop) == vars(crop)


def rotated(orientation: int, form: str, height: int = 64, width: int = 96) -> bytes:
    exif = PIL.Image.Exif()
    exif[PIL.ExifTags.Base.Orientation] = orientation
    options = {"quality": 95} if form == "JPEG" else {"lossless": True} if form == "WEBP" else {}
    return encoded(photo(height, width), form, exif=exif, **options)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("turbo", [True, False])
def test_photographs_are_upright_on_request(
    orientation: int, form: str, turbo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not turbo:
        monkeypatch.setattr("wds_datapipes.codecs.images.open_jpeg", lambda data: None)
    data = rotated(orientation, form)
    image = PIL.Image.open(io.BytesIO(data))
    wanted = np.asarray(PIL.ImageOps.exif_transpose(image).convert("RGB"))
    for spec in ("rgb8", "pil", "torchrgb8", "rgb"):
        found = ImageDecoder(spec, exif_orientation=True).decode(data)
        pixels = np.moveaxis(found.numpy(), 0, 2) if spec == "torchrgb8" else np.asarray(found)
        np.testing.assert_array_equal(np.rint(pixels * 255) if spec == "rgb" else pixels, wanted)
    if form != "TIFF":
        stored = encoded(photo(64, 96), form, **({"quality": 95} if form == "JPEG" else {}))
        if form != "WEBP":
            np.testing.assert_array_equal(ImageDecoder("rgb8").decode(data), ImageDecoder("rgb8").decode(stored))
        assert ImageDecoder("rgb8").decode(data).shape == (64, 96, 3)
    height, width, _ = wanted.shape
    top, left = (height - 64) // 2, (width - 64) // 2
    square = ImageDecoder("rgb8", exif_orientation=True, crop=CenterCrop(64)).decode(data)
    np.testing.assert_array_equal(square, wanted[top : top + 64, left : left + 64])


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("min_size", [None, 20])
def test_a_crop_is_that_of_the_upright_image(orientation: int, min_size: int | None) -> None:
    data = rotated(orientation, "JPEG", 480, 640)
    upright = ImageDecoder("rgb8", exif_orientation=True).decode(data)
    # At a fraction of its size, a JPEG is not what resizing makes of its pixels.
    image = PIL.Image.fromarray(upright)
    stored = encoded(image) if min_size is None else encoded(image, "JPEG", quality=95)
    for seed in range(5):
        crop = RandomResizedCrop(48, flip_probability=0.5)
        random.seed(seed)
        found = ImageDecoder("rgb8", crop=crop, exif_orientation=True, min_size=min_size).decode(data)
        random.seed(seed)
        wanted = ImageDecoder("rgb8", crop=crop, min_size=min_size).decode(stored)
        assert np.abs(found.astype(int) - wanted).mean() < (3 if min_size else 0.01)


def test_batches_of_upright_images() -> None:
    samples: list[dict[str, Any]] = [{"__key__": str(number), "jpg": rotated(number, "JPEG")} for number in (6, 8)]
    decoder = ImageDecoder("torchrgb8", exif_orientation=True)
    [batch] = IterableWrapper(samples).batch(2).decode_batch(decoder)
    for image, sample in zip(batch["jpg"], samples, strict=True):
        assert torch.equal(image, decoder.decode(sample["jpg"]))
    assert batch["jpg"].shape == (2, 3, 96, 64)
    assert repr(decoder) == "ImageDecoder('torchrgb8', exif_orientation=True)"
