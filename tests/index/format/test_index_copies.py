"""Copies of the indexes of remote shards: all processes of a host share one, and no other user can change it."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import FaultProxy
from forked_ranks import on_ranks
from nginx_server import Nginx
from torch.distributed import barrier

from wds_datapipes.errors import MissingSidecarError
from wds_datapipes.index import AccessOptions, ShardIndex, build_indexes
from wds_datapipes.index.format.index_copies import CLEANED, IndexCopies
from wds_datapipes.shard_cache.entry import Entry, entries
from wds_datapipes.testing import build_shard

pytestmark = pytest.mark.usefixtures("nothing_left")
SHARDS, FORK = 3, multiprocessing.get_context("fork")


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's folder for copies, which does not exist yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"wds-datapipes-{os.getuid()}"


@pytest.fixture
def served(nginx: Nginx, proxy: FaultProxy, tmp_path: Path) -> tuple[FaultProxy, list[str], Path]:
    """A server, the URLs of its indexes, and the folder that it serves."""
    folder = nginx.files / tmp_path.name
    folder.mkdir()
    shards = [build_shard(folder / f"{n}.tar", [{"__key__": f"{n}", "cls": "1"}]) for n in range(SHARDS)]
    build_indexes(shards)
    found = [f"http://127.0.0.1:{proxy.port}/{folder.name}/{number}.tar.wdsidx" for number in range(SHARDS)]
    return proxy, found, folder


def read_all(copies: IndexCopies, urls: list[str], *, maps: bool = True) -> list[ShardIndex]:
    indexes = [copies.read(url) for url in urls]
    assert [index.keys for index in indexes] == [[f"{number}"] for number in range(len(urls))]
    mapped = [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(".wdsidx")]
    assert mapped == ["r--s"] * len(indexes) * maps
    return indexes


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_processes_of_a_host_download_an_index_once(served: Any, private: Path, count: int, cached: bool) -> None:
    proxy, urls, _ = served
    cache_dir = private.with_name("copies") if cached else None
    copies = IndexCopies(AccessOptions(cache_dir=cache_dir))
    processes = [FORK.Process(target=read_all, args=(copies, urls)) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert (len(proxy.asked), proxy.heads) == (SHARDS, SHARDS)
    assert private.exists() != cached
    assert cached or private.stat().st_mode & 0o777 == 0o700


def test_ranks_of_a_host_ask_once_for_the_version_of_an_index(served: Any, private: Path) -> None:
    proxy, urls, folder = served

    def read_twice(rank: int) -> list[str]:
        read_all(IndexCopies(AccessOptions()), urls)
        barrier()
        if rank == 0:
            build_indexes([str(folder / "1.tar")], columns=lambda _: {"label": 5}, rebuild=True, num_workers=0)
        barrier()
        return IndexCopies(AccessOptions()).read(urls[1]).user_columns

    def check() -> None:
        assert on_ranks(3, read_twice) == [["label"]] * 3

    process = FORK.Process(target=check)  # the store of the ranks keeps a pipe until its process ends
    process.start()
    process.join()
    assert process.exitcode == 0
    process.close()
    assert (len(proxy.asked), proxy.heads) == (SHARDS + 1, SHARDS + 1)


def test_another_process_takes_over_the_download_of_a_killed_one(served: Any, private: Path) -> None:
    proxy, urls, _ = served
    proxy.awaited = 2  # no request is answered
    process = FORK.Process(target=read_all, args=(IndexCopies(AccessOptions()), urls))
    process.start()
    while not proxy.at_once:
        time.sleep(0.01)
    process.kill()
    process.join()
    process.close()
    proxy.met.set()
    assert read_all(IndexCopies(AccessOptions()), urls)
    assert len(proxy.asked) == 1 + SHARDS
    assert {path.suffix for path in (private / "indexes").iterdir()} == {"", ".json", ".lock", ".wdsidx"}
    with pytest.raises(MissingSidecarError, match=r"/9\.tar\.wdsidx cannot be opened: HTTP status 404, not found"):
        IndexCopies(AccessOptions()).read(urls[0].replace("/0.tar", "/9.tar"))


SPOILED: dict[str, Callable[[Path], object]] = {
    "a link": lambda path: path.symlink_to(path.parent),
    "a file": lambda path: path.touch(0o700),
    "open to others": lambda path: path.mkdir(0o755),
    "of another user": lambda path: path.with_name("wds-datapipes--1").mkdir(0o700),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_a_folder_that_others_may_change_is_not_used(
    served: Any, private: Path, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, urls, _ = served
    SPOILED[kind](private)
    before = {*private.parent.rglob("*")}
    if kind == "of another user":
        monkeypatch.setattr(os, "getuid", lambda: -1)
    copies = IndexCopies(AccessOptions())
    for _ in range(2):
        read_all(copies, urls, maps=False)
    assert len(proxy.asked) == 2 * SHARDS
    assert [record.message[:36] for record in caplog.records] == ["Each process reads the indexes of re"]
    assert {*private.parent.rglob("*")} == before


def test_an_old_damaged_or_unused_copy_is_replaced(served: Any, private: Path) -> None:
    proxy, urls, folder = served
    first = IndexCopies(AccessOptions())
    held = read_all(first, urls)[0]
    build_indexes([str(folder / "1.tar")], columns=lambda _: {"label": 5}, rebuild=True, num_workers=0)
    again = IndexCopies(AccessOptions())
    assert [each.read(urls[1]).user_columns for each in (first, again)] == [[], ["label"]]
    entry, indexes = Entry.of(private / "indexes", urls[1]), private / "indexes"
    status = entry.path.stat()
    entry.path.write_bytes(bytes(status.st_size))
    os.utime(entry.path, ns=(0, status.st_mtime_ns))
    proxy.asked.clear()
    assert [again.read(urls[1]).user_columns for _ in range(3)] == [["label"]] * 3
    assert len(proxy.asked) == 2  # the version, and one download
    for path in ((indexes / CLEANED), *(entry.facts_path for entry in entries(indexes))):
        os.utime(path, (1, 1))
    last = IndexCopies(AccessOptions()).read(urls[2])
    assert {each.path.name[-12:] for each in entries(indexes)} == {f"-{n}.tar.wdsidx"[-12:] for n in (0, 2)}
    assert (held.keys, last.keys) == (["0"], ["2"])
