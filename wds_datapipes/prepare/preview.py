"""A glance at a field: what it is, what it holds in short, and a small picture where there is one to see."""

from __future__ import annotations

import io
import reprlib
import warnings
import wave
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from wds_datapipes.codecs import UNSAFE, find_codec
from wds_datapipes.codecs.images import IMAGE_EXTENSIONS, ImageDecoder, open_image
from wds_datapipes.codecs.media import AUDIO_EXTENSIONS, VIDEO_EXTENSIONS, open_media
from wds_datapipes.errors import MissingDependencyError
from wds_datapipes.prepare.value_summary import (
    array_kind,
    array_text,
    is_array,
    number_text,
    outline,
    plain_array,
    pretty_json,
)

__all__ = ["Preview", "glance"]

#: The most bytes that compressed data may grow to.
MOST_BYTES = 64 << 20
#: How FFmpeg counts the time of a whole file.
MEDIA_TICKS_PER_S = 1_000_000


class Preview(NamedTuple):
    """What a look at a field shows.

    Attributes:
        field: its name.
        size: its bytes.
        kind: what it is, in few words.
        text: what it holds, in one line or several; nothing if that is said, or is a picture.
        picture: a small picture, ``"RGB"`` or ``"RGBA"``.
        error: why it cannot be decoded.
    """

    field: str
    size: int
    kind: str
    text: str = ""
    picture: Image.Image | None = None
    error: str = ""


class _Found(NamedTuple):
    kind: str
    text: str = ""
    picture: Image.Image | None = None
    error: str = ""


def glance(field: str, data: bytes, *, characters: int = 2000, pixels: int = 256) -> Preview:
    """Look at a field, and raise nothing, whatever its bytes are. No code in the data is ever run.

    >>> glance("cls", b"7"), glance("pkl", b"no pickle is looked at").error
    (Preview(field='cls', size=1, kind='int', text='7', picture=None, error=''), 'it is not decoded: that can run code')

    Args:
        field: its name; the last extension says what it is, and ``.gz`` behind it that it is compressed.
        data: its bytes.
        characters: about how much of a text is shown.
        pixels: the longest side of the picture.
    """
    name, prefix = field.lower(), ""
    found = _Found(_kind_of_bytes(data))
    try:
        content = data
        while f".{name}".endswith(".gz"):
            name, prefix = name[:-3], "gzip, "
            content = _gunzip(content)
        found = _Found(_kind_of_bytes(content))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # it may take all memory
            found = _look(name.rpartition(".")[2], content, characters, pixels)
    except MissingDependencyError as error:
        found = found._replace(error=str(error))
    except RecursionError:
        found = found._replace(error="it is nested too deep")
    except Exception as error:  # noqa: BLE001  decoders fail in ways of their own
        found = found._replace(error=f"{type(error).__name__}: {error}")
    text = found.text if len(found.text) <= characters else f"{found.text[:characters]}..."
    return Preview(field, len(data), prefix + found.kind, text, found.picture, found.error[:500])


def _look(extension: str, data: bytes, characters: int, pixels: int) -> _Found:
    if extension in IMAGE_EXTENSIONS:
        return _image(data, pixels)
    if extension in AUDIO_EXTENSIONS or extension in VIDEO_EXTENSIONS:
        return _media(extension, data, pixels)
    if extension in UNSAFE:
        return _Found("pickle", error="it is not decoded: that can run code")
    codec = find_codec(extension)
    if codec is None:
        return _preview_text(data, characters)
    return _value(codec.decode(data), pixels)


def _image(data: bytes, pixels: int) -> _Found:
    """Look at an image; one that is cut off still has its size."""
    with open_image(data) as image:
        frames = getattr(image, "n_frames", 1)
        kind = f"{image.format} image, {image.width} x {image.height}, {image.mode}"
        kind += f", {frames} frames" if frames > 1 else ""
    try:
        picture = ImageDecoder("pilrgba", min_size=pixels, exif=True).decode(data)
    except Exception as error:  # noqa: BLE001  whatever is wrong with it
        return _Found(kind, error=f"{type(error).__name__}: {error}")
    return _Found(kind, picture=_small(picture, pixels))


def _small(picture: Image.Image, pixels: int) -> Image.Image:
    """Make a picture fit, without an alpha channel that says nothing."""
    picture.thumbnail((pixels, pixels), Image.Resampling.BICUBIC)
    if picture.mode == "RGBA" and picture.getchannel("A").getextrema() == (255, 255):
        return picture.convert("RGB")
    return picture if picture.mode in ("RGB", "RGBA") else picture.convert("RGB")


def _media(extension: str, data: bytes, pixels: int) -> _Found:
    if extension == "wav":
        try:
            with wave.open(io.BytesIO(data)) as sound:
                rate, channels = sound.getframerate(), sound.getnchannels()
                return _Found(f"WAV audio, {_seconds(sound.getnframes() / rate)}, {rate} Hz, {_channels(channels)}")
        except wave.Error:
            pass  # one of its many other encodings, which FFmpeg knows
    with open_media(data) as container:
        parts = [container.format.name]
        video = next(iter(container.streams.video), None)
        audio = next(iter(container.streams.audio), None)
        if container.duration:
            parts.append(_seconds(container.duration / MEDIA_TICKS_PER_S))
        picture = None
        if video is not None:
            parts.append(f"{video.width} x {video.height} {video.codec_context.name}")
            if video.average_rate:
                parts.append(f"{float(video.average_rate):g} frames/s")
            picture = next((frame.to_image() for frame in container.decode(video=0)), None)
        if audio is not None:
            parts.append(f"{audio.codec_context.name}, {audio.rate} Hz, {_channels(audio.channels)}")
    kind = "video" if video is not None else "audio"
    return _Found(f"{kind}, {', '.join(parts)}", picture=None if picture is None else _small(picture, pixels))


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else f"{int(seconds // 60)} min {seconds % 60:.0f} s"


def _channels(count: int) -> str:
    return {1: "mono", 2: "stereo"}.get(count, f"{count} channels")


def _preview_text(data: bytes, characters: int) -> _Found:
    """Look at bytes that no codec is for: they may be a text."""
    try:
        text = data[: 4 * characters].decode("utf-8", "strict" if len(data) <= 4 * characters else "ignore")
    except UnicodeDecodeError:
        text = "\0"
    if data and all(character.isprintable() or character in "\t\r\n" for character in text):
        return _Found("text" if len(data) > 4 * characters else f"text, {_format_count(text)}", text)
    return _Found(_kind_of_bytes(data), "" if not data else f"{data[:16].hex(' ')}{' ...' if len(data) > 16 else ''}")


def _kind_of_bytes(data: bytes) -> str:
    return "bytes" if data else "empty"


def _format_count(text: str) -> str:
    lines = text.count("\n") + (not text.endswith("\n"))
    characters = f"{len(text):,} character{'' if len(text) == 1 else 's'}"
    return characters if lines <= 1 else f"{characters}, {lines:,} lines"


def _value(value: Any, pixels: int) -> _Found:
    if isinstance(value, str):
        return _Found(f"text, {_format_count(value)}" if value else "text, empty", value)
    if isinstance(value, bool | int | float) or value is None:
        return _Found(type(value).__name__ if value is not None else "null", number_text(value))
    if is_array(value):
        return _Found(array_kind(value), array_text(value), _pixels(value, pixels))
    told = outline(value)
    if isinstance(value, Mapping):
        kind = f"{type(value).__name__}, {len(value):,} entr{'y' if len(value) == 1 else 'ies'}"
    elif isinstance(value, list | tuple):
        kind = f"{type(value).__name__}, {len(value):,} item{'' if len(value) == 1 else 's'}"
    else:
        return _Found(type(value).__name__, reprlib.repr(value))
    return _Found(kind, pretty_json(told))


def _pixels(value: Any, pixels: int) -> Image.Image | None:
    """Show an array that may well be an image."""
    array = plain_array(value)
    if array is None or array.dtype != np.uint8 or array.ndim not in (2, 3) or min(array.shape[:2]) < 8:
        return None
    if array.ndim == 3 and array.shape[2] not in (3, 4):
        return None
    return _small(Image.fromarray(array), pixels)


def _gunzip(data: bytes) -> bytes:
    """Decompress at most so much: a few bytes may become very many."""
    parts: list[bytes] = []
    left = MOST_BYTES
    while data:
        stream = zlib.decompressobj(31)
        try:
            part = stream.decompress(data, left + 1)
        except zlib.error as error:
            raise ValueError(f"it is no gzip data: {error}") from None
        left -= len(part)
        if left < 0:
            raise ValueError(f"it holds more than {MOST_BYTES >> 20} MiB, and is not decompressed")
        if not stream.eof:
            raise EOFError("the compressed data end too early")
        parts.append(part)
        data = stream.unused_data.lstrip(b"\0")
    return b"".join(parts)
