"""Indexes of shards in files: next to the shards, for many at once, from a server by ranges, and stale ones."""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import fsspec  # type: ignore[import-untyped]  # it carries no types
import numpy as np
import pytest
from error_facts import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from nginx_server import Nginx

from wds_datapipes import IndexedSamples, ShardList, TarWriter, WriteOptions
from wds_datapipes.errors import (
    CorruptShardError,
    CorruptSidecarError,
    DuplicateKeyError,
    MissingSidecarError,
    ShardOpenError,
    ShardReadError,
    SpecError,
    StaleSidecarError,
    TruncatedShardError,
)
from wds_datapipes.index import (
    AccessOptions,
    IndexOptions,
    ShardIndex,
    build_index,
    build_indexes,
    check_index,
    index_url,
    read_index,
    write_index,
)
from wds_datapipes.index.format.dataset_builder import IndexResult
from wds_datapipes.index.format.index_file import index_bytes
from wds_datapipes.io.openers import open_path, register_opener
from wds_datapipes.io.remote.remote_file import FIRST_BYTES, RangeReader, RemoteFile, open_ranges
from wds_datapipes.samples.keys import last_dot
from wds_datapipes.testing import build_shard

MB = 1 << 20


def shard(path: Path, count: int = 3, size: int = 5, **options: Any) -> str:
    return build_shard(
        path, [{"__key__": f"{number}", "bin": bytes(size), "cls": f"{number}"} for number in range(count)], **options
    )


# One index


def test_an_index_contains_the_offsets_of_samples(tmp_path: Path) -> None:
    url = shard(tmp_path / "x.tar")
    index = build_index(url, options=IndexOptions(digest=True))
    content = Path(url).read_bytes()
    assert repr(index) == f"<ShardIndex of 3 samples, 6 members, {len(content)} bytes>"
    assert (len(index), index.members, index.fields, index.end) == (3, 6, ["bin", "cls"], 6144)
    assert index[-1] == index[2] == list(index)[2]
    assert index != build_index(url)
    assert index.has_same_layout(build_index(url))
    with pytest.raises(IndexError, match=naming("x.tar", "3 samples", "sample 3")):
        index[3]
    index.check_random_access()


def test_a_custom_rule(tmp_path: Path) -> None:
    url = build_shard(tmp_path / "x.tar", [{"__key__": "a-b", "txt": "1"}, {"__key__": "a-c", "txt": "2"}])
    index = build_index(url, options=IndexOptions(key_rule=dash))
    assert [sample.key for sample in index] == ["a"]
    assert index.fields == ["b.txt", "c.txt"]
    assert index.facts.key_rule.endswith(":dash")
    check_index(index, url, depth="headers", key_rule=dash)
    with pytest.raises(ValueError, match=naming("key_rule", ":dash")):
        check_index(index, url, depth="headers")
    assert build_index(url, options=IndexOptions(key_rule=last_dot)).facts.key_rule == "last_dot"


def dash(name: str) -> tuple[str, str]:
    key, _, field = name.partition("-")
    return key, field


def test_a_repeated_key_is_reported_or_an_error(tmp_path: Path) -> None:
    url = build_shard(tmp_path / "x.tar", [{"__key__": key, "txt": "1"} for key in "aba"])
    with pytest.warns(UserWarning, match=naming("x.tar", "'a'", "byte 2048")):
        index = build_index(url)
    assert index.keys == ["a", "b", "a"]
    with pytest.raises(DuplicateKeyError, match="in parts"):
        build_index(url, on_repeated_key="raise")


def test_concatenated_archives(tmp_path: Path) -> None:
    one, two = shard(tmp_path / "1.tar", 2), shard(tmp_path / "2.tar", 1)
    both = tmp_path / "both.tar"
    both.write_bytes(Path(one).read_bytes() + Path(two).read_bytes())
    with pytest.raises(CorruptShardError, match="ignore_zeros=True"):
        build_index(both)
    with pytest.warns(UserWarning, match="in parts"):
        index = build_index(both, options=IndexOptions(ignore_zeros=True))
    assert index.keys == ["0", "1", "0"]
    check_index(index, both, depth="headers")


