"""Shards that a user or webdataset has put into the folder of a cache are read instead of downloads."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from faults import FaultProxy
from nginx_server import Nginx

from wds_datapipes import IndexedSamples, ShardList
from wds_datapipes.index import AccessOptions, build_indexes
from wds_datapipes.index.format.manifest import Manifest
from wds_datapipes.io.remote.remote_file import FileFacts
from wds_datapipes.shard_cache.download import DownloadRequest
from wds_datapipes.shard_cache.entry import Entry, entries
from wds_datapipes.shard_cache.eviction import evict_one, reserve_space, used_bytes
from wds_datapipes.shard_cache.prefilled import PrefilledShards
from wds_datapipes.shard_cache.store import CacheFolder
from wds_datapipes.testing import build_shard
from wds_datapipes.types import ShardInfo

pytestmark = pytest.mark.usefixtures("folder", "nothing_left", "whole")


@pytest.fixture
def whole(nginx: Nginx) -> bytes:
    """Write a shard, and one of the same size, to the server; return the first."""
    for number, name in enumerate(("train", "val")):
        (nginx.files / name).mkdir(exist_ok=True)
        build_shard(nginx.files / name / "0.tar", [{"__key__": f"{number}", "txt": "text"}])
        os.utime(nginx.files / name / "0.tar", (1, 1))
    return (nginx.files / "train" / "0.tar").read_bytes()


def address(proxy: FaultProxy, name: str = "train/0.tar") -> str:
    return f"http://127.0.0.1:{proxy.port}/{name}"


def keys(url: str, **options: Any) -> list[str]:
    samples = list(ShardList(url).cache_wds_shards("copies", **options).load_wds_shards().group_samples())
    assert all(Path(sample["__local_path__"]).is_file() for sample in samples)
    return [sample["__key__"] for sample in samples]


def put(name: str, content: bytes) -> Path:
    path = Path("copies") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", ["0.tar", "train/0.tar"])
def test_a_file_with_the_name_or_path_of_a_shard_is_its_copy(proxy: FaultProxy, whole: bytes, name: str) -> None:
    file = put(name, whole)
    for epoch in range(1, 3):
        assert keys(address(proxy)) == ["0"]
        assert (proxy.asked, proxy.heads) == ([], epoch)  # for the size and the version
    assert used_bytes(Path("copies")) == 0
    assert reserve_space(Path("copies"), None, 1, 1)
    assert not evict_one(Path("copies"))
    assert file.read_bytes() == whole
    file.unlink()
    assert keys(address(proxy)) == ["0"]
    assert len(proxy.asked) == 1
    assert not any(entry.is_link for entry in entries(Path("copies")))


def test_a_copy_of_webdataset_is_used(proxy: FaultProxy) -> None:
    Path("copies").mkdir()
    urls = [address(proxy), f"pipe:cat {Path(build_shard('b.tar', [{'__key__': 'b', 'txt': 'b'}])).absolute()}"]
    code = "import sys, webdataset; list(webdataset.WebDataset(sys.argv[1:], cache_dir='copies', shardshuffle=False))"
    subprocess.run([sys.executable, "-c", code, *urls], check=True)
    assert len(os.listdir("copies")) == 2
    Path("b.tar").unlink()
    asked = len(proxy.asked)
    assert [key for url in urls for key in keys(url)] == ["0", "b"]
    assert len(proxy.asked) == asked


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda whole: whole + bytes(512), "bytes, but the shard has"),
        (lambda whole: b"\0" * 700 + whole[700:], "is not a complete archive"),
        (lambda whole: bytes(len(whole)), "is not a complete archive"),
        (lambda whole: b"", "0 bytes, but the shard has"),
    ],
)
def test_another_file_with_the_name_of_a_shard_is_not_used(
    proxy: FaultProxy, whole: bytes, caplog: pytest.LogCaptureFixture, change: Any, reason: str
) -> None:
    file = put("0.tar", change(whole))
    before = file.read_bytes()
    assert keys(address(proxy)) == keys(address(proxy)) == ["0"]
    assert len(proxy.asked) == 1
    assert caplog.text.count("has the name of") == caplog.text.count(reason) == 1
    assert file.read_bytes() == before


def test_a_digest_in_the_manifest_tells_shards_of_the_same_size_apart(
    nginx: Nginx, proxy: FaultProxy, whole: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    url, other = address(proxy), (nginx.files / "val" / "0.tar").read_bytes()
    assert len(whole) == len(other)
    manifest = Manifest([ShardInfo(url, 1, len(whole), sha256(whole).hexdigest())])
    put("0.tar", other)
    assert keys(url, manifest=manifest) == ["0"]
    assert len(proxy.asked) == 1
    assert "0.tar has the name of" in caplog.text
    shutil.rmtree("copies")
    put("0.tar", whole)
    proxy.backend = ("127.0.0.1", 1)  # nothing answers
    assert keys(url, manifest=manifest) == ["0"]


def test_a_file_is_the_copy_of_one_shard(proxy: FaultProxy, whole: bytes, caplog: pytest.LogCaptureFixture) -> None:
    put("0.tar", whole)
    assert keys(address(proxy)) == ["0"]
    assert keys(address(proxy, "val/0.tar")) == ["1"]
    assert "it is the copy of another URL" in caplog.text
    assert keys(address(proxy)) == ["0"]


def test_shards_of_the_same_name_are_told_apart_by_their_paths(nginx: Nginx, proxy: FaultProxy) -> None:
    for name in ("train/0.tar", "val/0.tar"):
        put(name, (nginx.files / name).read_bytes())
    assert [keys(address(proxy, name)) for name in ("train/0.tar", "val/0.tar")] == [["0"], ["1"]]
    assert proxy.asked == []


def test_without_a_store_complete_archives_are_used(
    proxy: FaultProxy, whole: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    put("0.tar", whole)
    proxy.backend = ("127.0.0.1", 1)  # nothing answers
    assert keys(address(proxy)) == ["0"]
    assert caplog.text.count("Using copies without asking their store") == 1


def test_a_file_of_an_earlier_version_of_the_shard_is_outdated(nginx: Nginx, proxy: FaultProxy, whole: bytes) -> None:
    """The new version has the size of the file, so only the recorded version tells them apart."""
    file = put("0.tar", whole)
    assert keys(address(proxy)) == ["0"]
    shutil.copy(nginx.files / "val" / "0.tar", nginx.files / "train" / "0.tar")
    for _ in range(2):
        with pytest.warns(
            UserWarning, match=r"is read from its source: .*0\.tar, which was put .* Delete it or replace"
        ):
            assert keys(address(proxy)) == ["1"]
    shutil.copy(nginx.files / "val" / "0.tar", file)
    asked = len(proxy.asked)
    assert keys(address(proxy)) == ["1"]
    assert len(proxy.asked) == asked
    file.write_bytes(whole)
    file.unlink()
    assert keys(address(proxy)) == ["1"]


def test_a_read_only_folder_provides_the_files_in_it(
    proxy: FaultProxy, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("0.tar", whole)
    real, access = os.open, os.access

    def refuse_facts(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_CREAT and "copies" in os.fspath(path):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(Entry, "write_facts", refuse_facts)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    for _ in range(2):
        assert keys(address(proxy)) == ["0"]
    assert proxy.asked == []
    assert os.listdir("copies") == ["0.tar"]


def test_an_untrusted_url_uses_no_file_because_of_its_name(nginx: Nginx, proxy: FaultProxy) -> None:
    put("0.tar", (nginx.files / "val" / "0.tar").read_bytes())  # of the same size
    for options in ({"allow_local_files": False}, {}):
        shards = ShardList(address(proxy)).cache_wds_shards("copies").load_wds_shards(**options)
        assert [sample["__key__"] for sample in shards.group_samples()] == ["0"]
    assert len(proxy.asked) == 1


def test_a_copy_of_another_url_is_not_used_because_of_its_name(nginx: Nginx, proxy: FaultProxy) -> None:
    assert keys(address(proxy)) == ["0"]
    (copy,) = entries(Path("copies"))
    shutil.copy(nginx.files / "val" / "0.tar", nginx.files / "val" / copy.path.name)
    assert keys(address(proxy, f"val/{copy.path.name}")) == ["1"]


@pytest.mark.parametrize("name", ["x" * 300 + "/0.tar", "%2e%2e/0.tar", "..%2f0.tar", "a%00/0.tar"])
def test_a_path_that_no_file_can_have_is_ignored(name: str) -> None:
    Path("0.tar").write_bytes(b"outside")
    Path("copies").mkdir()
    folder = CacheFolder("copies")
    url = f"http://127.0.0.1:1/{name}"
    assert folder.path_of(url) == folder.entry(url).path
    request = DownloadRequest(url, FileFacts(7), sha256(b"outside").hexdigest(), {})
    assert PrefilledShards().adopt(folder.entry(url), request, lambda _: FileFacts(7)) is None


def test_files_of_users_are_not_removed(whole: bytes) -> None:
    paths = [put(name, whole) for name in ("manifest.json", "notes.part", "0.tar.part", "a.lock", "0.json")]
    for path in paths:
        os.utime(path, (1, 1))
    assert reserve_space(Path("copies"), None, 1, 1)
    assert all(path.exists() for path in paths)


def test_indexed_samples_read_the_files_too(nginx: Nginx, proxy: FaultProxy, whole: bytes) -> None:
    put("train/0.tar", whole)
    url = address(proxy)
    build_indexes([url], index_dir="indexes")
    asked = len(proxy.asked)
    samples = list(IndexedSamples([url], access=AccessOptions(index_dir="indexes", cache_dir="copies")))
    assert [sample["__key__"] for sample in samples] == ["0"]
    assert all(Path(sample["__local_path__"]).is_file() for sample in samples)
    assert len(proxy.asked) == asked


def test_each_file_that_is_used_is_logged(proxy: FaultProxy, whole: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "wds_datapipes")
    put("0.tar", whole)
    keys(address(proxy))
    assert "train/0.tar from copies/0.tar, which was put there" in caplog.text
