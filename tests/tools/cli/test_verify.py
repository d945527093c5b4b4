"""The command ``verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from media_files import audio_file, tone, video_file

from wds_datapipes.errors import MissingDependencyError
from wds_datapipes.testing import build_shard
from wds_datapipes.tools.prepare.verify import verify_shards


def test_workers_find_what_one_process_finds(program: Any, shards: list[str], nothing_left: None) -> None:
    build_shard("b.tar", [{"__key__": "02", "cls": "x"}])
    Path("cut.tar").write_bytes(Path("a-1.tar").read_bytes()[:4000])
    one, three = (
        program("verify", *shards, "b.tar", "cut.tar", "--decode", "--num-workers", workers) for workers in ("1", "3")
    )
    assert one == three
    assert one.code == 1


def test_keys_are_compared_and_not_their_digests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        build_shard(f"{name}.tar", [{"__key__": f"{name}{n}", "txt": "x"} for n in range(3)])

    def repeated(*urls: str) -> list[str]:
        return [fault.key for shard in verify_shards(urls, num_workers=0) for fault in shard.faults]

    assert repeated("a.tar", "b.tar") == []
    monkeypatch.setattr("wds_datapipes.tools.prepare.repeated_keys.hash", lambda key: int(key[1]), raising=False)
    assert repeated("a.tar", "b.tar") == []
    assert repeated("a.tar", "b.tar", "./a.tar") == ["a0", "a1", "a2"]


def test_sound_and_video_are_decoded_and_what_is_not_is_noted(program: Any, folder: Path) -> None:
    sound = audio_file("wav", "pcm_s16le", tone())
    film = video_file("matroska", "libx264", tone())
    samples: list[dict[str, Any]] = [
        {"__key__": "whole", "wav": sound, "mkv": film, "bin": b"any", "json": "{}"},
        {"__key__": "cut", "wav": sound[:-2000], "mkv": film[:-2000]},
        {"__key__": "other", "wav": b"<html>404</html>", "mp4": sound},
    ]
    build_shard("a.tar", samples)
    (shard,) = verify_shards("a.tar", decode=True, num_workers=0)
    assert [(fault.kind, fault.key, fault.field) for fault in shard.faults] == [
        ("DecodeError", key, field)
        for key, field in (("cut", "wav"), ("cut", "mkv"), ("other", "wav"), ("other", "mp4"))
    ]
    assert shard.notes == ["a.tar: 'bin' not decoded in 1 of 3 samples, because there is no decoder for it"]
    done = program("verify", "--decode", "a.tar")
    assert done.code == 1
    assert "the file is cut: the WAV data at byte" in done.err + done.out


def test_media_that_cannot_be_decoded_here_are_noted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def require(*_: object, **__: object) -> None:
        raise MissingDependencyError("install wds-datapipes[media]")

    monkeypatch.setattr("wds_datapipes.codecs.media.load_av", require)
    build_shard("a.tar", [{"__key__": "a", "wav": b"x", "cls": b"x"}])
    (shard,) = verify_shards("a.tar", decode=True, num_workers=0)
    assert [fault.field for fault in shard.faults] == ["cls"]
    [note] = shard.notes
    assert note.endswith(
        "'wav' not decoded in 1 of 1 sample, because a package is missing: install wds-datapipes[media]"
    )
