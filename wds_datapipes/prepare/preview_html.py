"""Previews of samples as HTML, for web pages and notebooks."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable
from html import escape

from PIL import Image

from wds_datapipes.io.openers import redact
from wds_datapipes.parallel.progress import human_bytes
from wds_datapipes.prepare.preview import Preview, preview_field
from wds_datapipes.types import Sample

#: Pictures up to this size are enlarged without smoothing.
SMALL = 64
#: The longest text of a field in a notebook, in characters, and the longest side of a picture in pixels.
CHARACTERS, PIXELS = 300, 192
#: Control characters, those that change the direction of text, and surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

CARD = (
    "display:inline-block;vertical-align:top;margin:4px;padding:8px 10px;width:220px;box-sizing:border-box;"
    "border:1px solid #8886;border-radius:8px;font:13px/1.4 system-ui,sans-serif;text-align:left"
)
FAINT = "opacity:.65;font-size:12px"
TEXT = (
    "margin:2px 0 0;font:12px/1.35 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;max-height:9em;"
    "overflow:hidden"
)


def escape_text(text: str) -> str:
    r"""Escape a text for HTML, also for attributes, and show control characters.

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


def samples_as_html(samples: Iterable[Sample]) -> str:
    """Return a card for each sample: thumbnails, texts and arrays, encoded or decoded. Contents are never run."""
    return f"<div>{''.join(map(_card, samples))}</div>"


def _card(sample: Sample) -> str:
    shard = redact(str(sample.get("__url__", "")))
    fields = "".join(
        _field(preview_field(name, value, characters=CHARACTERS, pixels=PIXELS))
        for name, value in sample.items()
        if name[:2] != "__"
    )
    return (
        f'<div style="{CARD}"><b style="overflow-wrap:anywhere">{escape_text(str(sample["__key__"]))}</b>'
        f'<div style="{FAINT};overflow-wrap:anywhere">{escape_text(shard)}</div>{fields}</div>'
    )


def _field(field: Preview) -> str:
    size = f", {human_bytes(field.size)}" if field.size else ""
    shown = ""
    if field.picture is not None:
        style = "display:block;max-width:100%"
        if max(field.picture.size) <= SMALL:
            style += ";image-rendering:pixelated;min-width:96px"
        shown = f'<img alt="{escape_text(field.field)}" src="{picture_url(field.picture)}" style="{style}">'
    elif field.text:
        shown = f'<pre style="{TEXT}">{escape_text(field.text)}</pre>'
    error = f'<div style="color:#b3261e">{escape_text(field.error)}</div>' if field.error else ""
    return (
        f'<div style="margin-top:6px"><b>{escape_text(field.field)}</b> '
        f'<span style="{FAINT}">{escape_text(field.kind)}{size}</span>{shown}{error}</div>'
    )
