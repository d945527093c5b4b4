"""Previews of fields: the kind of data, a short text, and a thumbnail of images and videos."""

from __future__ import annotations

import base64
import io
import json
import re
import reprlib
import warnings
from collections.abc import Mapping
from html import escape
from typing import Any, NamedTuple

from PIL import Image

from wds_datapipes.codecs import UNSAFE, find_codec
from wds_datapipes.codecs.field_chain import gunzip
from wds_datapipes.codecs.images import IMAGE_EXTENSIONS, PLUGIN_EXTENSIONS, ImageDecoder, open_image
from wds_datapipes.codecs.media import AUDIO_EXTENSIONS, VIDEO_EXTENSIONS
from wds_datapipes.errors import MissingDependencyError, plural, text_of
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import ReadLimits
from wds_datapipes.parallel.progress import human_bytes
from wds_datapipes.samples.sample_log import describe
from wds_datapipes.types import Sample

#: Compressed fields may decompress to at most 64 MiB, and images have Pillow's limit.
LIMITS = ReadLimits(member_bytes=64 << 20)
#: JSON up to this length is shown on one line.
LINE = 72
#: The marker around a value that JSON does not support.
MARKED = "\N{LEFT-POINTING DOUBLE ANGLE QUOTATION MARK}{}\N{RIGHT-POINTING DOUBLE ANGLE QUOTATION MARK}"


class Preview(NamedTuple):
    """A short description of a field's content.

    Attributes:
        kind: the kind of data, in a few words.
        text: the content, in one or more lines; empty for a picture or if the kind says everything.
        picture: a thumbnail, ``"RGB"`` or ``"RGBA"``.
        error: why the field cannot be decoded.
        field: the field's name.
        size: the size in bytes.
    """

    kind: str
    text: str = ""
    picture: Image.Image | None = None
    error: str = ""
    field: str = ""
    size: int = 0


def preview_field(field: str, data: bytes, *, characters: int = 2000, pixels: int = 256) -> Preview:
    """Describe a field without ever raising an error or running code in the data.

    >>> preview_field("cls", b"7")
    Preview(kind='int', text='7', picture=None, error='', field='cls', size=1)
    >>> preview_field("pkl", b"not even a pickle").error
    'not decoded, because decoding can run code'

    Args:
        field: the field's name; its last extension selects the decoder, and a final ``.gz`` means that it is
            compressed.
        data: the field's bytes.
        characters: the approximate length of the text.
        pixels: the longest side of the thumbnail.
    """
    name, prefix, content = field.lower(), "", data
    found = Preview(_kind_of(data))
    try:
        while f".{name}".endswith(".gz"):
            name, prefix = name[:-3], "gzip, "
            content = gunzip(content, limits=LIMITS)
        found = Preview(_kind_of(content))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # may exhaust memory
            found = _preview_bytes(name.rpartition(".")[2], content, characters, pixels)
    except MissingDependencyError as error:
        found = found._replace(error=str(error))
    except RecursionError:
        found = found._replace(error="it is nested too deeply")
    except Exception as error:  # noqa: BLE001  decoders may raise anything
        found = found._replace(error=f"{type(error).__name__}: {text_of(error)}")
    text = found.text if len(found.text) <= characters else f"{found.text[:characters]}..."
    return Preview(prefix + found.kind, text, found.picture, found.error[:500], field, len(data))


def _kind_of(data: bytes) -> str:
    return "bytes" if data else "empty"


def _preview_bytes(extension: str, data: bytes, characters: int, pixels: int) -> Preview:
    if extension in (*IMAGE_EXTENSIONS, *PLUGIN_EXTENSIONS):
        return _preview_image(data, pixels)
    if extension in AUDIO_EXTENSIONS or extension in VIDEO_EXTENSIONS:
        return Preview("audio" if extension in AUDIO_EXTENSIONS else "video")
    if extension in UNSAFE:
        return Preview("pickle", error="not decoded, because decoding can run code")
    codec = find_codec(extension)
    return _preview_text(data, characters) if codec is None else _preview_value(codec.decode(data))


def _preview_image(data: bytes, pixels: int) -> Preview:
    """Describe an image, with its size even if it is truncated."""
    with open_image(data, LIMITS) as image:
        frames = getattr(image, "n_frames", 1)
        kind = f"{image.format} image, {image.width} x {image.height}, {image.mode}"
        kind += f", {frames} frames" if frames > 1 else ""
    try:
        picture = ImageDecoder("pilrgba", min_size=pixels).with_limits(LIMITS).decode(data)
    except Exception as error:  # noqa: BLE001  damaged images may raise anything
        return Preview(kind, error=f"{type(error).__name__}: {text_of(error)}")
    return Preview(kind, picture=_make_thumbnail(picture, pixels))


