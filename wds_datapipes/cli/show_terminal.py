"""A picture in a terminal: a character is two pixels, one above the other."""

from __future__ import annotations

import numpy as np
from PIL import Image
from rich.color import Color
from rich.style import Style
from rich.text import Text

__all__ = ["half_blocks"]

#: The upper half of a character, in the colour of the text; the rest has that of the background.
UPPER = "\N{UPPER HALF BLOCK}"
#: What shows behind transparent pixels.
BEHIND = (128, 128, 128)


def half_blocks(picture: Image.Image, width: int, height: int) -> list[Text]:
    """Return a picture as lines of coloured characters.

    Args:
        picture: ``"RGB"`` or ``"RGBA"``.
        width: how many characters it may be wide.
        height: how many lines it may be high.
    """
    if picture.mode == "RGBA":
        ground = Image.new("RGB", picture.size, BEHIND)
        ground.paste(picture, mask=picture)
        picture = ground
    scale = min(width / picture.width, 2 * height / picture.height)
    size = max(1, round(picture.width * scale)), 2 * max(1, round(picture.height * scale / 2))
    method = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BOX
    pixels = np.asarray(picture.convert("RGB").resize(size, method)).tolist()
    lines = []
    for row in range(0, size[1], 2):
        line = Text()
        for upper, lower in zip(pixels[row], pixels[row + 1], strict=True):
            line.append(UPPER, Style(color=Color.from_rgb(*upper), bgcolor=Color.from_rgb(*lower)))
        lines.append(line)
    return lines
