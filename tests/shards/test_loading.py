"""Loading shards as members: how they are opened and read in order, and what a policy skips."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import pytest

from wds_datapipes.errors import (
    CorruptShardError,
    MissingDependencyError,
    ShardOpenError,
    ShardReadError,
    TruncatedShardError,
)
from wds_datapipes.io.read_limits import ReadLimits
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.shards.loading import ShardReader, TarOptions, load_wds_shards, read_shards
from wds_datapipes.shards.position import END_OF_SHARDS, Resume
from wds_datapipes.shards.seeking import ArchiveSpans
from wds_datapipes.testing import build_shard
from wds_datapipes.types import Shard

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def shard(tmp_path: Path) -> str:
    return build_shard(tmp_path / "x.tar", [{"__key__": key, "txt": f"{key} one", "cls": "1"} for key in "abc"])


def names(*urls: str, **options: Any) -> list[str]:
    return [name for _, name, _, _ in load_wds_shards(urls, TarOptions(**options))]


ALL = ["a.txt", "a.cls", "b.txt", "b.cls", "c.txt", "c.cls"]


def test_members_contain_the_requested_url(shard: str) -> None:
    for address, local in [(shard, shard), (f"file:{shard}", shard), (f"pipe:cat {shard}", None)]:
        members = list(load_wds_shards([address]))
        assert [(name, data, offset) for _, name, data, offset in members][:2] == [
            ("a.txt", b"a one", 0),
            ("a.cls", b"1", 1024),
        ]
        (read,) = {id(read): read for read, _, _, _ in members}.values()
        assert isinstance(read, Shard)
        assert (read.url, read.local_path, read.is_complete) == (address, local, True)


def test_the_options_reach_the_reader(tmp_path: Path, shard: str) -> None:
    content = Path(shard).read_bytes()
    twice = tmp_path / "twice.tar"
    twice.write_bytes(content * 2)
    bare = build_shard(tmp_path / "bare.tar", [{"__key__": "a", "txt": "one"}], end_marker=False)
    assert names(shard, rename_files=str.upper, select_files=lambda name: name.endswith("TXT")) == [
        "A.TXT",
        "B.TXT",
        "C.TXT",
    ]
    assert names(str(twice), ignore_zeros=True) == ALL + ALL
    with pytest.raises(CorruptShardError, match="ignore_zeros=True"):
        names(str(twice))
    assert names(bare, end_marker="optional") == ["a.txt"]
    with pytest.raises(TruncatedShardError, match='end_marker="optional"'):
        names(bare)


# Errors


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("no.tar", ShardOpenError, r"There is no file 'no\.tar'"),
        ("pipe:head -c 1500 {shard}; exit 3", ShardReadError, "exited with status 3 after 1500 bytes"),
        ("pipe:cat {shard}; exit 3", ShardReadError, "exited with status 3 after 10240 bytes"),
        ("pipe:cat {shard}; false | true", ShardReadError, "exited with status 1 after 10240 bytes"),
        ("pipe:head -c 1500 {shard}", TruncatedShardError, r"head -c .* ends inside a header, at byte 1500"),
        ("pipe:head -c 1536 {shard}; kill $$", ShardReadError, r"exited with status 143 \(signal 15\)"),
    ],
)
def test_a_shard_that_fails(shard: str, url: str, error: type[Exception], message: str) -> None:
    url = url.format(shard=shard)
    with pytest.raises(error, match=message):
        names(url)
    with pytest.raises(error, match=message):
        list(group_samples(read_shards([shard, url])))
    with pytest.warns(UserWarning, match=f"load_wds_shards skipped an item: {error.__name__}"):
        samples = list(group_samples(read_shards([shard, url, shard], TarOptions(on_error="warn"))))
    assert [sample["__key__"] for sample in samples if sample["__url__"] == shard] == ["a", "b", "c"] * 2
    # The exit status reports a failure, so the last sample may be incomplete.
    assert len(samples) <= 8


def test_no_more_shards_are_taken_than_remain(shard: str) -> None:
    def urls() -> Iterator[str]:
        yield shard
        pytest.fail("a queue would hand out one more")

    reader = ShardReader(urls(), TarOptions(), Resume(END_OF_SHARDS, again={0: [(0, 2048)]}))
    assert [name for _, members in reader for _, name, _, _ in members] == ALL[:2]


def test_a_span_of_a_local_shard_is_reached_by_seeking(tmp_path: Path) -> None:
    url = build_shard(tmp_path / "large.tar", [{"__key__": key, "bin": bytes(8 << 20)} for key in "ab"])
    start = (8 << 20) + 512
    with closing(ArchiveSpans(url, {}, ReadLimits(), start, lambda *_: None)) as archive:
        before = psutil.Process().io_counters().read_chars
        assert archive.open_span(start, start + 512).read(512)[:5] == b"b.bin"
        assert psutil.Process().io_counters().read_chars - before < 4 << 20


def test_an_error_of_a_user_function_is_not_an_error_of_the_shard(shard: str) -> None:
    def select(name: str) -> bool:
        raise PermissionError("no list of names")

    with pytest.raises(PermissionError, match="no list of names"):
        list(load_wds_shards([shard], TarOptions(select_files=select, on_error="skip")))


@pytest.mark.parametrize("on_error", ["skip", lambda error: True])
@pytest.mark.parametrize("kind", [MissingDependencyError, KeyError])
def test_errors_of_the_pipeline_are_never_skipped(
    shard: str, openers: dict[str, Any], kind: type[Exception], on_error: Any
) -> None:
    def open_it(url: str, /, **options: Any) -> BinaryIO:
        raise kind("set it up")

    openers["test"] = open_it
    with pytest.raises(kind, match="set it up"):
        names(shard, "test:x", shard, on_error=on_error)
