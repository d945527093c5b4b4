"""DALI and wids indexes are written with the right offsets, and wids indexes are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drawn_archives import write_members
from error_facts import naming

from wds_datapipes import IndexedSamples, ShardList, last_dot
from wds_datapipes.errors import (
    ChangedShardError,
    CorruptSidecarError,
    DuplicateKeyError,
    TruncatedShardError,
    UnsupportedSidecarError,
)
from wds_datapipes.index import (
    IndexOptions,
    Manifest,
    build_indexes,
    read_wids_index,
    write_dali_index,
    write_wids_index,
)
from wds_datapipes.testing import build_shard
from wds_datapipes.tools.interop.dali_index import dali_index_url
from wds_datapipes.types import ShardInfo

#: Keys for which GNU tar and PAX archives have extra headers.
LONG = [f"{'d' * 60}/{'k' * 70}{number}" for number in range(3)]


def fields(keys: list[str]) -> list[str]:
    return [f"{key}.{field}" for key in keys for field in ("jpg", "cls")]


@pytest.fixture(params=["ustar", "gnu", "pax", "pax time"])
def any_shard(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A shard of each kind; in the last, each member has a PAX header."""
    tar_format, _, time = request.param.partition(" ")
    return write_members(tmp_path / "x.tar", fields(LONG), tar_format, mtime=1.5 if time else 1)


@pytest.fixture
def plain(tmp_path: Path) -> str:
    return write_members(tmp_path / "x.tar", fields(["a", "b", "c"]))


# DALI


def test_a_dali_index_has_the_offsets_of_the_data(any_shard: str) -> None:
    assert write_dali_index(any_shard).keys == LONG
    first, *lines = Path(dali_index_url(any_shard)).read_text().splitlines()
    assert first == "v1.2 3"
    content = Path(any_shard).read_bytes()
    for key, line in zip(LONG, lines, strict=True):
        words = line.split(" ")
        for field, extension, offset, size, name in (("jpg", *words[:4]), ("cls", *words[4:])):
            assert (extension, name) == (field, f"{key}.{field}")
            assert content[int(offset) :][: int(size)].decode() == name


WITH_LAST_DOT = IndexOptions(key_rule=last_dot)
REFUSED: list[tuple[list[str], IndexOptions, type[Exception], str]] = [
    *(
        ([name], IndexOptions(), UnsupportedSidecarError, "x.tar has the member .* the words of a DALI index")
        for name in ("with blank.jpg", "with\ttab.jpg", "a.j\npg", "a.")
    ),
    (["a.b.jpg"], WITH_LAST_DOT, UnsupportedSidecarError, "rule last_dot, but DALI splits names at"),
    (["README"], IndexOptions(), UnsupportedSidecarError, "x.tar has no samples, and DALI"),
    (["a.jpg", "a.jpg"], IndexOptions(), DuplicateKeyError, "of the sample .a. twice"),
]


