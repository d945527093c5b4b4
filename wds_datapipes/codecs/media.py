"""Video and audio decoders, used on request; they require PyAV, whose wheels include FFmpeg."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wds_datapipes.codecs.containers import find_end, mp3_frame_size, read_mp3_header
from wds_datapipes.codecs.extensions import ByExtension
from wds_datapipes.extras import require

if TYPE_CHECKING:
    import torch


AUDIO_EXTENSIONS = ("flac", "m4a", "mp3", "ogg", "opus", "sox", "wav", "wma")
VIDEO_EXTENSIONS = ("avi", "h264", "mjpeg", "mkv", "mov", "mp4", "mpg", "ogv", "webm", "wmv")

#: Containers whose last block may be shorter than the others: `find_end` knows their size.
READ_IN_BLOCKS = ("wav", "caf")
#: Containers whose headers tell the exact number of samples per channel.
EXACT_DURATIONS = ("flac", "aiff")

Video: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None, dict[str, float]]"


class VideoDecoder(ByExtension):
    """Decodes video fields (``"torch_video"``).

    The value is ``(frames, audio, info)``: frames as a uint8 tensor (T, H, W, C) in RGB from 0 to 255, in presentation
    order; the first audio track as from `AudioDecoder`, or ``None``; and ``info`` with ``"video_fps"`` (frames per
    second, if known) and ``"audio_fps"`` (audio samples per second, if there is audio). Frames are returned as stored;
    rotation metadata are not applied. A file that is cut or has damaged frames is an error, as far as the container
    and FFmpeg notice.
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
            frames = [frame.to_ndarray(format="rgb24") for frame in _read_frames(container, "video", data)]
            has_audio = bool(container.streams.audio)
        if not frames:
            raise ValueError("the video track has no frames")
        if len(sizes := {frame.shape[:2] for frame in frames}) > 1:
            raise ValueError(f"the frames have different sizes (height, width): {sorted(sizes)}")
        info = {"video_fps": float(rate)} if rate and rate > 0 else {}
        audio = None
        if has_audio:
            samples, info["audio_fps"] = _decode_audio(data)
            audio = torch.from_numpy(samples)
        return torch.from_numpy(np.stack(frames)), audio, info


class AudioDecoder(ByExtension):
    """Decodes audio fields (``"torch_audio"``).

    The value is ``(samples, rate)``: a float32 tensor (C, T), and the number of samples per second. Full scale is from
    -1 to 1; sound that is stored as floats, and that of lossy formats, may exceed it. A file that is cut is an error,
    as far as its container shows.
    """

    def __init__(self) -> None:
        super().__init__(AUDIO_EXTENSIONS)

    def decode(self, data: bytes) -> tuple[torch.Tensor, int]:
        """Decode the first audio track."""
        import torch

        samples, rate = _decode_audio(data)
        return torch.from_numpy(samples), rate


class MediaVerifier(ByExtension):
    """Decodes all frames of video or audio fields without keeping them, and returns their number.

    Args:
        kind: ``"video"``, whose first audio track is decoded, too, or ``"audio"``.
    """

    def __init__(self, kind: Literal["video", "audio"]) -> None:
        super().__init__(VIDEO_EXTENSIONS if kind == "video" else AUDIO_EXTENSIONS)
        self.kind = kind

    def decode(self, data: bytes) -> int:
        """Return the number of frames of video, or the number of parts of sound."""
        count = 0
        for kind in {self.kind: None, "audio": None}:
            with open_media(data) as container:
                if getattr(container.streams, kind):
                    count += sum(1 for _ in _read_frames(container, kind, data))
                elif kind == self.kind:
                    raise ValueError(f"the file has no {kind} track")
        return count


def _decode_audio(data: bytes) -> tuple[NDArray[np.float32], int]:
    with open_media(data) as container:
        if not container.streams.audio:
            raise ValueError("the file has no audio track")
        stream = container.streams.audio[0]
        rate: int = stream.rate
        # Interleaved, because PyAV counts the planes of eight and more channels beyond their end.
        to_floats = load_av().AudioResampler(format="flt")
        frames = _read_frames(container, "audio", data)
        parts = [part.to_ndarray() for frame in frames for part in to_floats.resample(frame)]
        parts += [part.to_ndarray() for part in to_floats.resample(None)] if parts else []
        channels: int = stream.codec_context.layout.nb_channels
        if not parts and not stream.codec_context.name.startswith("pcm_"):
            raise ValueError("the audio track has no samples")
    interleaved = np.concatenate(parts, axis=1) if parts else np.zeros((1, 0), np.float32)
    return np.ascontiguousarray(interleaved.reshape(-1, channels).T), rate


def _read_frames(container: Any, kind: str, data: bytes) -> Iterator[Any]:
    """Yield the frames of the first track of a kind.

    Raises:
        ValueError: a frame is cut or damaged, or sound ends before the end that its header declares.
    """
    stream, form = getattr(container.streams, kind)[0], container.format.name
    if form == "flac":  # verify the CRC of each frame
        stream.codec_context.options = {"err_detect": "crccheck+explode"}
    header = read_mp3_header(data) if form == "mp3" else None
    count = samples = 0
    for packet in container.demux(stream):
        is_short = form == "mp3" and 0 < packet.size < (mp3_frame_size(bytes(packet)) or 0)
        if is_short or (packet.is_corrupt and form not in READ_IN_BLOCKS):
            raise ValueError(f"the file is cut or damaged in packet {count} of its {kind} track")
        count += packet.size > 0
        for frame in packet.decode():
            if kind == "video" and frame.is_corrupt:
                raise ValueError(f"the file is damaged: a frame near packet {count - 1} of its video track is broken")
            if form == "flac" and frame.pts not in (None, samples):
                raise ValueError(f"the file is damaged: sound is missing after sample {samples}")
            samples += frame.samples if kind == "audio" else 0
            yield frame
    if header and count + 1 < (header.frames or 0):  # some programs count the frame of the header
        raise ValueError(f"the file is cut: it declares {header.frames} MP3 frames, but has {count}")
    if form in EXACT_DURATIONS and samples < (stream.duration or 0):
        raise ValueError(f"the file is cut: it declares {stream.duration} samples per channel, but has {samples}")


@contextmanager
def open_media(data: bytes) -> Iterator[Any]:
    """Open a complete media container; PyAV's errors become ValueErrors without its made-up file name."""
    av = load_av()
    end = find_end(data)
    try:
        with av.open(BytesIO(data if end == len(data) else data[:end]), **_open_options()) as container:
            yield container
    except av.FFmpegError as error:
        raise ValueError(f"FFmpeg cannot decode it: {error.strerror}") from error


@cache
def _open_options() -> dict[str, Any]:
    """Return options for PyAV that forbid other files and URLs, which a playlist could name.

    Errors in the encoding of metadata are ignored; PyAV 19 has no such option.
    """
    options: dict[str, Any] = {"options": {"protocol_whitelist": "none"}}
    return options | ({"metadata_errors": "ignore"} if int(load_av().__version__.partition(".")[0]) < 19 else {})


@cache
def load_av() -> ModuleType:
    """Import PyAV, at the first field that needs it."""
    return require("av", extra="media", purpose="decode video and audio fields")