def test_data_after_an_archive_are_not_indexed_on_request(tmp_path: Path) -> None:
    url, options = shard(tmp_path / "x.tar"), IndexOptions(end_marker="final")
    plain = build_index(url)
    with open(url, "ab") as file:
        file.write(b"no archive" * 300)
    with pytest.raises(CorruptShardError, match=r'pass options=IndexOptions\(end_marker="final"\) to ignore them'):
        build_index(url)
    index = build_index(url, options)
    assert index.has_same_layout(plain)
    for depth in ("size", "headers", "bytes"):
        check_index(index, url, depth=depth)
    assert len(IndexedSamples(url, access=AccessOptions(indexing=options))) == len(index)
    assert [result.is_new for result in build_indexes([url], options=options)] == [False]
    with open(url, "r+b") as file:
        file.write(b"1")
    with pytest.raises(CorruptShardError):
        check_index(index, url, depth="headers")


@pytest.mark.usefixtures("nothing_left")
def test_an_index_of_a_stream_that_can_only_be_read_once(tmp_path: Path) -> None:
    url = shard(tmp_path / "x.tar")
    plain = build_index(url, options=IndexOptions(digest=True))
    os.mkfifo(tmp_path / "queue")
    writing = threading.Thread(target=(tmp_path / "queue").write_bytes, args=(Path(url).read_bytes(),))
    writing.start()
    for stream in (str(tmp_path / "queue"), f"pipe:cat {url}"):
        found = build_index(stream, options=IndexOptions(digest=True))
        assert found.has_same_layout(plain)
        assert vars(found.facts) == {**vars(plain.facts), "mtime_ns": None, "origin": None}
    writing.join()
    with pytest.raises(ValueError, match=r"has no folder for sidecar files"):
        index_url(f"pipe:cat {url}")


@pytest.mark.usefixtures("nothing_left")
def test_nothing_stays_open(tmp_path: Path) -> None:
    url = shard(tmp_path / "x.tar")
    os.truncate(url, 3000)
    for digest in (False, True):
        with pytest.raises(TruncatedShardError):
            build_index(url, options=IndexOptions(digest=digest))
    with pytest.raises(ShardOpenError, match=r"There is no file"):
        build_index(tmp_path / "none.tar")


def test_an_incomplete_shard_is_not_indexed(tmp_path: Path) -> None:
    with contextlib.suppress(RuntimeError), TarWriter(tmp_path / "x.tar", options=WriteOptions(index=True)) as writer:
        writer.write({"__key__": "a", "txt": "1"})
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    refused: list[tuple[Any, dict[str, Any]]] = [(io.BytesIO(), {}), (tmp_path / "x.tar", {"key_rule": None})]
    for target, options in refused:
        with pytest.raises(ValueError, match=r"index=True needs "):
            TarWriter(target, options=WriteOptions(index=True, **options))
    with pytest.raises(ValueError, match=r"has no folder for sidecar files"):
        TarWriter("pipe:cat > x.tar", options=WriteOptions(index=True))


# Validity


def test_a_changed_shard_is_noticed(tmp_path: Path) -> None:
    url = shard(tmp_path / "x.tar")
    index = build_index(url, options=IndexOptions(digest=True))
    for depth in ("size", "headers", "bytes"):
        check_index(index, url, depth=depth)
    shard(tmp_path / "x.tar", 30)
    with pytest.raises(StaleSidecarError, match=r"x\.tar has changed since its index was built: it has \d+ bytes in"):
        check_index(index, url)
    shard(tmp_path / "x.tar", 3, 6)
    check_index(index, url)
    with pytest.raises(
        StaleSidecarError, match=r"x\.tar has changed .*: sample 0 \('0'\) is .*size=6.*, not '0', .*size=5"
    ):
        check_index(index, url, depth="headers")
    shard(tmp_path / "x.tar", 2)
    with pytest.raises(StaleSidecarError, match=naming("2 samples", "byte 4096", "3 up to", "byte 6144")):
        check_index(index, url, depth="headers")
    content = bytearray(Path(shard(tmp_path / "x.tar")).read_bytes())
    content[512] = 1
    Path(url).write_bytes(content)
    check_index(index, url, depth="headers")
    with pytest.raises(StaleSidecarError, match=r"its SHA-256 is [0-9a-f]{64}, not [0-9a-f]{64}"):
        check_index(index, url, depth="bytes")
    with pytest.raises(ValueError, match=naming("depth", "'all'", '"size"', '"headers"', '"bytes"')):
        check_index(index, url, depth="all")  # type: ignore[arg-type]  # that is what is tested


def test_a_shard_that_changes_while_it_is_indexed(tmp_path: Path, openers: dict[str, Any]) -> None:
    url = shard(tmp_path / "x.tar", size=5000)

    def open_and_touch(address: str, /, **options: Any) -> Any:
        os.utime(url, ns=(1, 1))
        return open_path(url)

    openers[""] = open_and_touch
    with pytest.raises(StaleSidecarError, match=r"x\.tar changed while its headers were read"):
        build_index(url, options=IndexOptions(digest=True))


