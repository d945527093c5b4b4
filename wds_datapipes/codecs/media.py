"""Video and audio decoders, used on request; they require PyAV, whose wheels include FFmpeg."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wds_datapipes.codecs.extensions import ByExtension
from wds_datapipes.extras import require

if TYPE_CHECKING:
    import torch


AUDIO_EXTENSIONS = ("flac", "m4a", "mp3", "ogg", "opus", "sox", "wav", "wma")
VIDEO_EXTENSIONS = ("avi", "h264", "mjpeg", "mkv", "mov", "mp4", "mpg", "ogv", "webm", "wmv")

Video: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None, dict[str, float]]"


class VideoDecoder(ByExtension):
    """Decodes video fields (``"torch_video"``).

    The value is ``(frames, audio, info)``: frames as a uint8 tensor (T, H, W, C) in RGB from 0 to 255, in presentation
    order; the first audio track as from `AudioDecoder`, or ``None``; and ``info`` with ``"video_fps"`` (frames per
    second, if known) and ``"audio_fps"`` (audio samples per second, if there is audio). Frames are returned as stored;
    rotation metadata are not applied.
    """

    def __init__(self) -> None:
        super().__init__(VIDEO_EXTENSIONS)

    def decode(self, data: bytes) -> Video:
        """Decode the first video track and the first audio track."""
        import torch

        with open_media(data) as container:
            if not container.streams.video:
                raise ValueError("the file has no video track")
            rate = container.streams.video[0].average_rate
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
            has_audio = bool(container.streams.audio)
        if not frames:
            raise ValueError("the video track has no frames")
        info = {"video_fps": float(rate)} if rate and rate > 0 else {}
        audio = None
        if has_audio:
            samples, info["audio_fps"] = _decode_audio(data)
            audio = torch.from_numpy(samples)
        return torch.from_numpy(np.stack(frames)), audio, info


class AudioDecoder(ByExtension):
    """Decodes audio fields (``"torch_audio"``).

    The value is ``(samples, rate)``: a float32 tensor (C, T) with values from -1 to 1, and the number of samples per
    second. Values of lossy formats outside that range are clipped.
    """

    def __init__(self) -> None:
        super().__init__(AUDIO_EXTENSIONS)

    def decode(self, data: bytes) -> tuple[torch.Tensor, int]:
        """Decode the first audio track."""
        import torch

        samples, rate = _decode_audio(data)
        return torch.from_numpy(samples), rate


def _decode_audio(data: bytes) -> tuple[NDArray[np.float32], int]:
    with open_media(data) as container:
        if not container.streams.audio:
            raise ValueError("the file has no audio track")
        rate: int = container.streams.audio[0].rate
        to_floats = _av().AudioResampler(format="fltp")  # planar float32, with the same layout and rate
        parts = [part.to_ndarray() for frame in container.decode(audio=0) for part in to_floats.resample(frame)]
        parts += [part.to_ndarray() for part in to_floats.resample(None)] if parts else []
    if not parts:
        raise ValueError("the audio track has no samples")
    samples = np.concatenate(parts, axis=1)
    return np.clip(samples, -1, 1, out=samples), rate


@contextmanager
def open_media(data: bytes) -> Iterator[Any]:
    """Open a media container; PyAV's errors become ValueErrors without its made-up file name."""
    av = _av()
    try:
        with av.open(BytesIO(data), **_open_options()) as container:
            yield container
    except av.FFmpegError as error:
        raise ValueError(f"FFmpeg cannot decode it: {error.strerror}") from error


@cache
def _open_options() -> dict[str, Any]:
    """Return options for PyAV that forbid other files and URLs, which a playlist could name.

    Errors in the encoding of metadata are ignored; PyAV 19 has no such option.
    """
    options: dict[str, Any] = {"options": {"protocol_whitelist": "none"}}
    return options | ({"metadata_errors": "ignore"} if int(_av().__version__.partition(".")[0]) < 19 else {})


@cache
def _av() -> ModuleType:
    return require("av", extra="media", purpose="decode video and audio fields")
