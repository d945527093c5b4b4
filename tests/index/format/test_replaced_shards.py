"""Shards replaced after they were indexed: their samples have their own keys, or reading them is an error."""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fsspec  # type: ignore[import-untyped]  # it carries no types
import pytest
from error_facts import naming
from nginx_server import Nginx

from wds_datapipes import IndexedSamples
from wds_datapipes.errors import ChangedShardError
from wds_datapipes.index import AccessOptions, IndexOptions, Manifest, build_indexes
from wds_datapipes.index.format import validity
from wds_datapipes.testing import build_shard

COUNT = 50
Fields = dict[str, Any]


def samples_of(name: Callable[[int], str]) -> list[Fields]:
    return [
        {"__key__": name(number), "jpg": f"{number:05}" * size, "a.txt": f"{number:05}", "b.txt": f"{-number:05}"}
        for number, size in enumerate([9000, 100] * (COUNT // 2))  # large fields are read alone
    ]


SAMPLES = samples_of("old/{:03}".format)


def changed(number: int, **fields: Any) -> list[Fields]:
    """The samples, with other fields in one of them."""
    found = [dict(sample) for sample in SAMPLES]
    found[number] |= fields
    return found


def turned(number: int) -> list[Fields]:
    """The samples, with two fields of one of them in the other order."""
    found = [dict(sample) for sample in SAMPLES]
    found[number]["a.txt"] = found[number].pop("a.txt")
    return found


#: Shards with the same size as that of `SAMPLES`, and the first sample whose headers differ.
REPLACEMENTS = {
    "other keys": (samples_of("new/{:03}".format), 0),
    "another key in the middle": (changed(20, __key__="new/020"), 20),
    "longer keys": (samples_of("old/{:03}0".format), 0),
    "another order": (SAMPLES[2:] + SAMPLES[:2], 0),  # with headers at the same offsets
    "another size in the same block": (changed(20, **{"a.txt": "longer"}), 20),
    "a shorter field": (changed(20, jpg="shorter" * 6400), 20),
    "fields in another order": (turned(20), 20),
}


class Place(NamedTuple):
    """Where a shard is.

    Attributes:
        url: the shard.
        write: replaces it with the file at a path; by default with another modification time.
        options: the storage options.
    """

    url: str
    write: Callable[[Path], None]
    options: dict[str, Any] | None = None


PLACES = ["local", "http", "http without ETag", "http without a version"]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    kind = request.param
    if kind == "s3":
        store = request.getfixturevalue("s3_store")
        options = {
            **store.options(),
            "config_kwargs": {"response_checksum_validation": "when_required"},
            "skip_instance_cache": True,
        }
        system, url = fsspec.filesystem("s3", **options), f"s3://bucket/{tmp_path.name}/a.tar"
        yield Place(url, lambda path: system.pipe_file(url, path.read_bytes()), options)
        return
    nginx: Nginx | None = None if kind == "local" else request.getfixturevalue("nginx")
    folder = tmp_path / "shards" if nginx is None else nginx.files / tmp_path.name
    folder.mkdir(exist_ok=True)
    locations = {"http": "", "http without ETag": "by-date/", "http without a version": "no-version/"}

    def write(path: Path) -> None:
        with (folder / "a.tar").open("wb") as shard:  # the same file, as an index of an open shard would read it
            shard.write(path.read_bytes())
        shutil.copystat(path, folder / "a.tar")

    url = (
        str(folder / "a.tar")
        if nginx is None
        else f"http://127.0.0.1:{nginx.http}/{locations[kind]}{tmp_path.name}/a.tar"
    )
    yield Place(url, write)


def shard(folder: Path, samples: list[Fields], time: int = 10**9) -> Path:
    folder.mkdir(exist_ok=True)
    path = Path(build_shard(folder / "made.tar", samples))
    os.utime(path, (time, time))
    return path


def dataset(place: Place, tmp_path: Path, order: Any = "sequential") -> IndexedSamples:
    """Return the samples of the shard, read with an existing index."""
    reading: dict[str, Any] = {"index_dir": tmp_path / "indexes", "storage_options": place.options}
    return IndexedSamples(Manifest(build_indexes([place.url], **reading)), order=order, access=AccessOptions(**reading))


def fields_of(samples: Any) -> list[Fields]:
    return [
        {name: value for name, value in sample.items() if name[:2] != "__" or name == "__key__"} for sample in samples
    ]


def encoded(samples: list[Fields]) -> list[Fields]:
    return [
        {name: value if name == "__key__" else value.encode() for name, value in sample.items()} for sample in samples
    ]


@pytest.mark.parametrize(
    ("place", "name", "order"),
    [
        *(("local", name, order) for name in REPLACEMENTS for order in ("sequential", "global")),
        *(("http without ETag", name, "window") for name in ("another order", "a shorter field")),
        *((place, "other keys", "sequential") for place in PLACES[1:]),
    ],
    indirect=["place"],
)
def test_no_sample_of_a_replaced_shard_gets_another_key(place: Place, tmp_path: Path, name: str, order: str) -> None:
    samples, first = REPLACEMENTS[name]
    place.write(old := shard(tmp_path / "old", SAMPLES))
    indexed = dataset(place, tmp_path, order=order)
    assert sorted(sample["__key__"] for sample in indexed) == [sample["__key__"] for sample in SAMPLES]
    new = shard(tmp_path / "new", samples)  # with the same modification time
    assert new.stat().st_size == old.stat().st_size
    place.write(new)
    found: list[Fields] = []
    with pytest.raises(ChangedShardError, match=naming("a.tar", "has changed", "index --rebuild")):
        found.extend(fields_of(indexed))
    assert [sample for sample in found if sample not in encoded(SAMPLES)] == []
    if order == "sequential":
        assert len(found) <= first


def test_a_shard_without_its_members_is_an_error(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "a.tar"), lambda _: None)
    whole = shard(tmp_path, SAMPLES).rename(place.url).read_bytes()
    indexed = dataset(place, tmp_path)
    for content, message in (
        (whole[:-10240], f"it has {len(whole) - 10240} bytes instead of {len(whole)}"),
        (bytes(len(whole)), "at byte 512 is no member instead of 'old/000.jpg'"),
    ):
        Path(place.url).write_bytes(content)
        with pytest.raises(ChangedShardError, match=rf"a\.tar has changed since it was indexed: {message}"):
            next(iter(indexed))


def test_a_shard_that_is_rewritten_while_it_is_open_is_an_error(place: Place, tmp_path: Path) -> None:
    place.write(shard(tmp_path / "old", SAMPLES))
    dataset_of_one = dataset(place, tmp_path).map_style()
    assert dataset_of_one[3]["__key__"] == "old/003"
    place.write(shard(tmp_path / "new", samples_of("new/{:03}".format)))
    with pytest.raises(ChangedShardError, match=r"a\.tar "):
        dataset_of_one[3]


@pytest.mark.parametrize("place", ["local", "http", "http without ETag", "s3"], indirect=True)
def test_another_version_with_the_same_headers_is_an_error_if_the_store_has_versions(
    place: Place, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place.write(shard(tmp_path / "old", SAMPLES))
    indexed = dataset(place, tmp_path)
    other = [{**sample, "jpg": sample["jpg"][::-1]} for sample in SAMPLES]
    place.write(shard(tmp_path / "new", other, time=2 * 10**9))
    if request.node.callspec.params["place"] in ("http", "s3"):
        with pytest.raises(ChangedShardError, match=naming("a.tar", "has changed", "ETag")):
            next(iter(indexed))
    else:  # a copy of a shard also has a different time
        assert fields_of(indexed) == encoded(other)


def test_valid_indexes_are_kept_or_a_warning_says_why_not(
    place: Place, tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    place.write(shard(tmp_path / "old", SAMPLES))
    options: dict[str, Any] = {"index_dir": tmp_path / "indexes", "storage_options": place.options}
    validity._warned.clear()
    assert [result.is_new for result in build_indexes([place.url], **options)] == [True]
    assert caplog.messages == []
    has_version = request.node.callspec.params["place"] != "http without a version"
    assert [result.is_new for result in build_indexes([place.url], **options)] == [not has_version]
    if not has_version:
        assert re.search(r"index of \S+a\.tar is built again.*neither ETag nor Last-Modified", "".join(caplog.messages))
    place.write(shard(tmp_path / "new", samples_of("new/{:03}".format), time=2 * 10**9))
    assert [result.is_new for result in build_indexes([place.url], **options)] == [True]


@pytest.mark.parametrize("kind", ["another size", "another digest", "only other keys"])
def test_copies_of_a_replaced_shard_are_not_read_by_a_new_index(nginx: Nginx, tmp_path: Path, kind: str) -> None:
    folder = nginx.files / tmp_path.name
    url = f"http://127.0.0.1:{nginx.http}/{tmp_path.name}/made.tar"
    access = AccessOptions(index_dir=tmp_path / "indexes", cache_dir=tmp_path / "copies")

    def indexed() -> IndexedSamples:
        options = IndexOptions(digest=kind == "another digest")
        manifest = Manifest(build_indexes([url], index_dir=access.index_dir, options=options))
        return IndexedSamples(manifest, order="sequential", access=access)

    shard(folder, SAMPLES)
    assert fields_of(indexed()) == encoded(SAMPLES)
    samples = samples_of("new/{:03}".format)
    samples = [*samples, {"__key__": "more", "jpg": "more" * 10_000}] if kind == "another size" else samples
    shard(folder, samples, time=2 * 10**9)
    new = indexed()
    assert fields_of(new) == encoded(samples)
    if kind == "only other keys":  # and now, the index stays
        shard(folder, SAMPLES, time=3 * 10**9)
        assert fields_of(new) == encoded(samples)
        shutil.rmtree(tmp_path / "copies")
        with pytest.raises(ChangedShardError, match=r"since it was indexed: its ETag is '\S+' instead of '\S+'\. "):
            next(iter(new))


def test_columns_of_a_shard_that_was_replaced_are_an_error(tmp_path: Path) -> None:
    url = str(shard(tmp_path / "shards", SAMPLES))
    build_indexes([url], columns=lambda sample: {"label": sample["a.txt"].decode()}, fields=["a.txt"])
    manifest = Manifest(build_indexes([url]))
    first = IndexedSamples(manifest, order="sequential", select=lambda index: index.columns["label"] == "00007")
    assert [sample["__key__"] for sample in first] == ["old/007"]
    shard(tmp_path / "shards", changed(7, **{"a.txt": "00008"}), time=2 * 10**9)
    again = IndexedSamples(manifest, order="sequential", select=lambda index: index.columns["label"] == "00007")
    with pytest.raises(ChangedShardError, match=r"made\.tar has .*modification time differs .* has columns"):
        list(again)


def split_by_folder(name: str) -> tuple[str, str] | None:
    folder, _, file = name.partition("/")
    key, _, extension = file.rpartition(".")
    return (key, f"{folder}.{extension}") if key else None


def test_sizes_and_time_are_compared_if_a_users_key_rule_hides_the_names(tmp_path: Path) -> None:
    def write(key: str, text: str, time: int) -> str:
        url = build_shard(
            tmp_path / "a.tar", [{"__key__": f"one/{key}", "txt": text}, {"__key__": f"two/{key}", "txt": text}]
        )
        os.utime(url, (time, time))
        return url

    url = write("a", "1", 10**9)
    manifest = Manifest(build_indexes([url], options=IndexOptions(key_rule=split_by_folder)))
    indexed = IndexedSamples(manifest, order="sequential")
    assert fields_of(indexed) == [{"__key__": "a", "one.txt": b"1", "two.txt": b"1"}]
    write("a", "12", 10**9)
    with pytest.raises(ChangedShardError, match=r"instead of 'one\.txt' of 1 byte"):
        list(indexed)
    write("b", "1", 2 * 10**9)
    with pytest.raises(ChangedShardError, match=r"modification time differs .* has the key rule \S+:split_by_folder"):
        list(indexed)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize("text", ["ä", "long" * 20])
def test_names_that_do_not_fit_into_a_header_are_compared(tmp_path: Path, form: int, text: str) -> None:
    size = 100_000

    def write(last: str) -> str:
        with tarfile.open(tmp_path / "a.tar", "w", format=form) as archive:
            (tmp_path / "data").write_bytes(bytes(size))
            for number in range(3):
                archive.add(tmp_path / "data", f"{text}/{text}{number}{last}.txt")
                archive.addfile(tarfile.TarInfo(f"{text}/{text}{number}{last}.d"))
        return str(tmp_path / "a.tar")

    manifest = Manifest(build_indexes([write("a")]))
    for order in ("sequential", "global"):
        samples = list(IndexedSamples(manifest, order=order))
        assert sorted(sample["__key__"] for sample in samples) == [f"{text}/{text}{number}a" for number in range(3)]
    write("b")
    with pytest.raises(ChangedShardError, match=f"{text}0b.txt' of {size:,} bytes instead of .*{text}0a.txt"):
        list(IndexedSamples(manifest, order="sequential"))
