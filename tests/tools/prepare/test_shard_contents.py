"""Outlines of shards agree with the stages that read them, and report faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from drawn_archives import write_members

from wds_datapipes.errors import ShardError
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.shards.loading import read_shards
from wds_datapipes.testing import build_shard
from wds_datapipes.tools.prepare.shard_contents import read_contents


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.xz"])
def test_an_outline_agrees_with_reading(tmp_path: Path, suffix: str) -> None:
    samples: list[dict[str, bytes | str]] = [
        {"__key__": f"d/{n}", "jpg": b"x" * 700 * n, "Seg.PNG": b"y"} for n in range(20)
    ]
    url = build_shard(tmp_path / f"a.{suffix}", samples)
    contents = read_contents(url)
    read = list(group_samples(read_shards([url])))
    assert [(s.key, s.fields) for s in contents.samples] == [
        (s["__key__"], {field: len(s[field]) for field in s if field[:2] != "__"}) for s in read
    ]
    assert contents.samples[3].bytes == 2101
    assert contents.bytes == Path(url).stat().st_size
    assert contents.faults == []


@pytest.mark.parametrize("cut", [0, 300, 512, 1500, 2048, 3000, 4096, 5 * 1024])
def test_an_outline_of_a_truncated_shard_ends_like_reading(tmp_path: Path, cut: int) -> None:
    url = write_members(tmp_path / "a.tar", ["a.x", "a.y", "b.x", "b.y", "c.x"])
    with Path(url).open("r+b") as file:
        file.truncate(cut)
    keys, error = yielded(url)
    contents = read_contents(url)
    (fault,) = contents.faults
    assert fault.kind == type(error).__name__
    # Only reading a member's data reveals how much of it exists.
    assert fault.message.partition("): ")[0] == str(error).partition("): ")[0]
    assert contents.bytes is None
    assert [sample.key for sample in contents.samples] == keys


def yielded(url: str) -> tuple[list[str], ShardError]:
    keys = []
    samples = group_samples(read_shards([url]))
    try:
        for sample in samples:
            keys.append(sample["__key__"])  # noqa: PERF401  those before the error are wanted
    except ShardError as error:
        return keys, error
    raise AssertionError("it was read to its end")


def test_all_duplicates_and_repeated_keys_are_reported(tmp_path: Path) -> None:
    names = ["a.x", "a.X", "b.x", "a.y", "b.z", "b.z", "__meta__/k.json", "README", ".hidden"]
    contents = read_contents(write_members(tmp_path / "a.tar", names))
    assert [(fault.kind, fault.key, fault.field) for fault in contents.faults] == [
        ("DuplicateKeyError", "a", "x"),
        ("DuplicateKeyError", "a", ""),
        ("DuplicateKeyError", "b", ""),
        ("DuplicateKeyError", "b", "z"),
    ]
    assert "at bytes 0 and 1024 (member 'a.X')" in contents.faults[0].message
    assert (contents.strays, contents.stray_names) == (2, ["README", ".hidden"])
    assert [sample.key for sample in contents.samples] == ["a", "b", "a", "b"]