def test_files_that_are_not_an_index(tmp_path: Path) -> None:
    place = tmp_path / "x.wdsidx"
    with pytest.raises(MissingSidecarError, match=r"x\.wdsidx cannot be read: there is no such file"):
        read_index(str(place))
    for content in (b"", b"v1.2 3\n", b"\x80\x04pickle"):
        place.write_bytes(content)
        with pytest.raises(CorruptSidecarError, match=naming("x.wdsidx", "not a shard index")):
            read_index(str(place))
    with pytest.raises(MissingSidecarError, match=r"x\.wdsidx cannot be written: "):
        write_index(build_index(shard(tmp_path / "x.tar")), str(tmp_path / "none/x.wdsidx"))


@pytest.mark.parametrize(
    ("name", "values", "found"),
    [
        ("sample_offsets", [0, 0, 2048], "the offsets of its samples"),
        ("sample_offsets", [-512, 1024, 2048], "the offsets of its samples"),
        ("sample_members", [0, 2, 2], "its counts of members"),
        ("member_offsets", [512, 1537], "the offsets of its members"),
        ("member_offsets", [512, 1024], "the offsets of its members"),
        ("member_offsets", [512], "its columns of members"),
        ("member_sizes", [1, -1], "the sizes of its members"),
        ("member_sizes", [513, 1], "the sizes of its members"),
        ("member_fields", [0, 1], "its fields"),
        ("key_ends", [1], "its columns of samples"),
        ("key_ends", [1, 3], "its keys"),
        ("key_ends", [-1, 2], "its keys"),
        ("key_ends", [3, 2], "its keys"),
    ],
)
def test_columns_that_do_not_fit_the_others_are_damage(
    tmp_path: Path, name: str, values: list[int], found: str
) -> None:
    url = build_shard(tmp_path / "0.tar", [{"__key__": f"{number}", "cls": "1"} for number in range(2)])
    index = build_index(url)
    ShardIndex(index.facts, {**index.columns})
    with pytest.raises(CorruptSidecarError, match=f"An index is damaged: {found} are inconsistent. Delete it"):
        ShardIndex(index.facts, {**index.columns, name: np.array(values, index.columns[name].dtype)})


def test_an_index_that_is_rewritten_in_place_stays_as_it_was_read(
    tmp_path: Path, forked: Callable[[Callable[[], object]], int | None]
) -> None:
    url = shard(tmp_path / "a.tar", count=2000)
    build_indexes([url])
    path = Path(index_url(url))

    def rewrite_while_it_is_used() -> None:
        before, keys = read_index(str(path)), [f"{number}" for number in range(2000)]
        with path.open("r+b") as file:  # as cp, or rsync --inplace
            file.truncate(0)
            assert before.keys == keys
            file.write(bytes(100))
        assert before.keys == keys
        assert before[1999].key == keys[-1]

    assert forked(rewrite_while_it_is_used) == 0


def test_the_version_of_the_format_is_reported(tmp_path: Path) -> None:
    from zlib import crc32

    content = index_bytes(build_index(shard(tmp_path / "x.tar"))).replace(b'"version": 2', b'"version": 3')
    length = int.from_bytes(content[8:12], "little")
    content = content[:12] + crc32(content[16 : 16 + length]).to_bytes(4, "little") + content[16:]
    (tmp_path / "x.wdsidx").write_bytes(content)
    with pytest.raises(CorruptSidecarError, match=naming("version 3", "wds-datapipes reads 2")):
        read_index(str(tmp_path / "x.wdsidx"))


# Many


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return [shard(tmp_path / f"{name}.tar", count) for name, count in (("a", 3), ("b", 1), ("c", 7))]


