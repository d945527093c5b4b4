"""The indexes of DALI, Energon and wids: written, read, and refused if they are wrong."""

from __future__ import annotations

import contextlib
import io
import json
import sqlite3
import tarfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from wds_datapipes import IndexedSamples, ShardList, first_dot, last_dot
from wds_datapipes.errors import (
    CorruptSidecarError,
    DuplicateKeyError,
    EmptySourceError,
    MissingSidecarError,
    SidecarError,
    StaleSidecarError,
    TruncatedShardError,
    UnsupportedSidecarError,
)
from wds_datapipes.index import (
    IndexOptions,
    Manifest,
    build_index,
    read_dali_index,
    read_energon_dataset,
    read_energon_index,
    read_wids_index,
    write_dali_index,
    write_energon_dataset,
    write_energon_index,
    write_wids_index,
)
from wds_datapipes.index.interop.dali import dali_index_url, dali_text
from wds_datapipes.index.interop.energon import energon_index_url, energon_rule
from wds_datapipes.index.manifest import ManifestEntry
from wds_datapipes.testing import build_shard

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
#: Keys for which GNU tar and PAX archives have extra headers.
LONG = [f"{'d' * 60}/{'k' * 70}{number}" for number in range(3)]


def shard(path: Path, names: list[str], tar_format: str = "ustar", *, mtime: float = 1) -> str:
    """A shard of members whose data are their names; in PAX a fractional time takes an extra header."""
    with tarfile.open(path, "w", format=FORMATS[tar_format]) as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(name.encode()), mtime
            tar.addfile(member, io.BytesIO(name.encode()))
    return str(path)


def fields(keys: list[str]) -> list[str]:
    return [f"{key}.{field}" for key in keys for field in ("jpg", "cls")]