def _make_thumbnail(picture: Image.Image, pixels: int) -> Image.Image:
    """Scale down a picture and drop a fully opaque alpha channel."""
    picture.thumbnail((pixels, pixels), Image.Resampling.BICUBIC)
    has_alpha = picture.mode == "RGBA" and picture.getchannel("A").getextrema() != (255, 255)
    return picture if has_alpha else picture.convert("RGB")


def _preview_text(data: bytes, characters: int) -> Preview:
    """Describe bytes that have no codec, as text if they look like text."""
    try:
        text = data[: 4 * characters].decode("utf-8", "strict" if len(data) <= 4 * characters else "ignore")
    except UnicodeDecodeError:
        text = "\0"
    if data and all(character.isprintable() or character in "\t\r\n" for character in text):
        return Preview("text" if len(data) > 4 * characters else _count_text(text), text)
    return Preview(_kind_of(data), f"{data[:16].hex(' ')}{' ...' if len(data) > 16 else ''}")


def _count_text(text: str) -> str:
    lines = text.count("\n") + (not text.endswith("\n"))
    characters = f"text, {plural(len(text), 'character')}"
    return characters if lines <= 1 else f"{characters}, {lines:,} lines"


def _preview_value(value: Any) -> Preview:
    if isinstance(value, str):
        return Preview(_count_text(value) if value else "text, empty", value)
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return Preview(describe(value))
    kind = type(value).__name__ if value is not None else "null"
    if isinstance(value, Mapping):
        kind = f"{kind}, {plural(len(value), 'entry', 'entries')}"
    elif isinstance(value, list | tuple):
        kind = f"{kind}, {plural(len(value), 'item')}"
    elif not isinstance(value, bool | int | float | None):
        return Preview(kind, reprlib.repr(value))
    line = json.dumps(value, ensure_ascii=False, default=_describe_value)
    return Preview(
        kind, line if len(line) <= LINE else json.dumps(value, ensure_ascii=False, default=_describe_value, indent=2)
    )


def _describe_value(value: Any) -> str:
    """Describe a value that JSON does not support."""
    return MARKED.format(describe(value))


#: Pictures up to this size in pixels are enlarged without smoothing.
SMALL = 64
#: In a notebook: the maximum length of a text in characters, and of the longer side of a picture in pixels.
CHARACTERS, PIXELS = 300, 192
#: Control characters, including those that change the text direction, and surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_text(text: str) -> str:
    r"""Escape a text for HTML and its attributes; make control characters visible.

    >>> print(escape_text("<b>\x1b"))
    &lt;b&gt;\x1b
    """
    return escape(_UNPRINTABLE.sub(lambda found: f"\\x{ord(found[0]):02x}", text.replace("\t", "    ")))


def picture_url(picture: Image.Image) -> str:
    """Encode a picture as a data URL."""
    kind = "png" if picture.mode == "RGBA" or max(picture.size) <= SMALL else "jpeg"
    file = io.BytesIO()
    picture.save(file, kind, **({"optimize": True} if kind == "png" else {"quality": 82}))
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def sample_as_html(sample: Sample) -> str:
    """Return an HTML card for a sample, with thumbnails, texts and arrays; code in the data is never run.

    The page must contain the styles of the CSS classes.
    """
    shard = redact(str(sample.get("__url__", "")))
    fields = "".join(
        _field(preview_field(name, value, characters=CHARACTERS, pixels=PIXELS))
        for name, value in sample.items()
        if name[:2] != "__"
    )
    key = escape_text(str(sample["__key__"]))
    return f'<div class="card"><b>{key}</b><div class="faint">{escape_text(shard)}</div>{fields}</div>'


def _field(field: Preview) -> str:
    size = f", {human_bytes(field.size)}" if field.size else ""
    shown = ""
    if field.picture is not None:
        kind = "small" if max(field.picture.size) <= SMALL else "picture"
        shown = f'<img class="{kind}" alt="{escape_text(field.field)}" src="{picture_url(field.picture)}">'
    elif field.text:
        shown = f"<pre>{escape_text(field.text)}</pre>"
    error = f'<div class="error">{escape_text(field.error)}</div>' if field.error else ""
    kind = f'<span class="faint">{escape_text(field.kind)}{size}</span>'
    return f'<div class="field"><b>{escape_text(field.field)}</b> {kind}{shown}{error}</div>'
