"""Files of sound and video, written by PyAV."""

from __future__ import annotations

import io
import struct

import av
import numpy as np

RATE = 48000
FRAMES, HEIGHT, WIDTH = 10, 48, 64

#: Extension -> FFmpeg's container and codec, and the maximum error of a sample, where 1 is full scale.
AUDIO_FILES = {
    "flac": ("flac", "flac", 1e-4),
    "m4a": ("ipod", "aac", 0.1),
    "mp3": ("mp3", "libmp3lame", 0.1),
    "ogg": ("ogg", "libopus", 0.1),
    "opus": ("ogg", "libopus", 0.1),
    "sox": ("sox", "pcm_s32le", 1e-4),
    "wav": ("wav", "pcm_s16le", 1e-4),
    "wma": ("asf", "wmav2", 0.1),
}
VIDEO_FILES = {
    "avi": ("avi", "mpeg4"),
    "h264": ("h264", "libx264"),
    "mjpeg": ("mjpeg", "mjpeg"),
    "mkv": ("matroska", "libx264"),
    "mov": ("mov", "mpeg4"),
    "mp4": ("mp4", "libx264"),
    "mpg": ("mpeg", "mpeg1video"),
    "ogv": ("ogg", "libvpx"),
    "webm": ("webm", "libvpx-vp9"),
    "wmv": ("asf", "wmv2"),
}


def tone(channels: int = 2, seconds: float = 0.5) -> np.ndarray:
    """A tone on the left and its octave on the right, at half of full scale."""
    time = np.arange(int(RATE * seconds)) / RATE
    return np.stack([np.sin(2 * np.pi * 440 * (1 + row) * time) / 2 for row in range(channels)]).astype(np.float32)


def add_audio(
    container: av.container.OutputContainer, codec: str, samples: np.ndarray, layout: str = ""
) -> av.AudioStream:
    stream = container.add_stream(codec, rate=RATE, layout=layout or ("mono" if len(samples) == 1 else "stereo"))
    assert isinstance(stream, av.AudioStream)
    stream.bit_rate = 192_000
    return stream


def write_audio(container: av.container.OutputContainer, stream: av.AudioStream, samples: np.ndarray) -> None:
    # Interleaved, because PyAV counts the planes of eight and more channels beyond their end.
    frame = av.AudioFrame.from_ndarray(samples.T.reshape(1, -1), format="flt", layout=stream.layout.name)
    frame.rate = RATE
    to_stream = av.AudioResampler(format=stream.format, frame_size=stream.frame_size or 1024)
    for part in [*to_stream.resample(frame), *to_stream.resample(None)]:
        container.mux(stream.encode(part))
    container.mux(stream.encode(None))


def audio_file(form: str, codec: str, samples: np.ndarray, layout: str = "") -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        write_audio(container, add_audio(container, codec, samples, layout), samples)
    return file.getvalue()


def frame_color(index: int) -> tuple[int, int, int]:
    return 20 * index % 256, (200 - 15 * index) % 256, 80


def video_file(
    form: str,
    codec: str,
    samples: np.ndarray | None = None,
    *,
    frames: int = FRAMES,
    size: tuple[int, int] = (HEIGHT, WIDTH),
    pixels: str = "",
    noise: bool = False,
    options: dict[str, str] | None = None,
) -> bytes:
    """Return a video of 25 frames per second, each of one color or of noise, perhaps with sound.

    Args:
        form: FFmpeg's container.
        codec: FFmpeg's codec.
        samples: sound (C, T).
        frames: the number of frames.
        size: the height and the width.
        pixels: the pixel format.
        noise: whether frames are noise around their color, so that none is small.
        options: of the container.
    """
    file = io.BytesIO()
    rng = np.random.default_rng(7)
    with av.open(file, "w", format=form, container_options=options or {}) as container:
        stream = container.add_stream(codec, rate=25)
        stream.height, stream.width = size
        stream.pix_fmt = pixels or ("yuvj420p" if codec == "mjpeg" else "yuv420p")
        stream.bit_rate = 2_000_000
        sound = None if samples is None else add_audio(container, "pcm_s16le", samples)
        for index in range(frames):
            picture = np.full((*size, 3), frame_color(index), np.int16)
            picture += rng.integers(-30, 30, picture.shape, np.int16) if noise else 0
            frame = av.VideoFrame.from_ndarray(picture.clip(0, 255).astype(np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if samples is not None and sound is not None:
            write_audio(container, sound, samples)
    return file.getvalue()


def wav_file(samples: np.ndarray, *, rate: int = 16000, kind: int = 1, bits: int | None = None) -> bytes:
    """Return samples (T, C) as WAV: of kind 1, integers, or 3, floats."""
    bits = bits or 8 * samples.dtype.itemsize
    payload = samples.tobytes()
    if bits == 24:  # the upper three bytes of 32
        payload = b"".join(payload[start + 1 : start + 4] for start in range(0, len(payload), 4))
    block = samples.shape[1] * bits // 8
    head = struct.pack("<HHIIHH", kind, samples.shape[1], rate, rate * block, block, bits)
    chunks = b"fmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", len(payload)) + payload
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks
