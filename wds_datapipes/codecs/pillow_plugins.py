"""Plugins of Pillow for image formats that need a package of their own: HEIC and JPEG XL."""

from __future__ import annotations

import re
from functools import cache

from wds_datapipes.extras import require

HEIC_EXTENSIONS, JXL_EXTENSIONS = ("heic", "heif", "hif"), ("jxl",)
#: The first bytes of the formats. AVIF, which has the same container as HEIC, needs no plugin.
HEIC = re.compile(rb"....ftyp(?:hei[cmsx]|hev[cmsx]|mif1|msf1)", re.DOTALL)
JXL = re.compile(rb"\xff\x0a|\0\0\0\x0cJXL \r\n\x87\n", re.DOTALL)


def register_plugin(data: bytes) -> bool:
    """Register the plugin for an image file with Pillow; return whether there is one.

    Raises:
        MissingDependencyError: its package is not installed.
    """
    if HEIC.match(data):
        register_heic()
        return True
    if JXL.match(data):
        register_jxl()
        return True
    return False


@cache
def register_heic() -> None:
    """Register the plugin of Pillow for HEIC."""
    purpose = "decode HEIC images, whose fields heic=bytes keeps as they are"
    require("pillow_heif", extra="heic", purpose=purpose).register_heif_opener()


@cache
def register_jxl() -> None:
    """Register the plugin of Pillow for JPEG XL, by importing it."""
    require("pillow_jxl", extra="jxl", purpose="decode JPEG XL images, whose fields jxl=bytes keeps as they are")