def test_indexes_are_built_where_they_are_missing_or_stale(shards: list[str], tmp_path: Path) -> None:
    seen: list[IndexResult] = []
    pattern = f"{tmp_path}/{{a..c}}.tar"
    results = build_indexes(pattern, num_workers=2, on_result=seen.append)
    assert [(result.url, result.index_url, result.samples, result.members) for result in results] == [
        (url, f"{url}.wdsidx", count, 2 * count) for url, count in zip(shards, (3, 1, 7), strict=True)
    ]
    assert sorted(seen) == sorted(results)
    assert all(result.is_new and result.sha256 is None for result in results)
    assert [read_index(index_url(url)) for url in shards] == [build_index(url) for url in shards]

    def built(**options: Any) -> str:
        """The shards that got a new index."""
        return "".join(Path(each.url).stem for each in build_indexes(ShardList(pattern), **options) if each.is_new)

    assert built() == ""
    assert built(rebuild=True) == "abc"
    Path(index_url(shards[0])).unlink()
    Path(index_url(shards[1])).write_bytes(b"WDSINDEX")
    assert built() == "ab"
    shard(tmp_path / "c.tar", 7, 6)  # of the same size, and later
    assert built() == "c"
    assert read_index(index_url(shards[2]))[0].entries[0].size == 6
    assert built(options=IndexOptions(digest=True)) == "abc"
    assert built() == ""
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".tar"] * 3 + [".wdsidx"] * 3


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (IndexOptions(key_rule=last_dot), "key_rule=last_dot"),
        (IndexOptions(lowercase=False), "lowercase=False"),
        (IndexOptions(on_duplicate="last"), "on_duplicate='last'"),
    ],
)
def test_an_index_by_other_rules_is_only_replaced_on_request(
    shards: list[str], options: IndexOptions, named: str
) -> None:
    build_indexes(shards, options=options)
    before = [Path(index_url(url)).read_bytes() for url in shards]
    with pytest.raises(StaleSidecarError, match=rf"\.wdsidx was built with {named}, .* rebuild=True"):
        build_indexes(shards)
    shard(Path(shards[0]), 30)
    with pytest.raises(StaleSidecarError, match=rf"a\.tar\.wdsidx was built with {named}"):
        build_indexes(shards[:1])
    assert [Path(index_url(url)).read_bytes() for url in shards] == before
    assert [result.is_new for result in build_indexes(shards, options=options)] == [True, False, False]
    assert all(result.is_new for result in build_indexes(shards, rebuild=True))
    assert not any(result.is_new for result in build_indexes(shards))


@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_the_index_of_a_writer_has_no_time_and_is_valid_while_it_is_newer(tmp_path: Path, suffix: str) -> None:
    url, options = f"{tmp_path}/x.tar{suffix}", IndexOptions(key_rule=last_dot, digest=True)
    contents = []
    for _ in range(2):
        with TarWriter(url, options=WriteOptions(index=True, digest=True, key_rule=last_dot)) as writer:
            for number in range(3):
                writer.write({"__key__": f"{number}", "txt": "a" * number, "cls": number})
        contents.append(Path(index_url(url)).read_bytes())
    assert contents[0] == contents[1], "the same samples give the same index"
    assert not build_indexes([url], options=options)[0].is_new
    later = os.stat(index_url(url)).st_mtime_ns + 1
    os.utime(url, ns=(later, later))
    assert build_indexes([url], options=options)[0].is_new


def test_a_broken_shard_is_reported_and_the_others_are_indexed(shards: list[str]) -> None:
    os.truncate(shards[1], 515)
    for workers in (1, 2):
        with pytest.raises(TruncatedShardError, match=r"b\.tar ends inside"):
            build_indexes(shards, num_workers=workers)
        results = build_indexes(shards, on_error="skip", num_workers=workers)
        assert [result.url for result in results] == [shards[0], shards[2]]
        with pytest.warns(UserWarning, match=r"build_indexes skipped an item: TruncatedShardError: .*b\.tar"):
            build_indexes(shards, on_error="warn", num_workers=workers)
    assert not Path(index_url(shards[1])).exists()
    with pytest.raises(ValueError, match="on_error must be"):
        build_indexes(shards, on_error="none")  # type: ignore[arg-type]  # that is what is tested


def test_a_pattern_with_a_variable_is_refused() -> None:
    with pytest.raises(SpecError, match=r"Only ShardList substitutes.* Pass ShardList\('\$\{DATA\}/a\.tar'\)"):
        build_indexes("${DATA}/a.tar")


# From a server


@pytest.fixture
def served(nginx: Nginx, tmp_path: Path) -> tuple[str, Path]:
    """The URL of a folder on a server, and the folder."""
    (nginx.files / tmp_path.name).mkdir()
    nginx.asked()
    return f"http://127.0.0.1:{nginx.http}/{tmp_path.name}", nginx.files / tmp_path.name


def requested(nginx: Nginx) -> list[int]:
    """The size of each range requested since the last call, in bytes."""
    ranges = [re.search(r"\[bytes=(\d+)-(\d+)\]", line) for line in nginx.asked() if " GET " in line]
    return [int(each[2]) - int(each[1]) + 1 for each in ranges if each]


