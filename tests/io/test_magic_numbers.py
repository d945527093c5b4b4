"""Files that are not what their names say, and paths that no program expands: the error says what they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes import (
    DatasetSpec,
    DirectoryShards,
    ErrorBudget,
    IndexedSamples,
    ShardList,
    ShardWriter,
    TarWriter,
    convert_shards,
    read_quarantine,
)
from wds_datapipes.errors import CorruptSidecarError, DecodeError, ShardError, WdsError
from wds_datapipes.index import AccessOptions, build_indexes, read_index, read_manifest
from wds_datapipes.testing import build_shard

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%b\nsize 1073741824\n" % (b"4" * 64)
LFS = "It is a pointer of Git LFS, not the file: fetch the file with git lfs pull"
#: The content of files, and what the error says about it.
KINDS = {
    "a pointer": (POINTER, LFS),
    "a page": (b"<html><body>404 Not Found</body></html>", "a page of a web server, .*: '<html><body>404 Not Found<"),
    "a page in capitals": (b"\n<!DOCTYPE html><HTML>", "a page of a web server"),
    "an answer of S3": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "server.*AccessDenied"),
    "JSON": (b'{"error": "no such key"}', "It is JSON, such as the error of a store: .*no such key"),
    "text": (b"no such bucket\n", "It is text: 'no such bucket"),
    "a ZIP archive": (b"PK\x03\x04\x14\x00", "It is a ZIP archive"),
    "a Parquet file": (b"PAR1\x15\x04\x15", "It is a Parquet file"),
}


@pytest.mark.parametrize("size", [0, 2000])
@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tar.zst"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_a_shard_says_what_the_file_is(kind: str, name: str, size: int, folder: Path) -> None:
    content, message = KINDS[kind]
    (folder / name).write_bytes(content.ljust(size, b" "))
    with pytest.raises(ShardError, match=rf"{name} .*{message}"):
        list(ShardList(name).load_wds_shards())


@pytest.mark.parametrize("name", ["a.jsonl", "a.msgpack", "a.cbor"])
@pytest.mark.parametrize("kind", ["a pointer", "a page", "a ZIP archive"])
def test_the_error_of_records_says_what_the_file_is(kind: str, name: str, folder: Path) -> None:
    content, message = KINDS[kind]
    (folder / name).write_bytes(content)
    with pytest.raises(ShardError, match=message):
        list(ShardList(name).load_wds_records())


@pytest.mark.parametrize("read", [read_index, read_manifest])
def test_the_error_of_an_index_or_manifest_names_a_pointer(read: Callable[[str], Any], folder: Path) -> None:
    (folder / "a").write_bytes(POINTER)
    with pytest.raises(CorruptSidecarError, match=f"^a is not .*{LFS}"):
        read("a")


def test_the_error_of_a_field_names_a_pointer(folder: Path) -> None:
    build_shard("a.tar", [{"__key__": "a", "jpg": POINTER}])
    with pytest.raises(DecodeError, match=r"field 'jpg' of sample 'a' .*: a pointer of Git LFS"):
        list(ShardList(f"{folder}/a.tar").load_wds_shards().group_samples().wds_decode("rgb"))


#: Uses of paths below a home directory.
USES: dict[str, Callable[[], object]] = {
    "a shard": lambda: list(ShardList("~/a.tar").load_wds_shards()),
    "a pattern": lambda: ShardList("~/*.tar"),
    "a directory": lambda: ShardList("~/shards/"),
    "a queue": lambda: DirectoryShards("~/shards"),
    "a specification": lambda: DatasetSpec("~/a.yaml"),
    "a manifest": lambda: read_manifest("~/a.json"),
    "a quarantine file": lambda: read_quarantine("~/a.jsonl"),
    "an index": lambda: IndexedSamples("~/a.tar"),
    "the folder of indexes": lambda: IndexedSamples("a.tar", access=AccessOptions(index_dir="~/indexes")),
    "the folder of built indexes": lambda: build_indexes("a.tar", index_dir="~/indexes"),
    "a written shard": lambda: TarWriter("~/b.tar"),
    "written shards": lambda: write("~/b-%d.tar"),
    "a conversion": lambda: convert_shards(dict, "a.tar", "~/out/", num_workers=0),
    "a cache": lambda: list(ShardList("a.tar").cache_wds_shards("~/cache").load_wds_shards()),
    "a cache of samples": lambda: list(samples().cache_samples("~/cache/samples")),
    "skipped samples": lambda: list(samples().wds_decode(on_error=ErrorBudget(quarantine="~/q/a.jsonl"))),
}


def samples() -> Any:
    return ShardList("a.tar").load_wds_shards().group_samples()


def write(pattern: str) -> None:
    with ShardWriter(pattern, verbose=False) as writer:
        writer.write({"__key__": "a", "cls": 1})


@pytest.mark.parametrize("use", USES)
def test_a_home_directory_is_named_and_no_folder_of_that_name_appears(
    use: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_shard("a.tar", [{"__key__": "a", "cls": b"one"}])
    monkeypatch.setenv("HOME", "/home/ada")
    with pytest.raises((WdsError, ValueError), match=r"write '/home/ada"):
        USES[use]()
    assert os.listdir(folder) == ["a.tar"]
