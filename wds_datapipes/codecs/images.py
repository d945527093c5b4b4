"""Image codecs based on Pillow: decode to arrays, tensors or Pillow images by one of seventeen specs, and encode."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from PIL import Image, ImageColor, ImageOps, UnidentifiedImageError

from wds_datapipes.codecs import IMAGE_FORMATS
from wds_datapipes.codecs.extensions import ByExtension, split_extensions
from wds_datapipes.codecs.pixels import deep_gray, on_background, pack, spread, unpack

__all__ = ["IMAGE_EXTENSIONS", "IMAGE_SPECS", "ImageDecoder", "ImageEncoder", "open_image"]

#: The extensions that image specs decode. webdataset accepts every extension that Pillow has a plugin for, and so fails
#: on fields that usually are something else: ``h5 hdf fits grib bufr`` (arrays), ``mpg mpeg fli flc`` (video),
#: ``ps eps wmf emf`` (drawings; Pillow opens some with another program), ``rgb rgba bw im ras`` (raw pixels) and rare
#: old names. ``image`` and ``img`` are JPEG files that webdataset's writer writes and its reader leaves as bytes.
IMAGE_EXTENSIONS = split_extensions(
    "apng avif blp bmp dds dib gif icns ico image img j2c j2k jfif jp2 jpc jpe jpeg jpf jpg jpx "
    "pbm pcx pgm png pnm ppm psd qoi sgi tga tif tiff webp xbm xpm"
)

#: Formats excluded regardless of the extension, as Pillow opens them with other programs.
EXCLUDED_FORMATS = frozenset({"BUFR", "EPS", "GRIB", "HDF5", "WMF"})
#: An image with more than LARGE pixels and more than PIXELS_PER_BYTE pixels per byte counts as a decompression bomb.
LARGE, PIXELS_PER_BYTE = 1 << 24, 10_000

Background: TypeAlias = "str | tuple[int, int, int]"


class _Spec(NamedTuple):
    container: Literal["numpy", "torch", "pil"]
    mode: Literal["L", "RGB", "RGBA"]
    floats: bool


#: Maps specs to their results; see the table in `ImageDecoder`.
IMAGE_SPECS = {
    "l": _Spec("numpy", "L", floats=True),
    "l8": _Spec("numpy", "L", floats=False),
    "pil": _Spec("pil", "RGB", floats=False),
    "pill": _Spec("pil", "L", floats=False),
    "pilrgb": _Spec("pil", "RGB", floats=False),
    "pilrgba": _Spec("pil", "RGBA", floats=False),
    "rgb": _Spec("numpy", "RGB", floats=True),
    "rgb8": _Spec("numpy", "RGB", floats=False),
    "rgba": _Spec("numpy", "RGBA", floats=True),
    "rgba8": _Spec("numpy", "RGBA", floats=False),
    "torch": _Spec("torch", "RGB", floats=True),
    "torchl": _Spec("torch", "L", floats=True),
    "torchl8": _Spec("torch", "L", floats=False),
    "torchrgb": _Spec("torch", "RGB", floats=True),
    "torchrgb8": _Spec("torch", "RGB", floats=False),
    "torchrgba": _Spec("torch", "RGBA", floats=True),
    "torchrgba8": _Spec("torch", "RGBA", floats=False),
}

#: Default options for Pillow.
DEFAULTS: dict[str, dict[str, Any]] = {"JPEG": {"quality": 100}}

#: Maps formats or extensions to the Pillow modes that they store without conversion.
MODES = {
    "JPEG": ("L", "RGB", "CMYK"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "PPM": ("1", "L", "I;16", "RGB"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"),
    "WEBP": ("L", "LA", "P", "RGB", "RGBA"),
    "pbm": ("1",),
    "pgm": ("L", "I;16"),
    "ppm": ("RGB",),
}


class ImageDecoder(ByExtension):
    """Decodes image fields to arrays, tensors or Pillow images.

    | spec                       | value                               | shape       | dtype   | range    |
    |----------------------------|-------------------------------------|-------------|---------|----------|
    | ``l8`` ``rgb8`` ``rgba8``  | numpy array                         | (H, W[, C]) | uint8   | 0 to 255 |
    | ``l`` ``rgb`` ``rgba``     | numpy array                         | (H, W[, C]) | float32 | 0 to 1   |
    | ``torchl8``                | tensor, without a channel dimension | (H, W)      | uint8   | 0 to 255 |
    | ``torchrgb8 torchrgba8``   | tensor                              | (C, H, W)   | uint8   | 0 to 255 |
    | ``torchl``                 | tensor, without a channel dimension | (H, W)      | float32 | 0 to 1   |
    | ``torch torchrgb[a]``      | tensor                              | (C, H, W)   | float32 | 0 to 1   |
    | ``pill pil pilrgb[a]``     | Pillow image, L, RGB or RGBA        |             |         |          |

    Arrays and tensors are contiguous, writable, and own their memory. Values of 8-bit images equal webdataset's, bit
    for bit. 16-bit grayscale images are scaled, whereas webdataset clips them: 65535 becomes 255, or 1.0 in float
    specs, which keep all 16 bits. 32-bit pixels (TIFF) have no fixed range and are rejected.

    Args:
        spec: one of the seventeen words above.
        min_size: decode a JPEG at the smallest of the scales 1/8, 1/4, 1/2 and 1 whose short side still has this many
            pixels, which is several times faster than decoding and resizing the full image. The result is at least that
            large, or the full image if that is smaller; resize or crop it as needed. Other formats are always decoded
            in full.
        exif: rotate and mirror the image by its EXIF orientation.
        background: compose transparent images onto this color: a name, ``"#rrggbb"`` or (red, green, blue). By default,
            specs without alpha drop it, and the colors of transparent pixels show, as in webdataset.

    Examples:
        >>> ImageDecoder("rgb8", min_size=256)
        ImageDecoder('rgb8', min_size=256)
    """

    def __init__(
        self, spec: str, *, min_size: int | None = None, exif: bool = False, background: Background | None = None
    ) -> None:
        super().__init__(IMAGE_EXTENSIONS)
        if spec not in IMAGE_SPECS:
            raise ValueError(f"{spec!r} is not an image spec; choose one of {' '.join(IMAGE_SPECS)}")
        if min_size is not None and min_size < 1:
            raise ValueError(f"min_size must be at least 1 pixel, not {min_size}")
        self.spec = spec
        self.min_size = min_size
        self.exif = exif
        self.background = ImageColor.getrgb(background) if isinstance(background, str) else background
        self._result = IMAGE_SPECS[spec]

    def decode(self, data: bytes) -> Any:
        """Decode an image file of any format; of an animation, the first frame."""
        container, mode, floats = self._result
        image = self._open(data)
        if image.mode[0] in "IF":
            gray = deep_gray(image)
            if floats:
                return pack(spread(gray, mode), container)
            image = Image.fromarray(np.rint(gray * 255).astype(np.uint8))
        elif self.background is not None and image.has_transparency_data:
            image = on_background(image, self.background)
        if container == "pil":
            return image.convert(mode)  # copies even in the same mode, to return a plain Image instead of a subclass
        pixels = np.asarray(image if image.mode == mode else image.convert(mode))
        return pack(pixels, container, floats=floats)

    def _open(self, data: bytes) -> Image.Image:
        image = open_image(data)
        if self.min_size is not None and image.format in ("JPEG", "MPO"):
            image.draft(None, _draft_size(image.size, self.min_size))
        image.load()
        if self.exif:
            ImageOps.exif_transpose(image, in_place=True)
        return image

    def __repr__(self) -> str:
        options = {"min_size": self.min_size, "exif": self.exif or None, "background": self.background}
        shown = "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
        return f"ImageDecoder({self.spec!r}{shown})"


def open_image(data: bytes) -> Image.Image:
    """Open an image without loading its pixels.

    Raises:
        ValueError: the data are not an image that Pillow reads on its own, or look like a decompression bomb.
    """
    Image.init()
    try:
        image: Image.Image = Image.open(
            BytesIO(data), formats=[name for name in Image.ID if name not in EXCLUDED_FORMATS]
        )
    except UnidentifiedImageError as error:
        raise ValueError("the data are not in an image format that Pillow reads") from error
    if image.width * image.height > max(LARGE, PIXELS_PER_BYTE * len(data)):
        raise ValueError(
            f"{len(data)} bytes claim to be {image.width} x {image.height} pixels, which may be a decompression bomb"
        )
    return image


class ImageEncoder:
    """Encodes images to the format of an extension.

    Args:
        extension: one of `IMAGE_FORMATS`.
        options: options for Pillow's writer of the format, such as ``quality``. The default is quality 100 for JPEG, as
            in webdataset, and lossless WebP.
    """

    takes = (
        "an array (H, W) or (H, W, C) or a tensor (H, W) or (C, H, W), with 1, 3 or 4 channels, of uint8 or of floats "
        "from 0 to 1, or a Pillow image"
    )

    def __init__(self, extension: str, options: Mapping[str, Any] | None = None) -> None:
        self._format = IMAGE_FORMATS[extension]
        #: Pillow would convert other modes, some of them with a loss.
        self._modes = MODES.get(extension) or MODES[self._format]
        self._options = {**DEFAULTS.get(self._format, {}), **(options or {})}
        if self._format == "WEBP" and "quality" in self._options:
            self._options.setdefault("lossless", False)
        elif self._format == "WEBP":
            self._options.setdefault("lossless", True)
        self._rgb_only = extension == "ppm"

    def encode(self, value: Any) -> bytes:
        """Encode an image."""
        image = unpack(value)
        if self._rgb_only and image.mode == "L":
            image = image.convert("RGB")
        if image.mode not in self._modes:
            raise ValueError(f"the format does not support the mode {image.mode!r}, only {' '.join(self._modes)}")
        file = BytesIO()
        image.save(file, self._format, **self._options)
        return file.getvalue()


def _draft_size(size: tuple[int, int], min_size: int) -> tuple[int, int]:
    """Return the size to request from Pillow for the smallest scale whose short side has ``min_size`` pixels.

    Pillow picks the largest divisor of 1, 2, 4, 8 that is at most ``width // requested`` and ``height // requested``;
    the decoder then rounds the sides up.
    """
    short = min(size)
    scale = next((scale for scale in (8, 4, 2) if -(-short // scale) >= min_size), 1)
    return max(1, size[0] // scale), max(1, size[1] // scale)
