"""The manifest of a dataset: written, read, moved and damaged."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # it carries no types
import pytest
from error_facts import naming
from hypothesis import given
from hypothesis import strategies as st

from wds_datapipes import IndexedSamples, ShardList, TarWriter, WriteOptions
from wds_datapipes.errors import CorruptSidecarError, MissingSidecarError, ShardOpenError
from wds_datapipes.index import IndexOptions, Manifest, build_indexes, read_manifest, write_manifest
from wds_datapipes.testing import build_shard
from wds_datapipes.types import ShardInfo


def shard(path: Path, count: int, value: str = "1") -> str:
    return build_shard(path, [{"__key__": f"{number}", "cls": value} for number in range(count)])


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    (tmp_path / "data").mkdir()
    for name, count in (("a", 3), ("b", 30), ("c", 7)):
        shard(tmp_path / f"data/{name}.tar", count)
    return Manifest(build_indexes(f"{tmp_path}/data/{{a..c}}.tar", options=IndexOptions(digest=True)))


def test_a_manifest_has_counts_sizes_and_digests(manifest: Manifest, tmp_path: Path) -> None:
    assert (len(manifest), manifest.samples) == (3, 40)
    assert manifest.urls == [f"{tmp_path}/data/{name}.tar" for name in "abc"]
    assert manifest.bytes == sum(os.path.getsize(url) for url in manifest.urls)
    assert repr(manifest) == f"<Manifest of 3 shards, 40 samples, {manifest.bytes} bytes>"
    assert all(len(entry.sha256) == 64 for entry in manifest.entries)
    assert manifest != Manifest(manifest.entries[:2])
    assert manifest != "manifest"
    assert {manifest, Manifest(manifest.entries)} == {manifest}
    with pytest.raises(TypeError, match=naming("'a.tar'", "build_indexes")):
        Manifest(["a.tar"])


def test_a_manifest_of_written_shards(tmp_path: Path) -> None:
    written = []
    for name in "ab":
        with TarWriter(tmp_path / f"{name}.tar", options=WriteOptions(digest=name == "b")) as writer:
            writer.write({"__key__": name, "cls": 1})
        assert writer.info is not None
        written.append(writer.info)
    manifest = Manifest(written)
    assert [(entry.samples, len(entry.sha256)) for entry in manifest.entries] == [(1, 0), (1, 64)]


@pytest.mark.parametrize("place", ["data/manifest.json", "manifest.json", "elsewhere/manifest.json"])
def test_a_written_manifest_is_read_back(manifest: Manifest, tmp_path: Path, place: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    write_manifest(manifest, tmp_path / place)
    assert read_manifest(tmp_path / place) == manifest
    names = [shard for shard, *_ in json.loads((tmp_path / place).read_text())["shards"]]
    expected = {"data/manifest.json": "", "manifest.json": "data/", "elsewhere/manifest.json": f"{tmp_path}/data/"}
    assert names == [f"{expected[place]}{name}.tar" for name in "abc"]


def test_a_dataset_moves_with_its_manifest(manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(manifest, tmp_path / "data/manifest.json")
    shutil.move(tmp_path / "data", tmp_path / "moved")
    moved = read_manifest(tmp_path / "moved/manifest.json")
    assert moved.urls == [f"{tmp_path}/moved/{name}.tar" for name in "abc"]
    assert moved.fingerprint == manifest.fingerprint
    monkeypatch.chdir(tmp_path / "moved")
    here = read_manifest("manifest.json")
    assert here.urls == ["a.tar", "b.tar", "c.tar"]
    write_manifest(here, tmp_path / "manifest.json")
    write_manifest(moved, "again.json")
    assert read_manifest(tmp_path / "manifest.json") == moved
    assert read_manifest("again.json") == here


def test_the_fingerprint_changes_with_any_shard(manifest: Manifest) -> None:
    first, *rest = manifest.entries
    others = [
        [*rest, first],
        rest,
        [ShardInfo(first.url, first.samples + 1, first.bytes, first.sha256), *rest],
        [ShardInfo(first.url, first.samples, first.bytes + 1, first.sha256), *rest],
        [ShardInfo(first.url, first.samples, first.bytes), *rest],
        [ShardInfo(f"{first.url}x", first.samples, first.bytes, first.sha256), *rest],
    ]
    prints = {Manifest(entries).fingerprint for entries in [[first, *rest], *others]}
    assert len(prints) == 7


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda facts: facts.update(format="wids"), "it is JSON of another kind"),
        (lambda facts: facts.update(version=1), "it has version 1, but this version of wds-datapipes reads 2"),
        (lambda facts: facts.update(samples=41), "its totals or its fingerprint"),
        (lambda facts: facts.update(fingerprint="0" * 64), "its totals or its fingerprint"),
        (lambda facts: facts["shards"][0].__setitem__(1, "3"), r"its entry \{.*'samples': '3'.*\} is not valid"),
        (lambda facts: facts["shards"][0].__setitem__(1, 1 << 63), "is not valid"),
        (lambda facts: facts["shards"][0].__setitem__(1, -1), "its entry .*'samples': -1.* is not valid"),
        (lambda facts: facts["shards"][0].__setitem__(1, True), "its entry .*'samples': True.* is not valid"),
        (lambda facts: facts["shards"][0].__setitem__(2, 3.0), "its entry .*'bytes': 3.0.* is not valid"),
        (lambda facts: facts["shards"][0].__setitem__(0, "a\0b"), "is not valid"),
        (lambda facts: facts["shards"][0].__setitem__(0, 3), ""),
        (lambda facts: facts["shards"][0].__setitem__(3, "ABC"), "is not valid"),
        (lambda facts: facts["shards"][0].append(1), "argument 2"),
        (lambda facts: facts["shards"][0].pop(), "argument 2"),
        (lambda facts: facts["shards"].pop(), "its totals or its fingerprint"),
        (lambda facts: facts["shards"].reverse(), "its totals or its fingerprint"),
        (lambda facts: facts.pop("shards"), "shards"),
    ],
)
def test_an_inconsistent_manifest(manifest: Manifest, tmp_path: Path, change: Any, found: str) -> None:
    place = tmp_path / "manifest.json"
    write_manifest(manifest, place)
    facts = json.loads(place.read_text())
    change(facts)
    place.write_text(json.dumps(facts))
    with pytest.raises(CorruptSidecarError, match=rf"manifest\.json is not a manifest, or is damaged: .*{found}"):
        read_manifest(place)


def test_a_file_that_is_not_a_manifest(tmp_path: Path) -> None:
    place = tmp_path / "manifest.json"
    with pytest.raises(MissingSidecarError, match=r"manifest\.json cannot be read: there is no such file"):
        read_manifest(place)
    for content in (b"", b"[]", b"{", b"\xff", b"[" * 100_000):
        place.write_bytes(content)
        with pytest.raises(CorruptSidecarError, match=r"manifest\.json is not a manifest, or is damaged"):
            read_manifest(place)
    with pytest.raises(MissingSidecarError, match=r"manifest\.json cannot be written: there is no such folder"):
        write_manifest(Manifest([]), tmp_path / "none/manifest.json")


def test_a_manifest_of_many_shards_is_read_in_parts(tmp_path: Path, tracing: Any) -> None:
    """A million shards take 150 MiB; as objects, their entries would take 500 MiB."""
    count, place = 20_000, tmp_path / "manifest.json"
    write_manifest(Manifest(ShardInfo(f"s3://a/b/train-{n:07d}.tar", n, 10**9) for n in range(count)), place)
    tracing.start()
    manifest = read_manifest(place)
    kept, peak = tracing.get_traced_memory()
    assert peak < 130 * count
    assert kept < 60 * count
    assert (manifest.samples, manifest.urls[-1]) == (count * (count - 1) // 2, f"s3://a/b/train-{count - 1:07d}.tar")


@pytest.mark.parametrize("layout", [{}, {"indent": 4}, {"sort_keys": True}, {"separators": (",", ":")}])
@pytest.mark.parametrize(
    "names", ["{}.tar", "{}/a.tar", "s3://b/{}.tar", "s3://{}/a.tar", "/data/{}.tar", "mixed", "bare"]
)
def test_a_manifest_is_read_in_any_layout(layout: dict[str, Any], names: str, tmp_path: Path) -> None:
    mixed = ["{}.tar", "a/{}.tar", "s3://b/{}.tar", "/c/{}.tar", "x:{}.tar", "file:/{}"]
    kinds = {"mixed": mixed, "bare": ["{}.tar", "-"]}.get(names, [names])
    urls = [kinds[number % len(kinds)].format(number) for number in range(2000)]
    place, absolute = tmp_path / "manifest.json", ("s3:", "/", "file:", "-")
    write_manifest(
        Manifest(ShardInfo(url if url.startswith(absolute) else f"{tmp_path}/{url}", 1, 2) for url in urls), place
    )
    manifest = read_manifest(place)
    place.write_text(json.dumps(json.loads(place.read_text()), **layout))
    assert read_manifest(place) == manifest
    assert manifest.urls == [url if url.startswith(absolute) else f"{tmp_path}/{url}" for url in urls]
    assert manifest.fingerprint == Manifest(ShardInfo(url, 1, 2) for url in urls).fingerprint


@given(
    entries=st.lists(
        st.builds(
            ShardInfo,
            st.one_of(
                st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1).map(
                    "/data/{}.tar".format
                ),
                st.sampled_from(["s3://b/x.tar", "x.tar", "memory://any/a.tar"]),
            ),
            st.integers(0, 2**40),
            st.integers(0, 2**60),
            st.one_of(st.just(""), st.text("0123456789abcdef", min_size=64, max_size=64)),
        )
    )
)
def test_any_manifest_round_trips(entries: list[ShardInfo]) -> None:
    store = fsspec.filesystem("memory")
    try:
        write_manifest(Manifest(entries), "memory://any/manifest.json")
        found = read_manifest("memory://any/manifest.json")
    finally:
        store.rm("/any", recursive=True)
    names = [entry.url if entry.url != "x.tar" else os.path.abspath("x.tar") for entry in entries]
    assert found.urls == names
    assert found.fingerprint == Manifest(entries).fingerprint


def test_a_name_with_a_zero_byte_is_an_error_of_the_call(tmp_path: Path) -> None:
    for read in (build_indexes, IndexedSamples):
        with pytest.raises(ValueError, match=r"no file can have the name 'a\\x00\.tar'"):
            read(["a\0.tar"])
    with pytest.raises(ShardOpenError, match="cannot be opened: "):
        list(ShardList(["a\0.tar"]).cache_wds_shards(tmp_path / "copies").load_wds_shards())


@pytest.mark.parametrize("name", ["http://localhost:1/a\ud800.tar", "memory://b/a\ud800.tar"])
def test_a_name_that_no_file_can_have_is_an_error_of_its_shard(name: str, tmp_path: Path) -> None:
    with pytest.raises(ShardOpenError, match="cannot be opened: "):
        build_indexes([name], num_workers=1)
    with pytest.raises(ShardOpenError, match="cannot be opened: "):
        IndexedSamples([name])
    with pytest.raises(ShardOpenError, match="cannot be opened: "):
        list(ShardList([name]).cache_wds_shards(tmp_path / "copies").load_wds_shards())
