"""Video and audio: files of every extension are written by PyAV here, and read back by the decoders."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
import torch
from plain_codecs import wds_decode

from wds_datapipes.codecs.media import AUDIO_EXTENSIONS, VIDEO_EXTENSIONS, AudioDecoder, VideoDecoder
from wds_datapipes.errors import DecodeError

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


def add_audio(container: av.container.OutputContainer, codec: str, samples: np.ndarray) -> av.AudioStream:
    stream = container.add_stream(codec, rate=RATE, layout="mono" if len(samples) == 1 else "stereo")
    assert isinstance(stream, av.AudioStream)
    stream.bit_rate = 192_000
    return stream


def write_audio(container: av.container.OutputContainer, stream: av.AudioStream, samples: np.ndarray) -> None:
    frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=stream.layout.name)
    frame.rate = RATE
    to_stream = av.AudioResampler(format=stream.format, frame_size=stream.frame_size or 1024)
    for part in [*to_stream.resample(frame), *to_stream.resample(None)]:
        container.mux(stream.encode(part))
    container.mux(stream.encode(None))


def audio_file(form: str, codec: str, samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        write_audio(container, add_audio(container, codec, samples), samples)
    return file.getvalue()


def frame_color(index: int) -> tuple[int, int, int]:
    return 20 * index, 200 - 15 * index, 80


def video_file(form: str, codec: str, samples: np.ndarray | None = None) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=25)
        stream.height, stream.width = HEIGHT, WIDTH
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.bit_rate = 2_000_000
        sound = None if samples is None else add_audio(container, "pcm_s16le", samples)
        for index in range(FRAMES):
            picture = np.full((HEIGHT, WIDTH, 3), frame_color(index), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
        if samples is not None and sound is not None:
            write_audio(container, sound, samples)
    return file.getvalue()


def test_the_files_cover_every_extension() -> None:
    assert tuple(AUDIO_FILES) == AUDIO_EXTENSIONS
    assert tuple(VIDEO_FILES) == VIDEO_EXTENSIONS


@pytest.mark.parametrize(("extension", "channels"), [*((each, 2) for each in AUDIO_FILES), ("mp3", 1)])
def test_audio_is_float_channels_and_rate(extension: str, channels: int) -> None:
    form, codec, tolerance = AUDIO_FILES[extension]
    wanted = tone(channels)
    sample = {extension: audio_file(form, codec, wanted)}
    [decoded] = wds_decode([sample], "torch_audio")
    samples, rate = decoded[extension]
    assert (samples.dtype, samples.shape[0], rate) == (torch.float32, channels, RATE)
    # Lossy encoders add some silence at the ends, or lose the last samples; the middle of the tone is kept.
    assert abs(samples.shape[1] - wanted.shape[1]) <= (4096 if tolerance > 0.01 else 0)
    middle = wanted[:, 4800:14400]
    places = range(4800, 4800 + 4096) if tolerance > 0.01 else [4800]
    errors = [np.abs(samples[:, place : place + 9600].numpy() - middle).max() for place in places]
    assert min(errors) < tolerance


def test_audio_too_loud_is_clipped() -> None:
    samples, _ = AudioDecoder().decode(audio_file("wav", "pcm_f32le", tone() * 3))
    assert (samples.min().item(), samples.max().item()) == (-1, 1)


@pytest.mark.parametrize("extension", VIDEO_FILES)
def test_video_is_frames_audio_and_info(extension: str) -> None:
    sample = {extension: video_file(*VIDEO_FILES[extension])}
    [decoded] = wds_decode([sample], "torch_video")
    frames, audio, info = decoded[extension]
    assert (frames.dtype, audio) == (torch.uint8, None)
    assert frames.shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert "audio_fps" not in info
    for index, frame in enumerate(frames):
        found = frame.double().mean((0, 1)).numpy()
        assert np.abs(found - frame_color(index)).max() < 12, index


def test_a_title_in_another_encoding_does_no_harm() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="wav") as container:
        container.metadata["title"] = "TITLE"
        write_audio(container, add_audio(container, "pcm_s16le", tone()), tone())
    data = file.getvalue()
    assert data.count(b"TITLE") == 1
    samples, _ = AudioDecoder().decode(data.replace(b"TITLE", b"\xfc\xe9\xff\xfe\xc3"))
    np.testing.assert_allclose(samples, tone(), atol=1e-4)


def test_video_brings_its_audio_and_its_rates() -> None:
    frames, audio, info = VideoDecoder().decode(video_file("matroska", "libx264", tone()))
    assert len(frames) == FRAMES
    assert audio is not None
    np.testing.assert_allclose(audio.numpy(), tone(), atol=1e-4)
    assert info == {"video_fps": 25.0, "audio_fps": RATE}


def test_a_file_without_such_a_track_is_a_decode_error() -> None:
    for field, word in (("mp4", "torch_video"), ("wav", "torch_audio")):
        with pytest.raises(DecodeError, match=f"field '{field}' of sample 'a'.*Decoder.*FFmpeg cannot decode it"):
            list(wds_decode([{"__key__": "a", field: b"nonsense" * 100}], word))
    sound = audio_file("wav", "pcm_s16le", tone())
    with pytest.raises(DecodeError, match="no video track"):
        list(wds_decode([{"mkv": sound}], "torch_video"))
    with pytest.raises(DecodeError, match="no audio track"):
        list(wds_decode([{"wav": video_file("matroska", "mpeg4")}], "torch_audio"))
