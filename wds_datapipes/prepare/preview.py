"""Previews of fields: the kind of data, a short text, and a thumbnail of images and videos."""

from __future__ import annotations

import io
import reprlib
import warnings
import wave
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from wds_datapipes.codecs import UNSAFE, find_codec
from wds_datapipes.codecs.field_chain import gunzip
from wds_datapipes.codecs.images import IMAGE_EXTENSIONS, ImageDecoder, open_image
from wds_datapipes.codecs.media import AUDIO_EXTENSIONS, VIDEO_EXTENSIONS, open_media
from wds_datapipes.errors import MissingDependencyError
from wds_datapipes.io.read_limits import ReadLimits
from wds_datapipes.prepare.value_summary import (
    array_kind,
    array_text,
    is_array,
    number_text,
    plain_array,
    pretty_json,
    summarize_value,
)

#: Gzip data may decompress to 64 MiB.
LIMITS = ReadLimits(member_bytes=64 << 20)
#: The time base of FFmpeg's durations.
MEDIA_TICKS_PER_S = 1_000_000


class Preview(NamedTuple):
    """A short description of a field's content.

    Attributes:
        field: the field's name.
        size: the size in bytes.
        kind: the kind of data, in a few words.
        text: the content, in one or several lines; empty if the kind says it all, or for a picture.
        picture: a thumbnail, ``"RGB"`` or ``"RGBA"``.
        error: why the field cannot be decoded.
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


def preview_field(field: str, data: bytes, *, characters: int = 2000, pixels: int = 256) -> Preview:
    """Describe a field without raising, whatever its bytes are. Code in the data is never run.

    >>> preview_field("cls", b"7")
    Preview(field='cls', size=1, kind='int', text='7', picture=None, error='')
    >>> preview_field("pkl", b"not even a pickle").error
    'not decoded, as decoding can run code'

    Args:
        field: the field's name; its last extension selects the decoder, a final ``.gz`` means that it is compressed.
        data: the field's bytes.
        characters: the approximate length of the text.
        pixels: the longest side of the thumbnail.
    """
    name, prefix = field.lower(), ""
    found = _Found(_kind_of_bytes(data))
    try:
        content = data
        while f".{name}".endswith(".gz"):
            name, prefix = name[:-3], "gzip, "
            content = gunzip(content, limits=LIMITS)
        found = _Found(_kind_of_bytes(content))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # it may exhaust the memory
            found = _look(name.rpartition(".")[2], content, characters, pixels)
    except MissingDependencyError as error:
        found = found._replace(error=str(error))
    except RecursionError:
        found = found._replace(error="it is nested too deeply")
    except Exception as error:  # noqa: BLE001  decoders raise all kinds of errors
        found = found._replace(error=f"{type(error).__name__}: {error}")
    text = found.text if len(found.text) <= characters else f"{found.text[:characters]}..."
    return Preview(field, len(data), prefix + found.kind, text, found.picture, found.error[:500])


def preview_value(field: str, value: Any, *, characters: int = 2000, pixels: int = 256) -> Preview:
    """Describe a decoded value without raising; images become thumbnails, as arrays and tensors of pixels do.

    >>> preview_value("cls", 7)
    Preview(field='cls', size=0, kind='int', text='7', picture=None, error='')
    """
    try:
        if isinstance(value, Image.Image):
            kind = f"image, {value.width} x {value.height}, {value.mode}"
            found = _Found(kind, picture=_small(value.copy(), pixels))
        else:
            found = _value(value, pixels)
    except Exception as error:  # noqa: BLE001  a value of the user may raise anything
        found = _Found(type(value).__name__, error=f"{type(error).__name__}: {error}"[:500])
    text = found.text if len(found.text) <= characters else f"{found.text[:characters]}..."
    return Preview(field, 0, found.kind, text, found.picture, found.error)


def _look(extension: str, data: bytes, characters: int, pixels: int) -> _Found:
    if extension in IMAGE_EXTENSIONS:
        return _image(data, pixels)
    if extension in AUDIO_EXTENSIONS or extension in VIDEO_EXTENSIONS:
        return _media(extension, data, pixels)
    if extension in UNSAFE:
        return _Found("pickle", error="not decoded, as decoding can run code")
    codec = find_codec(extension)
    if codec is None:
        return _preview_text(data, characters)
    return _value(codec.decode(data), pixels)


def _image(data: bytes, pixels: int) -> _Found:
    """Describe an image; a truncated one still has a size."""
    with open_image(data) as image:
        frames = getattr(image, "n_frames", 1)
        kind = f"{image.format} image, {image.width} x {image.height}, {image.mode}"
        kind += f", {frames} frames" if frames > 1 else ""
    try:
        picture = ImageDecoder("pilrgba", min_size=pixels, exif=True).decode(data)
    except Exception as error:  # noqa: BLE001  damaged images raise all kinds of errors
        return _Found(kind, error=f"{type(error).__name__}: {error}")
    return _Found(kind, picture=_small(picture, pixels))


def _small(picture: Image.Image, pixels: int) -> Image.Image:
    """Scale a picture down, and drop an alpha channel that is opaque everywhere."""
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
            pass  # another encoding, which FFmpeg may know
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
    """Describe bytes without a codec, as text if they look like it."""
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
    summary = summarize_value(value)
    if isinstance(value, Mapping):
        kind = f"{type(value).__name__}, {len(value):,} entr{'y' if len(value) == 1 else 'ies'}"
    elif isinstance(value, list | tuple):
        kind = f"{type(value).__name__}, {len(value):,} item{'' if len(value) == 1 else 's'}"
    else:
        return _Found(type(value).__name__, reprlib.repr(value))
    return _Found(kind, pretty_json(summary))


def _pixels(value: Any, pixels: int) -> Image.Image | None:
    """Return a thumbnail of an array that looks like an image, with channels first or last.

    Its values are uint8, or floats from 0 to 1; those of a matrix without channels are uint8.
    """
    array = plain_array(value)
    if array is None or array.ndim not in (2, 3):
        return None
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (3, 4):
        array = array.transpose(1, 2, 0)
    if min(array.shape[:2]) < 8 or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        return None
    if array.dtype.kind == "f" and array.ndim == 3 and array.min() >= 0 and array.max() <= 1:
        array = (array * 255).round().astype(np.uint8)
    if array.dtype != np.uint8:
        return None
    return _small(Image.fromarray(np.ascontiguousarray(array[..., 0] if array.shape[2:] == (1,) else array)), pixels)
