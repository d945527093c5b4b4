"""The example that cuts videos into clips: frames and sound are those of the video, and nothing is encoded again."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import av
import numpy as np
import pytest
from media_files import HEIGHT, RATE, WIDTH, add_audio, frame_color, tone, write_audio

from wds_datapipes import ShardList, convert_shards, create_shards
from wds_datapipes.codecs.media import VideoDecoder
from wds_datapipes.errors import SampleSourceError
from wds_datapipes.samples.keys import first_dot
from wds_datapipes.testing import build_shard
from wds_datapipes.tools.prepare.sources.image_folder import find_images

PROGRAM = Path(__file__).parents[1] / "docs/examples/cut_clips.py"
FRAMES, FPS, GOP = 130, 25, 12


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("cut_clips", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SECONDS", 1.0)
    return module


def long_video(form: str, codec: str, sound: str = "", options: dict[str, str] | None = None) -> bytes:
    """Return a video whose frames differ in color, with a keyframe every `GOP` frames."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=FPS, options=options or {})
        stream.height, stream.width, stream.pix_fmt, stream.bit_rate = HEIGHT, WIDTH, "yuv420p", 2_000_000
        stream.gop_size = GOP
        samples = tone(2, FRAMES / FPS)
        track = add_audio(container, sound, samples) if sound else None
        for index in range(FRAMES):
            picture = np.full((HEIGHT, WIDTH, 3), frame_color(index), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
        if track is not None:
            write_audio(container, track, samples)
    return file.getvalue()


VIDEOS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "mp4 with frames in both directions": ("mp4", ("mp4", "libx264", "aac", {"bf": "3"})),
    "mp4 without sound": ("mp4", ("mp4", "mpeg4")),
    "mov": ("mov", ("mov", "mpeg4", "pcm_s16le")),
    "mkv": ("mkv", ("matroska", "libx264", "pcm_s16le")),
    "webm": ("webm", ("webm", "libvpx-vp9", "libopus")),
}


def video_packets(data: bytes) -> list[bytes]:
    with av.open(io.BytesIO(data)) as container:
        return [bytes(packet) for packet in container.demux(video=0) if packet.size]


@pytest.mark.parametrize("name", VIDEOS)
def test_clips_are_the_video_without_encoding_it_again(program: ModuleType, name: str) -> None:
    field, arguments = VIDEOS[name]
    data = long_video(*arguments)
    clips = list(program.cut_clips({"__key__": "a", "__url__": "f", field: data, "txt": b"a caption"}))
    assert [clip["__key__"] for clip in clips] == [f"a-{number:04d}" for number in range(len(clips))]
    assert len(clips) > 3
    assert {clip["txt"] for clip in clips} == {b"a caption"}
    assert b"".join(part for clip in clips for part in video_packets(clip[field])) == b"".join(video_packets(data))
    whole, sound, _ = VideoDecoder().decode(data)
    at, heard, starts = 0, 0, []
    for clip in clips:
        frames, part, rates = VideoDecoder().decode(clip[field])  # on its own
        facts = clip["clip.json"]
        assert len(frames) == facts["frames"]
        np.testing.assert_array_equal(frames, whole[at : at + len(frames)])
        assert facts["start"] == pytest.approx(at / FPS, abs=0.002)
        assert facts["seconds"] == pytest.approx(len(frames) / FPS, abs=0.002)
        assert facts["video"] == "a"
        assert rates["video_fps"] == pytest.approx(FPS)
        starts.append(at)
        at += len(frames)
        assert (part is None) == (sound is None)
        if part is not None and sound is not None:
            assert abs(part.shape[1] / RATE - len(frames) / FPS) < 0.1
            heard += part.shape[1]
            if field in ("mov", "mkv"):  # PCM, cut at packets of 1024 samples
                begin = min(
                    range(0, sound.shape[1], 1024), key=lambda place: abs(place - starts[-1] * RATE / FPS + 512)
                )
                near = [
                    start
                    for start in range(max(0, begin - 2048), begin + 2049)
                    if np.array_equal(part[:, :500], sound[:, start : start + 500])
                ]
                assert near
    assert at == FRAMES
    assert all(step >= FPS for step in np.diff(starts))
    if sound is not None and field in ("mov", "mkv"):
        assert heard == sound.shape[1]


def test_clips_of_a_folder_go_to_shards(program: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "videos/deep").mkdir(parents=True)
    for name in ("one.mp4", "deep/two.mp4"):
        (tmp_path / "videos" / name).write_bytes(long_video("mp4", "libx264", "aac"))
    (tmp_path / "videos/one.txt").write_text("a caption")
    source = find_images(tmp_path / "videos", has_classes=False, endings=["mp4"], key_rule=first_dot)
    made = create_shards(source, tmp_path / "clips-%03d.tar", function=program.cut_clips, maxcount=1, num_workers=0)
    assert [shard.info.samples for shard in made] == [4, 4]
    clips = ShardList(str(tmp_path / "clips-*.tar")).load_wds_shards().group_samples().wds_decode("torch_video")
    found = {clip["__key__"]: clip for clip in clips}
    assert sorted(found) == [f"{key}-{number:04d}" for key in ("deep/two", "one") for number in range(4)]
    assert sum(len(clip["mp4"][0]) for clip in found.values()) == 2 * FRAMES
    assert [clip.get("txt") for _, clip in sorted(found.items())] == [None] * 4 + ["a caption"] * 4


def test_videos_in_shards_are_cut_and_damage_is_an_error(program: ModuleType, tmp_path: Path) -> None:
    video = long_video("mp4", "mpeg4")
    build_shard(tmp_path / "in.tar", [{"__key__": "a", "mp4": video, "json": json.dumps({"title": "x"})}])
    [shard] = convert_shards(program.cut_clips, str(tmp_path / "in.tar"), f"{tmp_path}/out/", num_workers=0)
    samples: list[Any] = list(ShardList(shard.info.url).load_wds_shards().group_samples().wds_decode())
    assert [sample["json"] for sample in samples] == [{"title": "x"}] * len(samples)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/a.mp4").write_bytes(video[: len(video) // 2])
    source = find_images(tmp_path / "cut", has_classes=False, endings=["mp4"])
    with pytest.raises(SampleSourceError, match=r"a\.mp4"):
        create_shards(source, tmp_path / "bad-%03d.tar", function=program.cut_clips, num_workers=0)
