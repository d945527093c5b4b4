"""Video and audio: files of every extension are written by PyAV here, and read back by the decoders."""

from __future__ import annotations

import io
from collections.abc import Iterator

import av
import numpy as np
import pytest
import torch
from error_facts import naming
from media_files import (
    AUDIO_FILES,
    FRAMES,
    HEIGHT,
    RATE,
    VIDEO_FILES,
    WIDTH,
    add_audio,
    audio_file,
    frame_color,
    tone,
    video_file,
    wav_file,
    write_audio,
)
from plain_codecs import wds_decode

from wds_datapipes.codecs.media import AUDIO_EXTENSIONS, VIDEO_EXTENSIONS, AudioDecoder, VideoDecoder
from wds_datapipes.errors import DecodeError


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


def test_floats_beyond_full_scale_are_kept() -> None:
    samples, _ = AudioDecoder().decode(audio_file("wav", "pcm_f32le", tone() * 3))
    np.testing.assert_array_equal(samples, tone() * 3)


#: The dtype of samples in a WAV file, its kind and bits, and what full scale is.
WAV_SAMPLES = {
    "uint8": ("u1", 1, 8, 128),
    "int16": ("<i2", 1, 16, 1 << 15),
    "int24": ("<i4", 1, 24, 1 << 31),
    "int32": ("<i4", 1, 32, 1 << 31),
    "int64": ("<i8", 1, 64, 1 << 63),
    "float32": ("<f4", 3, 32, 1),
    "float64": ("<f8", 3, 64, 1),
}


