"""Indexes that were built in one place and copied to another with their shards: they are read as they are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fsspec  # type: ignore[import-untyped]  # it carries no types
import pytest
from error_facts import naming
from nginx_server import Nginx
from readers import keys_of
from web_server import QuietHandler, web_server

from wds_datapipes import IndexedSamples, last_dot
from wds_datapipes.errors import MissingSidecarError, ShardOpenError, StaleSidecarError
from wds_datapipes.index import (
    AccessOptions,
    IndexOptions,
    Manifest,
    build_indexes,
    check_index,
    index_url,
    read_index,
    read_table,
)
from wds_datapipes.testing import build_shard
from wds_datapipes.types import Sample

KEYS = [f"{shard}/scan-{number}.5mm" for shard in range(2) for number in range(3)]
LATER = (2 * 10**9, 2 * 10**9)


def split_by_folder(name: str) -> tuple[str, str]:
    key, _, extension = name.partition(".cls")
    return key, f"cls{extension}"


def label_of(sample: Sample) -> dict[str, int]:
    return {"label": int(sample["cls"])}


def write(folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    samples = [[{"__key__": key, "cls": f"{n}"} for n, key in enumerate(KEYS) if int(key[0]) == s] for s in range(2)]
    return [build_shard(folder / f"{number}.tar", own) for number, own in enumerate(samples)]


class Place(NamedTuple):
    """Where copies are.

    Attributes:
        folder: their folder on this disk.
        url: their pattern.
        access: how they are read.
    """

    folder: Path
    url: str
    access: AccessOptions


@pytest.fixture(params=["local", "http", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    pattern, access = "{0..1}.tar", AccessOptions()
    if request.param == "local":
        folder = tmp_path / "copy"
        url = str(folder)
    elif request.param == "http":
        nginx: Nginx = request.getfixturevalue("nginx")
        folder, url = nginx.files / tmp_path.name, f"http://127.0.0.1:{nginx.http}/{tmp_path.name}"
    else:
        store = request.getfixturevalue("s3_store")
        folder, url = tmp_path / "uploaded", f"s3://bucket/{tmp_path.name}"
        access = AccessOptions(storage_options=store.options())
    return Place(folder, f"{url}/{pattern}", access)


def copy_to(place: Place, source: Path) -> None:
    """Copy a folder without the times of its files."""
    place.folder.mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, place.folder / file.name)
        os.utime(place.folder / file.name, LATER)
    if place.url.startswith("s3:"):
        system = fsspec.filesystem("s3", **(place.access.storage_options or {}))
        for file in place.folder.iterdir():
            system.pipe_file(f"{os.path.dirname(place.url)}/{file.name}", file.read_bytes())


@pytest.mark.parametrize(
    "build",
    [
        lambda urls: build_indexes(urls, options=IndexOptions(key_rule=last_dot)),
        lambda urls: build_indexes(urls, options=IndexOptions(key_rule=split_by_folder), columns=label_of),
    ],
    ids=["rules", "columns and a rule of one's own"],
)
def test_a_copy_of_shards_and_indexes_is_read_as_it_is(
    place: Place, tmp_path: Path, build: Callable[[list[str]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    build(write(tmp_path / "here"))
    copy_to(place, tmp_path / "here")
    before = {file.name: file.read_bytes() for file in place.folder.iterdir()}

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an index was built or written")

    for name in ("build_index", "write_index"):
        monkeypatch.setattr(f"wds_datapipes.index.format.dataset_builder.{name}", refuse)
    for indexes in ("local", "require", "build"):
        access = AccessOptions(indexes=indexes, storage_options=place.access.storage_options)
        assert keys_of(IndexedSamples(place.url, order="sequential", access=access)) == KEYS
    assert read_table(place.url, access=place.access).keys == KEYS
    joined = IndexedSamples(f"{tmp_path}/here/{{0..1}}.tar", fields=[], join=place.url, access=place.access)
    assert sorted(keys_of(joined)) == KEYS
    copied = AccessOptions(cache_dir=tmp_path / "cache", storage_options=place.access.storage_options)
    assert keys_of(IndexedSamples(place.url, order="sequential", access=copied)) == KEYS
    assert {file.name: file.read_bytes() for file in place.folder.iterdir()} == before


def test_the_etag_of_another_place_is_not_compared(nginx: Nginx, tmp_path: Path) -> None:
    first, second = (nginx.files / f"{tmp_path.name}{name}" for name in "ab")
    write(first)
    urls = [f"http://127.0.0.1:{nginx.http}/{first.name}/{shard}.tar" for shard in range(2)]
    rules = IndexOptions(key_rule=last_dot)
    results = build_indexes(urls, index_dir=tmp_path / "indexes", options=rules)
    shutil.copytree(first, second)
    for file in second.iterdir():
        os.utime(file, LATER)  # from which nginx makes the ETag
    moved = [url.replace(first.name, second.name) for url in urls]
    for cache_dir in (None, tmp_path / "copies"):
        access = AccessOptions(index_dir=tmp_path / "indexes", indexes="require", cache_dir=cache_dir)
        assert keys_of(IndexedSamples(moved, order="sequential", access=access)) == KEYS
        manifest = Manifest([result._replace(url=url) for result, url in zip(results, moved, strict=True)])
        assert keys_of(IndexedSamples(manifest, order="sequential", access=access)) == KEYS
    check_index(read_index(results[0].index_url), moved[0])
    for file in first.iterdir():
        os.utime(file, LATER)
    with pytest.raises(StaleSidecarError, match="its ETag is"):
        check_index(read_index(results[0].index_url), urls[0])


def test_reading_writes_to_a_store_only_if_it_is_asked_to(place: Place, tmp_path: Path) -> None:
    write(tmp_path / "here")
    copy_to(place, tmp_path / "here")
    options = IndexOptions(key_rule=last_dot)
    store = place.access.storage_options
    if place.url.startswith("/"):
        access = AccessOptions(indexing=options)
        assert keys_of(IndexedSamples(place.url, order="sequential", access=access)) == KEYS
        return
    with pytest.raises(
        StaleSidecarError,
        match=naming(
            "/0.tar", "0.tar.wdsidx", "1 other shard", "wds-datapipes index", "build_indexes", 'indexes="build"'
        ),
    ):
        IndexedSamples(place.url, access=place.access)
    access = AccessOptions(index_dir=tmp_path / "indexes", indexing=options, storage_options=store)
    assert keys_of(IndexedSamples(place.url, order="sequential", access=access)) == KEYS
    access = AccessOptions(indexes="build", indexing=options, storage_options=store)
    if place.url.startswith("http:"):
        with pytest.raises(MissingSidecarError, match="cannot be written"):
            IndexedSamples(place.url, access=access)
    else:
        assert keys_of(IndexedSamples(place.url, order="sequential", access=access)) == KEYS
    with pytest.raises(ShardOpenError, match=r"2\.tar cannot be opened"):
        IndexedSamples(place.url.replace("0..1", "2..2"), access=place.access)


def test_no_request_writes_to_a_store(tmp_path: Path) -> None:
    write(tmp_path)
    asked = list[str]()

    class Handler(QuietHandler):
        def parse_request(self) -> bool:
            done = super().parse_request()
            asked.append(self.command)
            return done

    with web_server(partial(Handler, directory=str(tmp_path))) as url, pytest.raises(StaleSidecarError):
        IndexedSamples(f"{url}/{{0..1}}.tar")
    assert {*asked} <= {"GET", "HEAD"}


@pytest.mark.parametrize("is_stale", [False, True])
def test_a_missing_index_is_built_by_the_rules_of_the_others(tmp_path: Path, is_stale: bool) -> None:
    urls = write(tmp_path)
    build_indexes(urls, options=IndexOptions(key_rule=last_dot, lowercase=False, on_duplicate="last"))
    if is_stale:
        build_shard(urls[1], [{"__key__": f"1/scan-{n}.5mm", "cls": "1"} for n in range(40)])
    else:
        os.remove(index_url(urls[1]))
    assert len(IndexedSamples(urls)) == (43 if is_stale else 6)
    assert str(read_index(index_url(urls[1])).facts.rules) == "key_rule=last_dot, lowercase=False, on_duplicate='last'"


def test_rules_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    urls = write(tmp_path)
    own, other = IndexOptions(key_rule=split_by_folder), IndexOptions(key_rule=last_dot)
    build_indexes(urls[:1], options=own)
    with pytest.raises(StaleSidecarError, match=r"1\.tar has no valid index.*key_rule=\S+:split_by_folder.*indexing="):
        IndexedSamples(urls)
    assert len(IndexedSamples(urls, access=AccessOptions(indexing=own))) == 6
    with pytest.raises(
        StaleSidecarError, match=r"0\.tar\.wdsidx was built with key_rule=\S+:split_by_folder.*last_dot"
    ):
        IndexedSamples(urls, access=AccessOptions(indexing=other))
    build_indexes(urls[1:], options=other, rebuild=True)
    assert keys_of(IndexedSamples(urls, order="sequential")) == KEYS
    more = build_shard(tmp_path / "2.tar", [{"__key__": "2", "cls": "1"}])
    with pytest.raises(StaleSidecarError, match=naming("2.tar", "0.tar", "key_rule")):
        IndexedSamples([*urls, more])
