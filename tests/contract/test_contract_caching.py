"""What webdataset's tests pin of local copies of shards.

The numbers in the names are explained in `contract.md`.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import webdataset.cache
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes import ShardList
from wds_datapipes.testing import build_shard


@pytest.fixture(autouse=True)
def shard(folder: Path) -> None:
    for name in "ab":
        Path(name).mkdir()
        build_shard(f"{name}/0.tar", [{"__key__": f"{n}", "cls": b"1", "png": b"p" * 500} for n in range(3)])
    Path("theirs").mkdir()


def fetched(*urls: str, max_bytes: int | None = None) -> list[str]:
    """Read shards through a cache, and return the names of the copies that exist then, without their digests."""
    pipe = IterableWrapper(list(urls)).cache_wds_shards("ours", max_bytes=max_bytes, prefetch=0)
    list(pipe.load_wds_shards())
    return sorted(path.name.partition("-")[2] for path in Path("ours").glob("*-*"))


def test_35_samples_of_a_copy_contain_its_path() -> None:
    url = "pipe:cat a/0.tar"
    dataset = webdataset.WebDataset(url, cache_dir="theirs", shardshuffle=False, empty_check=False)
    pipe = ShardList(url).cache_wds_shards("ours").load_wds_shards().group_samples()
    for _ in range(3):
        for samples, folder in ((list(dataset), "theirs/"), (list(pipe), "ours/")):
            assert [set(each) for each in samples] == [{"__key__", "__url__", "__local_path__", "cls", "png"}] * 3
            assert {each["__url__"] for each in samples} == {url}
            assert all(each["__local_path__"].startswith(folder) for each in samples)
            assert Path(samples[0]["__local_path__"]).read_bytes() == Path("a/0.tar").read_bytes()


def test_66_shards_of_one_name_do_not_share_a_copy() -> None:
    urls = [f"http://host/{folder}/0.tar" for folder in "ab"]
    assert {webdataset.cache.url_to_cache_name(url) for url in urls} == {"0.tar"}
    assert [webdataset.cache.url_to_cache_name(urls[0], ndir=1)] == ["a/0.tar"]
    assert fetched("file:a/0.tar", "file:b/0.tar") == ["0.tar", "0.tar"]


def test_68_local_files_are_copied_too() -> None:
    their_cache = webdataset.cache.FileCache("theirs", validator=None)
    assert their_cache.get_file("a/0.tar") == "a/0.tar"
    assert os.listdir("theirs") == []
    assert Path(their_cache.get_file("pipe:cat a/0.tar")).read_bytes() == Path("a/0.tar").read_bytes()
    assert fetched("a/0.tar", "pipe:cat a/0.tar") == ["0.tar", "shard"]


def test_69_copies_are_evicted_until_the_rest_fits() -> None:
    size = Path("a/0.tar").stat().st_size
    for name in "abc":
        Path("theirs", name).write_bytes(b"x" * size)
    webdataset.cache.LRUCleanup("theirs", 2 * size, interval=None).cleanup()
    assert sorted(os.listdir("theirs")) == ["b", "c"]
    urls = [f"file:{os.curdir}/a/0.tar", "file:a/0.tar", "file:b/0.tar"]
    assert len(fetched(*urls[:2], urls[0], urls[2], max_bytes=2 * size)) == 2
    kept = ShardList([urls[0]]).cache_wds_shards("ours").load_wds_shards()
    before = {path.stat().st_ino for path in Path("ours").glob("*-*")}
    list(kept)
    # The first copy was fetched first and used last, so the second one is evicted; theirs evicts by time of download.
    assert {path.stat().st_ino for path in Path("ours").glob("*-*")} == before


def test_79_one_download_serves_many_processes() -> None:
    count = 30
    url = "pipe:echo >> fetched; cat a/0.tar"
    barrier = threading.Barrier(count)

    def read(_: int) -> int:
        barrier.wait(600)
        return len(list(ShardList(url).cache_wds_shards("ours").load_wds_shards()))

    with ThreadPoolExecutor(count) as pool:
        assert set(pool.map(read, range(count))) == {6}
    assert len(Path("fetched").read_text()) == 1
    # webdataset checks for a copy and otherwise fetches one, without a lock.
    Path("fetched").unlink()
    their_cache = webdataset.cache.FileCache("theirs", validator=None)
    assert their_cache.get_file(url) == their_cache.get_file(url)
    assert len(Path("fetched").read_text()) == 1


def test_80_the_size_of_all_copies_is_limited() -> None:
    size = Path("a/0.tar").stat().st_size
    assert fetched("file:a/0.tar", "file:b/0.tar", "a/0.tar", max_bytes=size) == ["0.tar"]
    for name in "abc":
        Path("theirs", name).write_bytes(b"x" * size)
    webdataset.cache.LRUCleanup("theirs", size, interval=None).cleanup()
    assert len(os.listdir("theirs")) == 1
