"""Images: the seventeen specs compared with webdataset's own decoder, and the intended differences."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_codecs import encoded, wds_decode
from same_values import assert_same
from torch.utils.data.datapipes.iter import IterableWrapper
from webdataset import autodecode

from wds_datapipes.codecs import pillow_plugins
from wds_datapipes.codecs.images import IMAGE_EXTENSIONS, PLUGIN_EXTENSIONS, ImageDecoder
from wds_datapipes.errors import DecodeError, MissingDependencyError

HEIGHT, WIDTH = 20, 30


def picture(mode: str, height: int = HEIGHT, width: int = WIDTH) -> PIL.Image.Image:
    random = np.random.default_rng(7)
    if mode in ("1", "L", "P", "CMYK"):
        return PIL.Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)).convert(mode)
    channels = {"LA": 2, "RGB": 3, "RGBA": 4}[mode]
    return PIL.Image.fromarray(random.integers(0, 256, (height, width, channels), np.uint8), mode=None)


def smooth(height: int, width: int) -> PIL.Image.Image:
    return picture("RGB", 8, 8).resize((width, height), PIL.Image.Resampling.BICUBIC)


EIGHT_BIT = {
    **{f"png {mode}": ("png", encoded(picture(mode))) for mode in ("1", "L", "LA", "P", "RGBA")},
    "png transparent P": ("png", encoded(picture("P"), transparency=3)),
    "jpg": ("jpg", encoded(picture("RGB"), "JPEG")),
    "jpg gray": ("jpeg", encoded(picture("L"), "JPEG")),
    "jpg CMYK": ("jpg", encoded(picture("CMYK"), "JPEG")),
    "webp": ("webp", encoded(picture("RGBA"), "WEBP")),
    "tif": ("seg.tif", encoded(picture("RGB"), "TIFF")),
}


def decode(spec: str, field: str, data: bytes) -> Any:
    [sample] = wds_decode([{field: data}], spec)
    return sample[field]


@pytest.mark.parametrize("spec", autodecode.imagespecs)
@pytest.mark.parametrize("kind", EIGHT_BIT)
def test_eight_bit_images_are_webdatasets_bit_for_bit(spec: str, kind: str) -> None:
    field, data = EIGHT_BIT[kind]
    wanted = autodecode.imagehandler(spec)(f".{field}", data)
    found = decode(spec, field, data)
    assert_same(found, wanted)
    if isinstance(found, torch.Tensor):
        assert found.is_contiguous()
    elif isinstance(found, np.ndarray):
        assert found.flags.c_contiguous
        assert found.flags.writeable
        assert found.flags.owndata


def test_image_extensions_are_those_that_pillow_reads() -> None:
    PIL.Image.init()
    readable = {extension[1:] for extension, form in PIL.Image.EXTENSION.items() if form in PIL.Image.OPEN}
    assert set(IMAGE_EXTENSIONS) - readable == {"image", "img"}
    assert not {*IMAGE_EXTENSIONS} & {*PLUGIN_EXTENSIONS}
    assert list(IMAGE_EXTENSIONS) == sorted(IMAGE_EXTENSIONS)


def test_specs_apply_only_to_image_extensions() -> None:
    jpeg = encoded(picture("RGB"), "JPEG")
    others = dict.fromkeys(("h5", "hdf", "mpg", "mpeg", "rgb", "ps", "fits", "bin"), b"not a picture")
    [sample] = wds_decode([{**others, "cls": b"3", "img": jpeg, "image": jpeg, "JPG": jpeg}], "rgb8")
    assert {field: sample[field] for field in others} == others
    assert sample["cls"] == 3
    assert {sample[field].shape for field in ("img", "image", "JPG")} == {(HEIGHT, WIDTH, 3)}


DEEP = np.array([[0, 1, 127, 128], [129, 257, 32768, 65535]], np.uint16)


@pytest.mark.parametrize(("form", "field"), [("PNG", "png"), ("TIFF", "tif"), ("PPM", "pgm")])
def test_sixteen_bits_are_scaled(form: str, field: str) -> None:
    data = encoded(PIL.Image.fromarray(DEEP), form)
    small = np.array([[0, 0, 0, 0], [1, 1, 128, 255]], np.uint8)
    exact = (DEEP / 65535).astype(np.float32)
    for spec in ("l8", "torchl8", "pill"):
        np.testing.assert_array_equal(np.asarray(decode(spec, field, data)), small)
    np.testing.assert_array_equal(decode("rgb8", field, data), np.stack([small] * 3, 2))
    np.testing.assert_allclose(decode("l", field, data), exact, rtol=1e-6)
    np.testing.assert_allclose(decode("torch", field, data), np.stack([exact] * 3), rtol=1e-6)
    opaque = np.stack([exact, exact, exact, np.ones_like(exact)], 2)
    np.testing.assert_allclose(decode("rgba", field, data), opaque, rtol=1e-6)


def test_pixels_without_a_range_are_refused() -> None:
    for dtype in (np.int32, np.float32):
        data = encoded(PIL.Image.fromarray(np.ones((2, 2), dtype)), "TIFF")
        with pytest.raises(DecodeError, match=r"no fixed range.*custom function"):
            decode("l8", "tif", data)


# Pillow cannot be asked for a side of less than a pixel.
@given(st.integers(8, 90), st.integers(8, 90), st.integers(1, 100))
def test_min_size_picks_the_smallest_scale_that_keeps_the_short_side(height: int, width: int, min_size: int) -> None:
    data = encoded(smooth(height, width), "JPEG")
    found = ImageDecoder("rgb8", min_size=min_size).decode(data).shape[:2]
    sizes = [(-(-height // scale), -(-width // scale)) for scale in (8, 4, 2, 1)]
    wanted = next((size for size in sizes if min(size) >= min_size), sizes[-1])
    assert found == wanted


def test_min_size_looks_like_the_whole_image() -> None:
    image = smooth(256, 384)
    found = ImageDecoder("rgb8", min_size=64).decode(encoded(image, "JPEG", quality=95))
    wanted = np.asarray(image.resize((96, 64), PIL.Image.Resampling.BOX))
    assert found.shape == (64, 96, 3)
    assert np.abs(found.astype(int) - wanted).mean() < 2
    png = encoded(image)
    np.testing.assert_array_equal(ImageDecoder("rgb8", min_size=64).decode(png), ImageDecoder("rgb8").decode(png))


def test_data_that_is_not_an_image_is_a_decode_error() -> None:
    jpeg = encoded(smooth(100, 100), "JPEG")
    nonsense = r"not in an image format that Pillow reads\. The data is b'nonsense'"
    for data, text in ((b"", "data is b''"), (jpeg[:300], "Truncated"), (b"nonsense", nonsense)):
        with pytest.raises(DecodeError, match=rf"field 'jpg' of sample 'a'.*ImageDecoder\('rgb8'\).*{text}"):
            list(wds_decode([{"__key__": "a", "jpg": data}], "rgb8"))


@pytest.mark.parametrize(("form", "package"), [("HEIF", "pillow_heif"), ("JXL", "pillow_jxl")])
def test_heic_and_jpeg_xl_are_decoded_by_their_packages(
    form: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = smooth(64, 96)
    if form == "HEIF":
        pytest.importorskip(package).register_heif_opener()
    else:
        pytest.importorskip(package)
    data = encoded(image, form, quality=95)
    # As in a process that has registered none yet, and under any name, as phones and clouds give photographs.
    monkeypatch.delitem(PIL.Image.OPEN, form)
    monkeypatch.setattr(PIL.Image, "ID", [name for name in PIL.Image.ID if name != form])
    pillow_plugins.register_heic.cache_clear()
    if form == "HEIF":
        for field in ("heic", "HEIC", "heif", "hif", "jpg"):
            assert np.abs(decode("rgb8", field, data).astype(int) - np.asarray(image)).mean() < 6
    monkeypatch.undo()
    extension = {"HEIF": "heic", "JXL": "jxl"}[form]
    found = decode("rgb8", extension, data)
    np.testing.assert_array_equal(found, np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGB")))
    assert np.abs(found.astype(int) - np.asarray(image)).mean() < 6
    with pytest.raises(DecodeError, match=f"field '{extension}'"):
        decode("rgb8", extension, data[: len(data) // 2])


@pytest.mark.parametrize(("extension", "data"), [("heic", b"\0\0\0\x18ftypheic"), ("jxl", b"\xff\x0a")])
def test_heic_and_jpeg_xl_without_their_package_say_what_to_install(
    extension: str, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def require(module: str, *, extra: str, purpose: str) -> None:
        raise MissingDependencyError(f"{module} of {extra} to {purpose}")

    monkeypatch.setattr(pillow_plugins, "require", require)
    monkeypatch.setattr(PIL.Image, "ID", [name for name in PIL.Image.ID if name not in ("HEIF", "JXL")])
    pillow_plugins.register_heic.cache_clear()
    pillow_plugins.register_jxl.cache_clear()
    samples = IterableWrapper([{extension: data}])
    for decoded in (samples.wds_decode("rgb8"), samples.batch(1).decode_batch("torchrgb8")):
        with pytest.raises(MissingDependencyError, match=rf"of {extension} to decode .*{extension}=bytes keeps"):
            list(decoded)
    [sample] = samples.wds_decode("rgb8", **{extension: bytes})
    assert sample[extension] == data