@pytest.mark.parametrize(("names", "options", "error", "message"), REFUSED)
def test_shards_that_dali_cannot_use(
    names: list[str], options: IndexOptions, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        write_dali_index(write_members(tmp_path / "x.tar", names), options=options)
    assert list(tmp_path.iterdir()) == [tmp_path / "x.tar"]


def test_no_foreign_index_is_written_for_a_compressed_or_truncated_shard(plain: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedSidecarError, match="compressed with gzip"):
        write_dali_index(build_shard(tmp_path / "x.tgz", [{"__key__": "a", "txt": "1"}]))
    Path(plain).write_bytes(Path(plain).read_bytes()[:3000])
    with pytest.raises(TruncatedShardError):
        write_dali_index(plain, tmp_path / "y")
    assert sorted(tmp_path.iterdir()) == [Path(plain), tmp_path / "x.tgz"]


def test_capitals_and_members_outside_samples(tmp_path: Path) -> None:
    url = write_members(tmp_path / "x.tar", ["a.JPG", "README", ".hidden.png", "a.cls", "__meta__/x.json", "é.jpg"])
    assert write_dali_index(url, tmp_path / "x.idx").fields == ["JPG", "cls", "jpg"]
    text = (tmp_path / "x.idx").read_text()
    assert text == "v1.2 2\nJPG 512 5 a.JPG cls 3584 5 a.cls\njpg 5632 6 é.jpg\n"


@pytest.mark.parametrize(
    ("url", "dali"),
    [
        ("v1.2/a.b.tar", "v1.2/a.idx"),
        (".x.tar", ".x.idx"),
        ("d.e/shard", "d.e/shard.idx"),
        ("https://h.org/x.tar?a=1.5", "https://h.org/x.idx?a=1.5"),
    ],
)
def test_names_of_foreign_indexes(url: str, dali: str) -> None:
    assert dali_index_url(url) == dali


# wids


def test_a_wids_index(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    urls = [
        write_members(tmp_path / "parts/b.tar", fields(["a", "b"])),
        write_members(tmp_path / "a.tar", fields(["c"])),
    ]
    place = tmp_path / "index.json"
    manifest = Manifest(build_indexes(urls, num_workers=0))
    write_wids_index(manifest, place, name="letters")
    assert json.loads(place.read_text()) == {
        "__kind__": "wids-shard-index-v1",
        "wids_version": 1,
        "name": "letters",
        "shardlist": [
            {"url": name, "nsamples": count, "filesize": len(Path(url).read_bytes())}
            for url, name, count in zip(urls, ("parts/b.tar", "a.tar"), (2, 1), strict=True)
        ],
    }
    read = read_wids_index(place)
    assert (read.urls, read.samples, read.bytes) == (urls, 3, manifest.bytes)


def test_a_wids_index_that_refers_to_others(tmp_path: Path) -> None:
    (tmp_path / "far/off").mkdir(parents=True)
    urls = [
        write_members(tmp_path / "far/off/a.tar", fields(["a"])),
        write_members(tmp_path / "far/b.tar", fields(["b"])),
        write_members(tmp_path / "c.tar", fields(["c"])),
    ]

    def facts_of(name: str) -> dict[str, Any]:
        return {"url": name, "nsamples": 1}

    (tmp_path / "far/part.json").write_text(json.dumps({"shardlist": [facts_of("b.tar")]}))
    facts = {
        "wids_version": 1,
        "base": "far",
        "shardlist": [facts_of("off/a.tar")],
        "datasets": [{"source_url": "far/part.json"}, {"shardlist": [facts_of("c.tar")], "base": str(tmp_path)}],
    }
    place = tmp_path / "index.json"
    place.write_text(json.dumps(facts))
    assert read_wids_index(place).urls == urls
    (tmp_path / "far/part.json").write_text(json.dumps({"datasets": [{"source_url": "../index.json"}]}))
    with pytest.raises(
        CorruptSidecarError, match=r"part\.json is not an index of wids, .* refers to a file that refers"
    ):
        read_wids_index(place)


def test_a_wrong_count_in_a_wids_index_is_noticed_when_the_shard_is_opened(plain: str) -> None:
    place = Path(plain).with_name("index.json")
    build_indexes([plain], num_workers=0)
    write_wids_index(Manifest([ShardInfo(plain, 4, 0)]), place)
    with pytest.raises(ChangedShardError, match=naming("x.tar.wdsidx", "3 samples", "with 4")):
        list(IndexedSamples(read_wids_index(place)))


@pytest.mark.parametrize(
    "facts",
    [
        [],
        {"wids_version": 2, "shardlist": []},
        {"wids_version": 1},
        {"wids_version": 1, "shardlist": [{"url": "x.tar", "nsamples": "3"}]},
        {"wids_version": 1, "shardlist": [{"url": "x.tar", "nsamples": 3, "filesize": -1}]},
        {"wids_version": 1, "datasets": [{}]},
        {"wids_version": 1, "shardlist": [{"url": "x.tar", "nsamples": 3}, {"url": "x.tar", "nsamples": 4}]},
    ],
)
def test_a_file_that_is_not_a_wids_index_is_refused(plain: str, facts: Any) -> None:
    place = Path(plain).with_name("index.json")
    place.write_text(json.dumps(facts))
    with pytest.raises(CorruptSidecarError, match=naming("index.json", "wids")):
        read_wids_index(place)


def test_a_shard_of_unknown_size_is_cached(plain: str, tmp_path: Path) -> None:
    url = f"pipe:cat {plain}"
    manifest = Manifest([ShardInfo(url, 3, 0)])
    pipe = ShardList([url]).cache_wds_shards(tmp_path / "cache", manifest=manifest)
    assert len(list(pipe.load_wds_shards().group_samples())) == 3