@pytest.fixture(params=["ustar", "gnu", "pax", "pax time"])
def any_shard(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A shard of each kind; in the last, each member has a PAX header."""
    tar_format, _, time = request.param.partition(" ")
    return shard(tmp_path / "x.tar", fields(LONG), tar_format, mtime=1.5 if time else 1)


@pytest.fixture
def plain(tmp_path: Path) -> str:
    return shard(tmp_path / "x.tar", fields(["a", "b", "c"]))


# DALI


@pytest.mark.parametrize("version", ["v1.1", "v1.2"])
def test_an_index_of_dali_has_the_offsets_of_the_data(any_shard: str, version: Any) -> None:
    place = write_dali_index(any_shard, version=version)
    assert place == any_shard.replace(".tar", ".idx")
    first, *lines = Path(place).read_text().splitlines()
    assert first == f"{version} 3"
    step = 4 if version == "v1.2" else 3
    content = Path(any_shard).read_bytes()
    for key, line in zip(LONG, lines, strict=True):
        words = line.split(" ")
        for at, field in ((0, "jpg"), (step, "cls")):
            extension, offset, size, *name = words[at : at + step]
            assert extension == field
            assert content[int(offset) :][: int(size)].decode() == f"{key}.{field}"
            assert name == ([f"{key}.{field}"] if step == 4 else [])
    assert read_dali_index(place, any_shard) == build_index(any_shard)


WRONG_DALI = [
    ("v1.2 2", "", 1, "the number of samples"),
    ("jpg 512", "jpg 1024", 2, "an offset"),
    ("5 a.jpg", "6 a.jpg", 2, "a size"),
    ("jpg 512", "png 512", 2, "an extension"),
    ("a.jpg", "b.jpg", 2, "a name"),
    (" cls 1536 5 a.cls", "", 2, "a missing member"),
    ("5632 5 c.cls\n", "563", 4, "a truncated line"),
]


@pytest.mark.parametrize(("old", "new", "line"), [row[:3] for row in WRONG_DALI], ids=[row[3] for row in WRONG_DALI])
def test_a_wrong_index_of_dali_is_refused(plain: str, old: str, new: str, line: int) -> None:
    place = Path(write_dali_index(plain))
    right = place.read_text()
    place.write_text(f"v1.2 2\n{right[7:]}" if line == 1 else right.replace(old, new, 1))
    with pytest.raises(StaleSidecarError, match=rf"Line {line} of \S*x\.idx is '.*', and that of \S*x\.tar"):
        read_dali_index(place, plain)
    place.write_text(f"{right}more lines are ignored")
    assert read_dali_index(place, plain) == build_index(plain)


@pytest.mark.parametrize("text", ["", "v1.3 1\n", "v1.2\n", "v1.2 x\n", "v1.2 ²\n", f"v1.2 {'9' * 99}\n"])
def test_a_file_that_is_not_an_index_of_dali_is_refused(plain: str, text: str) -> None:
    place = Path(plain).with_name("y.idx")
    place.write_text(text)
    with pytest.raises(CorruptSidecarError, match=r"y\.idx is not an index of DALI: its first line is .*, not 'v1"):
        read_dali_index(place, plain)


def test_shards_that_an_index_of_dali_cannot_describe(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    for name in ("with blank.jpg", "with\ttab.jpg", "a.j\npg", "a."):
        with pytest.raises(SidecarError, match=r"x\.tar holds the member .* an index of DALI cannot"):
            write_dali_index(shard(path, [name]))
    with pytest.raises(SidecarError, match=r"x\.tar has no samples"):
        write_dali_index(shard(path, ["README"]))
    with pytest.raises(SidecarError, match=r"compressed with gzip"):
        write_dali_index(build_shard(tmp_path / "x.tgz", [{"__key__": "a", "txt": "1"}]))
    with pytest.raises(SidecarError, match=r"with the rule last_dot, but DALI splits names at the first dot"):
        dali_text(build_index(shard(path, ["a.b.jpg"]), options=IndexOptions(key_rule=last_dot)))
    with pytest.raises(ValueError, match=r'version must be "v1\.1" or "v1\.2", not \'v2\''):
        write_dali_index(path, version="v2")  # type: ignore[arg-type]  # that is what is tested
    with pytest.raises(DuplicateKeyError):
        write_dali_index(shard(path, ["a.jpg", "a.jpg"]))
    assert sorted(tmp_path.iterdir()) == [tmp_path / "x.tar", tmp_path / "x.tgz"]


def test_capitals_and_members_outside_samples(tmp_path: Path) -> None:
    url = shard(tmp_path / "x.tar", ["a.JPG", "README", ".hidden.png", "a.cls", "__meta__/x.json", "é.jpg"])
    place = write_dali_index(url)
    assert Path(place).read_text() == "v1.2 2\nJPG 512 5 a.JPG cls 3584 5 a.cls\njpg 5632 6 é.jpg\n"
    assert read_dali_index(place, url) == build_index(url)
    assert read_dali_index(place, url, IndexOptions(lowercase=False)).fields == ["JPG", "cls", "jpg"]


@pytest.mark.parametrize(
    ("url", "dali", "energon"),
    [
        ("a.tar", "a.idx", "a.tar.idx"),
        ("v1.2/a.b.tar", "v1.2/a.idx", "v1.2/a.b.tar.idx"),
        (".x.tar", ".x.idx", ".x.tar.idx"),
        ("shard", "shard.idx", "shard.tar.idx"),
        ("d.e/shard", "d.e/shard.idx", "d.e/shard.tar.idx"),
        ("s3://bucket/x.tgz", "s3://bucket/x.idx", "s3://bucket/x.tar.idx"),
        ("https://h.org/x.tar?a=1.5", "https://h.org/x.idx?a=1.5", "https://h.org/x.tar.idx?a=1.5"),
    ],
)
def test_names_of_foreign_indexes(url: str, dali: str, energon: str) -> None:
    assert (dali_index_url(url), energon_index_url(url)) == (dali, energon)


# Energon


def test_an_index_of_energon_has_the_offsets_of_first_headers(any_shard: str) -> None:
    assert write_energon_index(any_shard) == f"{any_shard}.idx"
    offsets = np.fromfile(f"{any_shard}.idx", "<u8").tolist()
    with tarfile.open(any_shard) as tar:
        assert offsets[:-1] == [member.offset for member in tar if member.name.endswith("jpg")]
    content = Path(any_shard).read_bytes()
    assert content[offsets[-1] :].strip(b"\0") == b""
    for key, (begin, end) in zip(LONG, pairwise(offsets), strict=True):
        with tarfile.open(fileobj=io.BytesIO(content[begin:end])) as tar:
            assert tar.getnames() == fields([key])
    index = read_energon_index(f"{any_shard}.idx", any_shard)
    assert index.has_same_layout(build_index(any_shard))


@pytest.mark.parametrize(
    ("offsets", "text"),
    [
        ([0, 2048, 4096], r"x\.tar\.idx has 2 samples, but \S*x\.tar has 3"),
        ([0, 2049], r"says that the end is at byte 2049 of \S*x\.tar, but sample 1 \('b'\) begins at byte 2048"),
        (
            [0, 1024, 4096, 6144],
            r"says that sample 1 is at byte 1024 of \S*x\.tar, but sample 1 \('b'\) begins at byte 2048",
        ),
        ([512, 2048, 4096, 6144], r"says that sample 0 is at byte 512 .* sample 0 \('a'\) begins at byte 0"),
        ([0, 2048, 4096, 10240], r"says that the end is at byte 10240 .*, but the samples end at byte 6144"),
        ([0, 2048, 4096, 6144, 8192], r"has 4 samples, but \S*x\.tar has 3"),
        ([0, 2048, 4096, 2**64 - 1], r"says that the end is at byte 18446744073709551615"),
    ],
)
def test_a_wrong_index_of_energon_is_refused(plain: str, offsets: list[int], text: str) -> None:
    np.array(offsets, "<u8").tofile(f"{plain}.idx")
    with pytest.raises(StaleSidecarError, match=text):
        read_energon_index(f"{plain}.idx", plain)


def test_a_file_that_is_not_an_index_of_energon_is_refused(plain: str) -> None:
    for content in (b"", bytes(15)):
        Path(f"{plain}.idx").write_bytes(content)
        with pytest.raises(CorruptSidecarError, match=rf"its size of {len(content)} bytes is not a multiple of 8"):
            read_energon_index(f"{plain}.idx", plain)
    with pytest.raises(MissingSidecarError):
        read_energon_index(f"{plain}.none", plain)


def test_shards_that_energon_cannot_use(tmp_path: Path) -> None:
    with pytest.raises(SidecarError, match=r"x\.tar has no samples"):
        write_energon_index(shard(tmp_path / "x.tar", ["README"]))
    with pytest.raises(SidecarError, match="compressed with gzip"):
        write_energon_index(build_shard(tmp_path / "x.tgz", [{"__key__": "a", "txt": "1"}]))


def test_a_dataset_of_energon(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for name in ("parts/a", "parts/b", "c"):
        shard(tmp_path / f"{name}.tar", fields([f"{name}-{key}" for key in "xyz"][: len(name)]))
    splits = {"train": f"{tmp_path}/parts/{{a,b}}.tar", "val": [str(tmp_path / "c.tar")]}
    written = write_energon_dataset(tmp_path, splits, num_workers=2)
    assert written.counts == {"parts/a.tar": 3, "parts/b.tar": 3, "c.tar": 1}
    meta = tmp_path / ".nv-meta"
    info = json.loads((meta / ".info.json").read_text())
    assert list(info) == ["energon_version", "shard_counts"]
    assert list(info["shard_counts"].items()) == list(written.counts.items())
    assert yaml.safe_load((meta / "split.yaml").read_text()) == {
        "split_parts": {"train": ["parts/a.tar", "parts/b.tar"], "val": ["c.tar"], "test": []},
        "exclude": [],
    }
    assert yaml.safe_load((meta / "dataset.yaml").read_text()) == {
        "__module__": "megatron.energon",
        "__class__": "CrudeWebdataset",
    }
    for name, count in written.counts.items():
        assert len(read_energon_index(f"{tmp_path}/{name}.idx", f"{tmp_path}/{name}")) == count
    read = read_energon_dataset(tmp_path)
    assert read.counts == {f"{tmp_path}/{name}": count for name, count in written.counts.items()}
    assert read.splits == {
        "train": [f"{tmp_path}/parts/a.tar", f"{tmp_path}/parts/b.tar"],
        "val": [f"{tmp_path}/c.tar"],
        "test": [],
    }
    assert read.definition["__class__"] == "CrudeWebdataset"
    (meta / "dataset.yaml").write_text("__class__: Mine")
    (meta / "split.yaml").write_text("split_parts: {train: ['parts/{a,b}.tar']}")
    assert read_energon_dataset(tmp_path).splits == {"train": read.splits["train"]}
    write_energon_dataset(tmp_path, splits, num_workers=1)
    assert (meta / "dataset.yaml").read_text() == "__class__: Mine"
    for text in ("[", "split_parts: 7", "{}"):
        (meta / "split.yaml").write_text(text)
        with pytest.raises(CorruptSidecarError, match=r"split\.yaml is not a file of Energon, or is damaged"):
            read_energon_dataset(tmp_path)
    (meta / ".info.json").write_text('{"shard_counts": {"a.tar": "3"}}')
    with pytest.raises(
        CorruptSidecarError, match=r"\.info\.json is not a file of Energon, or is damaged: its counts are no"
    ):
        read_energon_dataset(tmp_path)


def test_the_field_map_of_energon_renames_fields(tmp_path: Path) -> None:
    url = shard(tmp_path / "a.tar", fields(["x", "y"]))
    write_energon_dataset(tmp_path, {"train": [url]}, num_workers=1)
    definition = tmp_path / ".nv-meta/dataset.yaml"
    definition.write_text("__class__: CaptioningWebdataset\nfield_map: {image: 'absent,cls'}\nsubflavors: {a: 1}")
    dataset = read_energon_dataset(tmp_path)
    assert dataset.definition["subflavors"] == {"a": 1}
    samples = IndexedSamples(dataset.manifest("train"), order="sequential")
    expected = [sample["cls"] for sample in samples]
    renamed = list(samples.rename(**dataset.fields(), keep=False))
    assert [sample["image"] for sample in renamed] == expected
    assert [name for name in renamed[0] if not name.startswith("__")] == ["image"]
    for text, message in (
        ("__class__: CrudeWebdataset", "no field_map; its class is 'CrudeWebdataset'"),
        ("field_map: {image: 'json[picture]'}", r"builds 'image' from 'json\[picture\]'"),
        ("field_map: {image: 7}", "builds 'image' from 7"),
        ("field_map: {image: 'jpg,'}", "builds 'image' from 'jpg,'"),
        ("sample_loader: loader.py:load", "names Python code for sample_loader"),
    ):
        definition.write_text(text)
        with pytest.raises(UnsupportedSidecarError, match=message):
            read_energon_dataset(tmp_path).fields()
    definition.write_text("- a list")
    with pytest.raises(CorruptSidecarError, match=r"dataset\.yaml is not a file of Energon, .* it is not a mapping"):
        read_energon_dataset(tmp_path)
    definition.unlink()
    assert read_energon_dataset(tmp_path).definition == {}


def test_energon_finds_samples_by_key(tmp_path: Path) -> None:
    for name in "ab":
        shard(tmp_path / f"{name}.tar", fields([f"{name}{number}" for number in range(3)]))
    splits = {"train": f"{tmp_path}/{{a,b}}.tar"}
    table = tmp_path / ".nv-meta/index.sqlite"

    def rows() -> list[tuple[str, bytes]]:
        with contextlib.closing(sqlite3.connect(table)) as database:
            found = database.execute(
                "SELECT sample_key, part_name, tar_file_id, content_byte_offset, content_byte_size FROM samples "
                "JOIN sample_parts USING (tar_file_id, sample_index) ORDER BY tar_file_id, content_byte_offset"
            ).fetchall()
        data = [(tmp_path / f"{name}.tar").read_bytes() for name in "ab"]
        return [(f"{key}.{part}", data[number][at : at + size]) for key, part, number, at, size in found]

    write_energon_dataset(tmp_path, splits, num_workers=1)
    members = ShardList(f"{tmp_path}/*.tar").load_wds_shards()
    assert rows() == [(member.name, member.data) for member in members]
    before, uuid = table.read_bytes(), (tmp_path / ".nv-meta/index.uuid").read_text()
    assert len(uuid) == 36
    shard(tmp_path / "b.tar", fields(["b0", "a1"]))
    with pytest.raises(SidecarError, match=r"The key 'a1' of \S+/b\.tar occurs twice.* pass keys=False"):
        write_energon_dataset(tmp_path, splits, num_workers=1)
    assert table.read_bytes() == before
    write_energon_dataset(tmp_path, splits, keys=False, num_workers=1)
    # Nothing remains of the old shards, or of the interrupted run.
    assert sorted(path.name for path in (tmp_path / ".nv-meta").iterdir()) == [
        ".info.json",
        "dataset.yaml",
        "split.yaml",
    ]


def test_a_dataset_that_energon_could_not_find(plain: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(ValueError, match=r"x\.tar is not in the folder \S*/data/"):
        write_energon_dataset(tmp_path / "data", {"train": [plain]})
    with pytest.raises(ValueError, match=r"Energon supports the splits train, val, test, not 'eval'"):
        write_energon_dataset(tmp_path, {"eval": [plain]})
    (tmp_path / ".nv-meta").touch()
    with pytest.raises(MissingSidecarError, match=r"The folder \S+/\.nv-meta/ cannot be created: File exists"):
        write_energon_dataset(tmp_path, {"train": [plain]})


@given(name=st.text(".a_/é \n", max_size=12))
def test_names_are_split_as_energon_and_as_we_do(name: str) -> None:
    ours, theirs = first_dot(name), energon_rule(name)
    if ours is not None:
        assert theirs == ours or "\n" in name
    elif theirs is not None:
        assert theirs[0].endswith("/"), "a hidden file in a folder"


# wids


def test_an_index_of_wids(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    urls = [shard(tmp_path / "parts/b.tar", fields(["a", "b"])), shard(tmp_path / "a.tar", fields(["c"]))]
    place = tmp_path / "index.json"
    manifest = write_wids_index(urls, place, name="letters", num_workers=2)
    assert json.loads(place.read_text()) == {
        "__kind__": "wids-shard-index-v1",
        "wids_version": 1,
        "name": "letters",
        "shardlist": [
            {
                "url": name,
                "nsamples": count,
                "filesize": len(Path(url).read_bytes()),
            }
            for url, name, count in zip(urls, ("parts/b.tar", "a.tar"), (2, 1), strict=True)
        ],
    }
    for depth in ("size", "headers", "bytes"):
        assert read_wids_index(place, depth=depth) == manifest
    assert manifest.urls == urls
    assert read_wids_index(place, num_workers=0) == manifest
    with pytest.raises(ValueError, match='depth must be "size", "headers" or "bytes"'):
        read_wids_index(place, depth="all")  # type: ignore[arg-type]  # that is what is tested


def test_an_index_of_wids_that_refers_to_others(tmp_path: Path) -> None:
    (tmp_path / "far/off").mkdir(parents=True)
    urls = [
        shard(tmp_path / "far/off/a.tar", fields(["a"])),
        shard(tmp_path / "far/b.tar", fields(["b"])),
        shard(tmp_path / "c.tar", fields(["c"])),
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


@pytest.mark.parametrize(
    ("change", "depth", "text"),
    [
        ({"nsamples": 4}, "headers", r"\S*x\.tar has 3 samples, not 4"),
        ({"filesize": 5}, "size", r"\S*x\.tar has 10240 bytes, not 5"),
    ],
)
def test_a_wrong_index_of_wids_is_refused(plain: str, change: dict[str, Any], depth: Any, text: str) -> None:
    place = Path(plain).with_name("index.json")
    write_wids_index([plain], place)
    facts = json.loads(place.read_text())
    facts["shardlist"][0] |= change
    place.write_text(json.dumps(facts))
    with pytest.raises(StaleSidecarError, match=text):
        read_wids_index(place, depth=depth)


@pytest.mark.parametrize(
    "facts",
    [
        [],
        {"shardlist": []},
        {"wids_version": 2, "shardlist": []},
        {"wids_version": 1},
        {"wids_version": 1, "shardlist": [{"url": "x.tar"}]},
        {"wids_version": 1, "shardlist": [{"url": "x.tar", "nsamples": "3"}]},
        {"wids_version": 1, "shardlist": [{"url": "x.tar", "nsamples": 3, "filesize": -1}]},
        {"wids_version": 1, "shardlist": [{"url": 7, "nsamples": 3}]},
        {"wids_version": 1, "shardlist": 7},
        {"wids_version": 1, "datasets": [{}]},
        {"wids_version": 1, "shardlist": [{"url": "x.tar", "nsamples": 3}, {"url": "x.tar", "nsamples": 4}]},
    ],
)
def test_a_file_that_is_not_an_index_of_wids_is_refused(plain: str, facts: Any) -> None:
    place = Path(plain).with_name("index.json")
    place.write_text(json.dumps(facts))
    with pytest.raises(CorruptSidecarError, match=r"index\.json is not an index of wids, or is damaged"):
        read_wids_index(place)


# All formats

WRITERS: dict[str, Callable[[str, Path], object]] = {
    "dali": write_dali_index,
    "energon": write_energon_index,
    "wids": lambda url, place: write_wids_index([url], place, num_workers=0),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_no_foreign_index_is_written_of_a_truncated_shard(plain: str, kind: str, tmp_path: Path) -> None:
    Path(plain).write_bytes(Path(plain).read_bytes()[:3000])
    with pytest.raises(TruncatedShardError):
        WRITERS[kind](plain, tmp_path / "y")
    assert list(tmp_path.iterdir()) == [Path(plain)]


def test_the_splits_of_a_dataset_of_energon(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 2), ("c", 1)):
        shard(tmp_path / f"{name}.tar", fields([f"{name}-{number}" for number in range(count)]))
    splits = {"train": f"{tmp_path}/{{a,b}}.tar", "val": [str(tmp_path / "c.tar")]}
    write_energon_dataset(tmp_path, splits, num_workers=1)

    def keys(split: str) -> list[str]:
        manifest = read_energon_dataset(tmp_path).manifest(split)
        return [sample["__key__"] for sample in IndexedSamples(manifest, order="sequential")]

    assert keys("train") == ["a-0", "a-1", "a-2", "b-0", "b-1"]
    assert keys("val") == ["c-0"]
    with pytest.raises(EmptySourceError, match="There are no samples in 0 shards"):
        keys("test")
    with pytest.raises(ValueError, match="has the splits 'train', 'val', 'test', not 'dev'"):
        keys("dev")
    file = tmp_path / ".nv-meta/split.yaml"
    file.write_text("split_parts: {train: ['{a,b}.tar'], val: [c.tar]}\nexclude: ['{a,x}.tar', c.tar/c-0]")
    assert keys("train") == ["b-0", "b-1"]
    with pytest.raises(UnsupportedSidecarError, match=r"excludes the sample \S+/c\.tar/c-0, but a manifest .*select="):
        keys("val")
    file.write_text("split_parts: {train: [a.tar, d.tar]}")
    with pytest.raises(CorruptSidecarError, match=r"d\.tar, whose number of samples is not in \.info\.json"):
        keys("train")
    file.write_text("split_parts: {train: [a.tar]}\nexclude: 7")
    with pytest.raises(CorruptSidecarError, match=r"split\.yaml is not a file of Energon, or is damaged"):
        keys("train")


def test_a_shard_of_unknown_size_is_cached(plain: str, tmp_path: Path) -> None:
    url = f"pipe:cat {plain}"
    manifest = Manifest([ManifestEntry(url, 3, 0)])
    pipe = ShardList([url]).cache_wds_shards(tmp_path / "cache", manifest=manifest)
    assert len(list(pipe.load_wds_shards().group_samples())) == 3
