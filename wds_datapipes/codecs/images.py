"""Image codecs based on Pillow: decode to arrays, tensors or Pillow images by one of seventeen specs, and encode."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from io import BytesIO
from itertools import product
from random import Random
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wds_datapipes.arguments import checks_calls
from wds_datapipes.codecs import IMAGE_FORMATS
from wds_datapipes.codecs.crops import GLOBAL_RNG, Box, Crop
from wds_datapipes.codecs.extensions import ByExtension, split_extensions
from wds_datapipes.codecs.jpeg import open_jpeg
from wds_datapipes.codecs.orientation import UPRIGHT, Orientation, may_have_orientation, read_orientation
from wds_datapipes.codecs.pillow_plugins import HEIC_EXTENSIONS, JXL_EXTENSIONS, register_plugin
from wds_datapipes.codecs.pixels import deep_gray, pack, packed_shape, resize_part, spread, unpack
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits, limit_error

#: The extensions that image specs decode. webdataset accepts every extension that Pillow has a plugin for, and
#: therefore fails on fields that usually hold something else: ``h5 hdf fits grib bufr`` (arrays), ``mpg mpeg fli flc``
#: (video), ``ps eps wmf emf`` (drawings; Pillow opens some with another program), ``rgb rgba bw im ras`` (raw pixels)
#: and rare old names. ``image`` and ``img`` are JPEG files that webdataset's writer writes and its reader leaves as
#: bytes.
IMAGE_EXTENSIONS = split_extensions(
    "apng avif blp bmp dds dib gif icns ico image img j2c j2k jfif jp2 jpc jpe jpeg jpf jpg jpx "
    "pbm pcx pgm png pnm ppm psd qoi sgi tga tif tiff webp xbm xpm"
)
#: Those of formats that Pillow reads with the extras ``heic`` and ``jxl``.
PLUGIN_EXTENSIONS = (*HEIC_EXTENSIONS, *JXL_EXTENSIONS)

#: Formats excluded regardless of the extension, because Pillow opens them with other programs.
EXCLUDED_FORMATS = frozenset({"BUFR", "EPS", "GRIB", "HDF5", "WMF"})
#: The errors of Pillow's plugins for data that are not in their format.
NOT_THIS_FORMAT = (SyntaxError, IndexError, TypeError, struct.error)
#: The longest first bytes by which Pillow's plugins recognize their format.
PREFIX_BYTES = 16

Container: TypeAlias = Literal["numpy", "torch", "pil"]
Mode: TypeAlias = Literal["L", "RGB", "RGBA"]


class _Spec(NamedTuple):
    container: Container
    mode: Mode
    floats: bool


class _Region(NamedTuple):
    """The part of an image to decode: a box in stored pixels, if cropped, the divisor of its size, and orientation."""

    box: Box | None
    scale: int
    orientation: Orientation = UPRIGHT


#: Maps specs to their results; see the table in `ImageDecoder`. Pillow images have no floats.
_SPECS = {
    f"{container}{mode}{bits}".lower().removeprefix("numpy"): _Spec(
        container, mode, floats=container != "pil" and not bits
    )
    for container, mode, bits in product(get_args(Container), get_args(Mode), ("", "8"))
    if container != "pil" or not bits
}
IMAGE_SPECS = dict(sorted({**_SPECS, "pil": _SPECS["pilrgb"], "torch": _SPECS["torchrgb"]}.items()))

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


@checks_calls
class ImageDecoder(ByExtension):
    """Decodes image fields to arrays, tensors or Pillow images.

    =========================  ===================================  ===========  =======  ========
    spec                       value                                shape        dtype    range
    =========================  ===================================  ===========  =======  ========
    ``l8`` ``rgb8`` ``rgba8``  numpy array                          (H, W[, C])  uint8    0 to 255
    ``l`` ``rgb`` ``rgba``     numpy array                          (H, W[, C])  float32  0 to 1
    ``torchl8``                tensor, without a channel dimension  (H, W)       uint8    0 to 255
    ``torchrgb8 torchrgba8``   tensor                               (C, H, W)    uint8    0 to 255
    ``torchl``                 tensor, without a channel dimension  (H, W)       float32  0 to 1
    ``torch torchrgb[a]``      tensor                               (C, H, W)    float32  0 to 1
    ``pill pil pilrgb[a]``     Pillow image, L, RGB or RGBA
    =========================  ===================================  ===========  =======  ========

    Arrays and tensors are contiguous, writable, and own their memory. Values of 8-bit images equal webdataset's, bit
    for bit. 16-bit grayscale images are scaled, whereas webdataset clips them: 65535 becomes 255, or 1.0 in float
    specs, which keep all 16 bits. 32-bit pixels (TIFF) have no fixed range and are rejected.

    HEIC and JPEG XL need the extras ``heic`` and ``jxl``; without them, such a field is an error that names the extra.

    If the extra ``turbo`` is installed, simplejpeg decodes JPEG files to arrays and tensors, in two thirds of Pillow's
    time for the same pixels. Pillow decodes the files that simplejpeg rejects.

    Args:
        spec: one of the seventeen words above.
        min_size: decode a JPEG at the smallest of the scales 1/8, 1/4, 1/2 and 1 whose short side still has this many
            pixels, which is several times faster than decoding and resizing the full image. The result is at least that
            large, or the full image if that is smaller; resize or crop it as needed. With ``crop``, it is the short
            side of the cropped part before resizing that has at least this many pixels. Other formats are always
            decoded in full.
        exif_orientation: make photographs upright. Many cameras store pixels in the orientation of the sensor, with
            an EXIF tag that says how to turn and mirror them. By default, as in webdataset, the tag is ignored, and
            pixels are returned as stored; only for TIFF, HEIC and JPEG XL, their decoders apply it. With ``crop``, the
            part is selected in the upright image.
        crop: a `RandomResizedCrop` or a `CenterCrop`, which determines the size of the result. Decoding of a JPEG stops
            below the cropped part, so damage further down goes unnoticed.

    A random crop depends on the seed of the loader, the epoch, and the shard and key of the sample, but not on the
    process, the order or the number of workers. If a sample has several images of the same size, all of them are
    cropped to the same box. Outside of a pipeline, crops use the module ``random``.

    Examples:
        >>> ImageDecoder("rgb8", min_size=256)
        ImageDecoder('rgb8', min_size=256)
        >>> from wds_datapipes import CenterCrop
        >>> image = ImageDecoder("torchrgb8", crop=CenterCrop(8)).decode(b"P6 4 2 255 " + bytes(range(24)))
        >>> image.shape, image.dtype
        (torch.Size([3, 8, 8]), torch.uint8)
    """

    def __init__(
        self, spec: str, *, min_size: int | None = None, crop: Crop | None = None, exif_orientation: bool = False
    ) -> None:
        super().__init__((*IMAGE_EXTENSIONS, *PLUGIN_EXTENSIONS))
        if spec not in IMAGE_SPECS:
            close = get_close_matches(spec, IMAGE_SPECS, 1)
            advice = f"did you mean {close[0]!r}? Otherwise, " if close else ""
            raise ValueError(f"{spec!r} is not an image spec; {advice}choose one of {' '.join(IMAGE_SPECS)}")
        if min_size is not None and min_size < 1:
            raise ValueError(f"min_size must be at least 1 pixel, not {min_size}")
        if crop is not None and not isinstance(crop, Crop):
            raise TypeError(f"crop must be a RandomResizedCrop, a CenterCrop or another Crop, not {crop!r}")
        self.spec = spec
        self.min_size = min_size
        self.crop = crop
        self.exif_orientation = exif_orientation
        self.result = IMAGE_SPECS[spec]
        self.is_random = crop is not None and crop.is_random
        self._make_rng: Callable[[], Random] | None = None
        self.limits = DEFAULT_LIMITS

    def with_rng(self, make_rng: Callable[[], Random]) -> ImageDecoder:
        """Return a copy whose crops use a new generator for each image."""
        if not self.is_random:
            return self
        seeded = copy.copy(self)
        seeded._make_rng = make_rng
        return seeded

    def with_limits(self, limits: ReadLimits) -> ImageDecoder:
        """Return a copy that rejects images beyond ``image_pixels``."""
        limited = copy.copy(self)
        limited.limits = limits
        return limited

    def decode(self, data: bytes) -> Any:
        """Decode an image file of any format; of an animation, the first frame."""
        container, mode, floats = self.result
        rng = GLOBAL_RNG if self._make_rng is None else self._make_rng()
        if container == "pil" and self.crop is None:
            image, part = self._load(data, rng)
            # Converting copies even in the same mode, to return a plain Image instead of a subclass.
            image = self._to_bytes(image).convert(mode)
            if part.orientation == UPRIGHT:
                return image
            return Image.fromarray(np.ascontiguousarray(part.orientation.apply(np.asarray(image))))
        pixels = self.read_pixels(data, rng)
        if container == "pil":
            return Image.fromarray(np.ascontiguousarray(pixels))
        out = np.empty(packed_shape(mode, pixels.shape[:2], container), np.float32 if floats else np.uint8)
        pack(pixels, mode, container, out)
        if container == "numpy":
            return out
        import torch

        return torch.from_numpy(out)

    def read_pixels(self, data: bytes, rng: Random) -> NDArray[Any]:
        """Return the pixels (H, W[, C]) of an image file, as bytes, or as floats from 0 to 1 if it has 16 bits.

        The array may be a read-only view. For tensor specs, it may have a fourth channel, which is meaningless.
        """
        _, mode, floats = self.result
        pixels, part = self._read_jpeg(data, rng)
        if pixels is None:
            image, part = self._load(data, rng, part)
            if floats and image.mode[0] in "IF":
                pixels = spread(deep_gray(image), mode)
            else:
                image = self._to_bytes(image)
                pixels = np.asarray(image if image.mode == mode else image.convert(mode))
        if part is None:
            return pixels
        if self.crop is None or part.box is None:
            return part.orientation.apply(pixels)
        box = _scale_box(part.box, part.scale, pixels.shape)
        pixels = pixels[box.top : box.top + box.height, box.left : box.left + box.width]
        return resize_part(part.orientation.apply(pixels), self.crop, is_mirrored=box.is_mirrored)

    def _read_jpeg(self, data: bytes, rng: Random) -> tuple[NDArray[Any] | None, _Region | None]:
        """Decode a JPEG with the extra ``turbo``, if possible; return its pixels, or None, and the selected region."""
        jpeg = open_jpeg(data)
        if jpeg is None:
            return None, None
        _check_size(jpeg.width, jpeg.height, data, self.limits)
        orientation = UPRIGHT
        if self.exif_orientation and may_have_orientation(data):
            orientation = read_orientation(open_image(data, self.limits))
        part = self._select(jpeg.width, jpeg.height, rng, orientation)
        rows = None if part.box is None else part.box.top + part.box.height
        container, mode, _ = self.result
        padded = container == "torch" and jpeg.mode == mode == "RGB" and part.box is None
        pixels: NDArray[Any] | None = jpeg.read(scale=part.scale, rows=rows, padded=padded)
        if pixels is not None and jpeg.mode != mode:
            pixels = np.asarray(Image.fromarray(pixels).convert(mode))
        return pixels, part

    def _load(self, data: bytes, rng: Random, part: _Region | None = None) -> tuple[Image.Image, _Region]:
        """Decode an image with Pillow, and return it with the selected region."""
        image = open_image(data, self.limits)
        orientation = read_orientation(image) if self.exif_orientation else UPRIGHT
        part = part or self._select(*image.size, rng, orientation)
        if part.scale > 1 and image.format in ("JPEG", "MPO"):
            image.draft(None, (max(1, image.width // part.scale), max(1, image.height // part.scale)))
        else:
            part = part._replace(scale=1)
        try:
            image.load()
        except Image.DecompressionBombError as error:
            raise ValueError(
                f"{error} For {image.format}, Pillow has a limit of its own, in addition to image_pixels: set "
                f"PIL.Image.MAX_IMAGE_PIXELS = None"
            ) from error
        return image, part

    def _select(self, width: int, height: int, rng: Random, orientation: Orientation) -> _Region:
        """Select a box and the scale of an image of this stored size."""
        box = None
        if self.crop is not None:
            upright = self.crop.select(*orientation.size(width, height), rng)
            box = orientation.stored_box(upright, width, height)
        if self.min_size is None:
            return _Region(box, 1, orientation)
        short = min(width, height)
        scales = [scale for scale in (8, 4, 2) if scale <= short]  # Pillow has no smaller ones for tiny images
        short = short if box is None else min(box.width, box.height)
        scale = next((scale for scale in scales if -(-short // scale) >= self.min_size), 1)
        return _Region(box, scale, orientation)

    def _to_bytes(self, image: Image.Image) -> Image.Image:
        """Return an image of 8 bits per channel."""
        return Image.fromarray(np.rint(deep_gray(image) * 255).astype(np.uint8)) if image.mode[0] in "IF" else image

    def __repr__(self) -> str:
        options = {"min_size": self.min_size, "crop": self.crop, "exif_orientation": self.exif_orientation or None}
        shown = "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
        return f"ImageDecoder({self.spec!r}{shown})"


def open_image(data: bytes, limits: ReadLimits = DEFAULT_LIMITS) -> Image.Image:
    """Open an image without loading its pixels.

    Raises:
        ValueError: the data are not an image that Pillow reads on its own.
        ReadLimitError: the image has more pixels than ``image_pixels``.
        MissingDependencyError: its format needs a package that is not installed.
    """
    # Image.open has a limit, too, but a single one for the whole process.
    Image.init()
    image = _open_registered(data)
    if image is None and register_plugin(data):
        image = _open_registered(data)
    if image is None:
        raise ValueError("the data are not in an image format that Pillow reads")
    _check_size(image.width, image.height, data, limits)
    return image


def _open_registered(data: bytes) -> Image.Image | None:
    """Open an image with the first plugin of Pillow that accepts it."""
    for name in Image.ID:
        factory, accepts = Image.OPEN[name]
        if name in EXCLUDED_FORMATS:
            continue
        try:
            is_accepted = accepts(data[:PREFIX_BYTES]) if accepts else True  # or a text that says what is missing
            if is_accepted and not isinstance(is_accepted, str):
                image: Image.Image = factory(BytesIO(data), "")
                return image
        except NOT_THIS_FORMAT:
            continue
    return None


def _check_size(width: int, height: int, data: bytes, limits: ReadLimits) -> None:
    if width * height > limits.most("image_pixels"):
        found = f"an image of {len(data)} bytes has {width} x {height} = {width * height} pixels"
        raise limit_error(limits, "image_pixels", found)


def _scale_box(box: Box, scale: int, shape: tuple[int, ...]) -> Box:
    """Return the box in an image that was decoded at a fraction of its size; it has at least one pixel."""
    left, top = min(box.left // scale, shape[1] - 1), min(box.top // scale, shape[0] - 1)
    right, bottom = -(-(box.left + box.width) // scale), -(-(box.top + box.height) // scale)
    return box._replace(left=left, top=top, width=min(right, shape[1]) - left, height=min(bottom, shape[0]) - top)


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
        #: Pillow would convert other modes, some of them lossily.
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
