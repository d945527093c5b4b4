"""EXIF orientations: how the stored pixels of a photograph are mirrored and turned to be upright."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray
from PIL import ExifTags, Image

from wds_datapipes.codecs.crops import Box

#: What a JPEG file with an orientation has in its first bytes, as EXIF or as XMP; most files have neither.
MARKERS, HEAD_BYTES = (b"Exif\0\0", b"Orientation"), 1 << 17

#: Pillow's formats whose decoders apply the orientation.
UPRIGHT_FORMATS = ("HEIF", "JXL", "TIFF")


class Orientation(NamedTuple):
    """The steps from stored to upright pixels: reverse rows, reverse columns, and exchange rows and columns."""

    reverses_rows: bool
    reverses_columns: bool
    is_transposed: bool

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return the upright width and height of an image of the stored size."""
        return (height, width) if self.is_transposed else (width, height)

    def stored_box(self, box: Box, width: int, height: int) -> Box:
        """Return where a box of the upright image is in stored pixels; it is still mirrored after it is upright."""
        left, top, wide, tall, is_mirrored = box
        if self.is_transposed:
            left, top, wide, tall = top, left, tall, wide
        if self.reverses_rows:
            top = height - top - tall
        if self.reverses_columns:
            left = width - left - wide
        return Box(left, top, wide, tall, is_mirrored)

    def apply(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """Return a view of (H, W[, C]) pixels that is upright."""
        pixels = pixels[:: -1 if self.reverses_rows else 1, :: -1 if self.reverses_columns else 1]
        return pixels.swapaxes(0, 1) if self.is_transposed else pixels


UPRIGHT = Orientation(False, False, False)
#: By the value of the EXIF tag.
ORIENTATIONS = {
    2: Orientation(False, True, False),
    3: Orientation(True, True, False),
    4: Orientation(True, False, False),
    5: Orientation(False, False, True),
    6: Orientation(True, False, True),
    7: Orientation(True, True, True),
    8: Orientation(False, True, True),
}


def may_have_orientation(jpeg: bytes) -> bool:
    """Whether a JPEG file may have an orientation; a quick test that saves opening it with Pillow."""
    head = jpeg[:HEAD_BYTES]
    return any(marker in head for marker in MARKERS)


def read_orientation(image: Image.Image) -> Orientation:
    """Return the orientation of an image that its decoder does not apply itself."""
    if image.format in UPRIGHT_FORMATS:
        return UPRIGHT
    return ORIENTATIONS.get(image.getexif().get(ExifTags.Base.Orientation, 1), UPRIGHT)