@pytest.mark.parametrize("name", WAV_SAMPLES)
@pytest.mark.parametrize("channels", [1, 2, 3, 6, 7, 8, 9, 12, 16, 31, 32, 33, 64])
def test_samples_of_any_type_and_number_of_channels_are_exact(name: str, channels: int) -> None:
    dtype, kind, bits, full_scale = WAV_SAMPLES[name]
    rng = np.random.default_rng(7)
    for length, rate in ((0, 16000), (1, 1), (2, 384_000), (1500, 2**31 - 1 if channels * bits <= 16 else 192_000)):
        if kind == 3:
            samples = rng.normal(0, 2, (length, channels)).astype(dtype)
            wanted = samples.astype(np.float32)
        else:
            limits = np.iinfo(dtype)
            samples = rng.integers(limits.min, limits.max, (length, channels), dtype, endpoint=True)
            samples[:1], samples[1:2] = limits.min, limits.max
            if bits == 24:
                samples &= -256
            wanted = ((samples.astype(np.float64) - (128 if bits == 8 else 0)) / full_scale).astype(np.float32)
        found, found_rate = AudioDecoder().decode(wav_file(samples, rate=rate, kind=kind, bits=bits))
        assert (tuple(found.shape), found_rate) == ((channels, length), rate)
        np.testing.assert_allclose(found.T, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("channels", [8, 16])
def test_lossy_sound_of_many_channels_is_decoded(channels: int) -> None:
    samples = tone(channels)
    layout = {8: "7.1", 16: "hexadecagonal"}[channels]
    codec, form = {8: ("aac", "ipod"), 16: ("pcm_f32le", "matroska")}[channels]
    found, _ = AudioDecoder().decode(audio_file(form, codec, samples, layout))
    assert found.shape[0] == channels
    assert np.abs(found[:, 4800:9600].numpy()).max() > 0.4


#: Pixel formats of video without loss, or nearly, and odd sizes: container, codec, format, width, height and error.
ODD_VIDEOS = [
    ("matroska", "ffv1", "yuv444p", 1, 1, 2),
    ("matroska", "ffv1", "bgra", 33, 31, 0),
    ("matroska", "ffv1", "gbrp16le", 7, 5, 0),
    ("webm", "libvpx-vp9", "yuv420p", 17, 19, 2),
    ("webm", "libvpx-vp9", "yuva420p", 17, 19, 2),
    ("mp4", "libx264", "yuv420p", 2, 2, 3),
    ("mp4", "libx264", "yuv420p", 4096, 16, 3),
    ("mov", "prores_ks", "yuva444p10le", 64, 64, 1),
]


@pytest.mark.parametrize(("form", "codec", "pixels", "width", "height", "error"), ODD_VIDEOS)
def test_video_of_odd_sizes_and_formats_is_decoded(
    form: str, codec: str, pixels: str, width: int, height: int, error: int
) -> None:
    frames, _, _ = VideoDecoder().decode(video_file(form, codec, size=(height, width), pixels=pixels))
    assert frames.shape == (FRAMES, height, width, 3)
    for index, frame in enumerate(frames):
        assert np.abs(frame.int().numpy() - frame_color(index)).max() <= error


def damages(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the kinds of damage, and the file with it."""
    middle = len(data) // 2 | 1
    for part in (0.1, 0.43, 0.9):
        yield "cut", data[: int(len(data) * part) | 1]
    yield "cut", data[:-1]
    yield "overwritten", data[:middle] + bytes(255 - byte for byte in data[middle : middle + 16]) + data[middle + 16 :]
    yield "zeroed", data[:middle] + bytes(2048) + data[middle + 2048 :]
    yield "hole", data[:middle] + data[middle + 701 :]
    yield "overwritten", b"\0" * 16 + data[16:]
    yield "overwritten", data[:-16] + b"\xa5" * 16
    yield "followed", data + b"garbage!" * 100
    yield "followed", data + bytes(4096)


#: Files that carry checksums of all their content.
WITH_CHECKSUMS = ("flac", "ogg", "opus", "ogv")


@pytest.mark.parametrize(
    "extension", [*AUDIO_FILES, "aiff", "au", "caf", "alac", "mts", *VIDEO_FILES, "ts", "avi sound", "mkv sound"]
)
def test_damage_is_an_error_and_never_less_sound_or_fewer_frames(extension: str) -> None:
    rng = np.random.default_rng(7)
    sound = (tone(2, 2) + rng.normal(0, 0.05, (2, 2 * RATE))).astype(np.float32)
    others = {
        "aiff": ("aiff", "pcm_s16be"),
        "au": ("au", "pcm_s16be"),
        "caf": ("caf", "pcm_s16le"),
        "alac": ("ipod", "alac"),
        "mts": ("mpegts", "aac"),
    }
    decoder: AudioDecoder | VideoDecoder
    if extension in AUDIO_FILES or extension in others:
        data = audio_file(*(AUDIO_FILES.get(extension) or others[extension])[:2], sound)
        decoder = AudioDecoder()
    else:
        name, _, has_sound = extension.partition(" ")
        form = ("mpegts", "libx264") if name == "ts" else VIDEO_FILES[name]
        data = video_file(*form, sound if has_sound else None, noise=True)
        decoder = VideoDecoder()
    whole = [part for part in decoder.decode(data) if isinstance(part, torch.Tensor)]
    for kind, damaged in damages(data):
        try:
            found = [part for part in decoder.decode(damaged) if isinstance(part, torch.Tensor)]
        except ValueError:
            assert kind != "followed"
            continue
        if (extension, kind) != ("mjpeg", "zeroed"):  # pictures have no sizes: two become one
            assert all(part.shape >= other.shape for part, other in zip(found, whole, strict=True)), kind
        if kind != "followed":
            assert kind != "cut" or damaged == data[:-1]
            assert extension not in WITH_CHECKSUMS
        if kind in ("followed", "cut"):
            assert all(torch.equal(part, other) for part, other in zip(found, whole, strict=True)), kind


def test_an_mp3_file_without_a_header_is_cut_within_a_frame() -> None:
    data = audio_file("mp3", "libmp3lame", tone(2, 2))
    start = data.index(b"\xff\xfb", data.index(b"Info"))
    whole, _ = AudioDecoder().decode(data[start:])
    assert whole.shape[1] > 2 * RATE
    with pytest.raises(ValueError, match=r"cut or damaged in packet \d+ of its audio track"):
        AudioDecoder().decode(data[start:-100])


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF, 0x7FFFFFFF])
def test_a_wav_file_that_was_piped_does_not_know_its_size(size: int) -> None:
    samples = np.arange(-3000, 3000, dtype="<i2").reshape(-1, 2)
    data = bytearray(wav_file(samples))
    data[40:44] = size.to_bytes(4, "little")
    found, _ = AudioDecoder().decode(bytes(data))
    np.testing.assert_array_equal(found.T * 32768, samples)


def test_a_wav_file_may_declare_the_size_of_the_file() -> None:
    samples = np.arange(-3000, 3000, dtype="<i2").reshape(-1, 2)
    data = bytearray(wav_file(samples))
    for size in (len(data), len(data) - 8):
        data[40:44] = size.to_bytes(4, "little")
        found, _ = AudioDecoder().decode(bytes(data))
        np.testing.assert_array_equal(found.T * 32768, samples)


def test_an_mp3_header_may_count_its_own_frame() -> None:
    data = audio_file("mp3", "libmp3lame", tone(2, 2))
    place = data.index(b"Info") + 8
    frames = int.from_bytes(data[place : place + 4], "big")
    whole, _ = AudioDecoder().decode(data)
    more = data[:place] + (frames + 1).to_bytes(4, "big") + data[place + 4 :]
    assert AudioDecoder().decode(more)[0].shape[1] >= whole.shape[1]
    with pytest.raises(ValueError, match=f"declares {frames + 9} MP3 frames, but has {frames}"):
        AudioDecoder().decode(data[:place] + (frames + 9).to_bytes(4, "big") + data[place + 4 :])


def test_free_space_of_an_mp4_file_may_end_beyond_it() -> None:
    data = video_file("mp4", "mpeg4") + (5000).to_bytes(4, "big") + b"free" + bytes(100)
    assert len(VideoDecoder().decode(data)[0]) == FRAMES


def test_a_live_webm_file_does_not_know_its_size() -> None:
    data = video_file("webm", "libvpx-vp9", options={"live": "1"})
    assert data[data.index(b"\x18\x53\x80\x67") + 4 :][:8] == b"\x01" + b"\xff" * 7
    frames, _, _ = VideoDecoder().decode(data)
    assert len(frames) == FRAMES
    for end in (-1, -50):
        with pytest.raises(ValueError, match=naming("Matroska")):
            VideoDecoder().decode(data[:end])


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