def test_only_headers_of_a_remote_shard_are_fetched(nginx: Nginx, served: tuple[str, Path]) -> None:
    address, folder = served
    local = shard(folder / "x.tar", 6, 4 * MB)
    index = build_index(f"{address}/x.tar")
    assert index.has_same_layout(build_index(local))
    assert index.facts.bytes == os.path.getsize(local) > 24 * MB
    assert index.facts.etag is not None
    assert sum(requested(nginx)) <= 9 * FIRST_BYTES
    with_digest = IndexOptions(digest=True)
    assert build_index(f"{address}/x.tar", with_digest).facts.sha256 == build_index(local, with_digest).facts.sha256
    shard(folder / "y.tar", 500, 2000)
    requested(nginx)
    build_index(f"{address}/y.tar")
    found = requested(nginx)
    assert len(found) <= 9, "small members are fetched in few requests"
    assert sum(found) <= os.path.getsize(folder / "y.tar") + FIRST_BYTES


def test_many_remote_shards_are_indexed_in_processes(served: tuple[str, Path], tmp_path: Path) -> None:
    address, folder = served
    locals_ = [shard(folder / f"{name}.tar", 3, 300_000) for name in "abc"]
    urls = [f"{address}/{name}.tar" for name in "abc"]
    build_index(urls[0])  # so that this process has an HTTP thread, which its forks lack
    results = build_indexes(urls, index_dir=tmp_path / "indexes", num_workers=2)
    for result, local in zip(results, locals_, strict=True):
        assert read_index(result.index_url).has_same_layout(build_index(local))


def test_a_shard_on_a_server_without_ranges_is_read_whole(
    nginx: Nginx, served: tuple[str, Path], tmp_path: Path
) -> None:
    local = shard(served[1] / "x.tar", 3, MB)
    index = build_index(f"http://127.0.0.1:{nginx.http}/whole/{tmp_path.name}/x.tar")
    assert index.has_same_layout(build_index(local))
    assert index.facts.bytes == os.path.getsize(local)


def test_a_changed_remote_shard_is_noticed(served: tuple[str, Path]) -> None:
    address, folder = served
    local = shard(folder / "x.tar")
    index = build_index(f"{address}/x.tar")
    check_index(index, f"{address}/x.tar")
    shard(folder / "x.tar", 3, 6)
    os.utime(local, (1, 1))
    with pytest.raises(StaleSidecarError, match=r"x\.tar has changed .*: its ETag is '.*' instead"):
        check_index(index, f"{address}/x.tar")
    with pytest.raises(ShardOpenError, match="HTTP status 404"):
        build_index(f"{address}/none.tar")


@given(st.lists(st.tuples(st.integers(0, 3_000_000), st.integers(0, 600_000)), max_size=8))
@settings(deadline=None, max_examples=20)
def test_ranges_are_those_of_the_file(places: list[tuple[int, int]]) -> None:
    content = Random(0).randbytes(2_500_000)
    fsspec.filesystem("memory").pipe_file("/ranges/x", content)
    ranges: Any = open_ranges("memory://ranges/x")
    stream = io.BufferedReader(ranges)
    for place, count in places:
        stream.seek(place)
        assert stream.read(count) == content[place : place + count]


def test_a_truncated_range_is_an_error() -> None:
    fsspec.filesystem("memory").pipe_file("/ranges/x.tar", bytes(1000))
    file = RemoteFile.open("memory://ranges/x.tar")
    assert file is not None
    with (
        RangeReader(file, "memory://ranges/x.tar", 2000) as reader,
        pytest.raises(ShardReadError, match=naming("x.tar", 1000, "bytes 0 to 2000")),
    ):
        reader.read(10)


@pytest.mark.usefixtures("openers")
def test_indexes_of_a_custom_scheme(tmp_path: Path) -> None:
    url = shard(tmp_path / "x.tar")
    register_opener("mine", lambda url, /, **options: open_path(str(tmp_path / url.removeprefix("mine:"))))
    with pytest.raises(MissingSidecarError, match=r"mine:x\.tar\.wdsidx cannot be written: its opener only reads"):
        build_indexes(["mine:x.tar"])
    write_index(build_index(url), index_url(url))
    assert read_index("mine:x.tar.wdsidx") == build_index(url)
    assert build_indexes(["mine:x.tar"], index_dir=tmp_path / "indexes")[0].samples == 3
    with pytest.raises(MissingSidecarError, match=r"There is no file '.*none'"):
        read_index("mine:none")
