"""Fast JPEG decoding by simplejpeg, the extra ``turbo``, to the same pixels as Pillow's."""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

START = b"\xff\xd8\xff"
#: The frame types of libjpeg that store rows from top to bottom: baseline and extended, with Huffman coding.
SEQUENTIAL_FRAMES = (0xC0, 0xC1)
#: Markers in the same range that start no frame: Huffman tables, a reserved one, and arithmetic coding.
NO_FRAMES = (0xC4, 0xC8, 0xCC)
START_OF_SCAN = 0xDA
#: The pixel rows in a row of blocks, and the rows below the requested ones that color interpolation reads.
ROWS_OF_BLOCKS, ROWS_BELOW = 16, 8
#: libjpeg's warning that data follow the last row, as they always do if only the first rows are decoded.
MORE_DATA = "extraneous bytes before marker"


class JpegFile(NamedTuple):
    """A JPEG file that simplejpeg can decode, its size in pixels, and its mode: RGB or L."""

    data: bytes
    width: int
    height: int
    mode: str

    def read(self, *, scale: int = 1, rows: int | None = None, padded: bool = False) -> NDArray[np.uint8] | None:
        """Return an array (H, W) or (H, W, 3), or None to let Pillow try a damaged or unusual file.

        Args:
            scale: divides the width and the height: 1, 2, 4 or 8.
            rows: decode the upper rows only, at least this many; the result may have more.
            padded: return colors as (H, W, 4), with an unused last byte, so that a pixel is a word.
        """
        upper, height = None, self.height
        if rows is not None:
            end = -(-(rows + ROWS_BELOW) // ROWS_OF_BLOCKS) * ROWS_OF_BLOCKS
            upper = _upper_part(self.data, end) if end < height else None
            height = height if upper is None else end
        colors, channels = ("GRAY", 1) if self.mode == "L" else ("RGBX", 4) if padded else ("RGB", 3)
        shape = (-(-height // scale), -(-self.width // scale))
        pixels = np.empty(shape if channels == 1 else (*shape, channels), np.uint8)
        sizes = {} if scale == 1 else {"min_height": shape[0], "min_width": shape[1], "min_factor": scale}
        try:
            found = _simplejpeg().decode_jpeg(upper or self.data, colors, buffer=pixels, **sizes)
        except ValueError as error:
            # libjpeg keeps only its first warning, so nothing was wrong before this one.
            return pixels if upper is not None and MORE_DATA in str(error) else None
        return pixels if found.shape[:2] == shape else None


def open_jpeg(data: bytes) -> JpegFile | None:
    """Return the JPEG file, or None if the extra ``turbo`` is missing or simplejpeg cannot decode the file."""
    if not data.startswith(START) or _simplejpeg() is None:
        return None
    try:
        height, width, colors, _ = _simplejpeg().decode_jpeg_header(data)
    except ValueError:
        return None
    mode = {"YCbCr": "RGB", "RGB": "RGB", "Gray": "L"}.get(colors)
    return None if mode is None else JpegFile(data, int(width), int(height), mode)


def _upper_part(data: bytes, rows: int) -> bytearray | None:
    """Return a copy whose header declares only the upper rows, or None if rows are not stored from top to bottom.

    libjpeg stops after these rows, which saves time.
    """
    # On the CPU, nvImageCodec 0.9 decodes only a box, in nine tenths of the time for photographs. But where data are
    # damaged, such as zeros after an interrupted download, it may return gray pixels and no error.
    frame = None
    position = 2
    while position + 9 < len(data) and data[position] == 0xFF:
        marker, length = data[position + 1], int.from_bytes(data[position + 2 : position + 4], "big")
        if marker == START_OF_SCAN:
            # All components must be in one scan.
            if frame is None or data[position + 4] != data[frame + 9]:
                return None
            upper = bytearray(data)
            upper[frame + 5 : frame + 7] = rows.to_bytes(2, "big")
            return upper
        if marker in SEQUENTIAL_FRAMES:
            frame = position
        elif 0xC0 <= marker <= 0xCF and marker not in NO_FRAMES:
            return None
        position += 2 + length
    return None


@functools.cache
def _simplejpeg() -> Any:
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None
