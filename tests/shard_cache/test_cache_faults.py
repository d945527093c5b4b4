"""Caches and faults: truncated downloads, foreign files, killed processes, and full or read-only disks."""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import hashlib
import logging
import multiprocessing
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import fsspec  # type: ignore[import-untyped]  # it carries no types
import pytest
from faults import Fault, FaultProxy
from nginx_server import Nginx

from wds_datapipes import ShardList
from wds_datapipes.errors import CacheError, TruncatedShardError
from wds_datapipes.index import AccessOptions, Manifest, build_index
from wds_datapipes.index.format.index_copies import IndexCopies
from wds_datapipes.index.format.index_file import index_bytes
from wds_datapipes.io.remote.remote_file import FileFacts
from wds_datapipes.shard_cache.download import CacheFullError, DownloadRequest
from wds_datapipes.shard_cache.eviction import reserve_space, used_bytes
from wds_datapipes.shard_cache.store import CacheFolder
from wds_datapipes.testing import build_shard
from wds_datapipes.types import ShardInfo

pytestmark = pytest.mark.usefixtures("folder", "nothing_left", "shard")

SAMPLES: list[dict[str, Any]] = [{"__key__": f"{number}", "bin": bytes([65 + number]) * 3000} for number in range(6)]
WANT = [sample["__key__"] for sample in SAMPLES]


@pytest.fixture
def shard(nginx: Nginx) -> bytes:
    (nginx.files / "kept").mkdir(exist_ok=True)
    return Path(build_shard(nginx.files / "kept" / "a.tar", SAMPLES)).read_bytes()


def address(proxy: FaultProxy, name: str = "a.tar") -> str:
    return f"http://127.0.0.1:{proxy.port}/kept/{name}"


def keys(url: str, copies: str = "copies", manifest: Any = None, **options: Any) -> list[str]:
    pipe = ShardList(url).cache_wds_shards(copies, manifest=manifest).load_wds_shards(**options)
    return [sample["__key__"] for sample in pipe.group_samples()]


def commands(data: bytes, cut: int) -> str:
    """Return the URL of a command whose output is truncated once, and complete from then on; its size is unknown."""
    Path("data").write_bytes(data)
    return f"pipe:echo >> opened; if mkdir once 2>/dev/null; then head -c {cut} data; else cat data; fi"


# Truncated downloads of unknown size


@pytest.mark.parametrize("cut", [0, 512, 10_000])
@pytest.mark.parametrize("how", ["plain", "gzip"])
def test_a_truncated_download_is_fetched_once_more(shard: bytes, how: str, cut: int) -> None:
    data = shard if how == "plain" else gzip.compress(shard)
    assert keys(url := commands(data, min(cut, len(data) - 1 if how == "gzip" else cut))) == WANT
    assert keys(url) == WANT
    assert len(Path("opened").read_text()) == 2


def test_an_incomplete_copy_is_not_kept(shard: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """The output is truncated for a while, and its size is unknown."""
    Path("data").write_bytes(shard)
    url = "pipe:echo >> opened; if [ $(wc -l < opened) -lt 5 ]; then head -c 8000 data; else cat data; fi"
    for run in (1, 2):
        with pytest.raises(TruncatedShardError):
            keys(url)
        assert len(Path("opened").read_text()) == 2 * run
        assert list(Path("copies").glob("*-shard")) == []
    assert "which cannot be read to its end (TruncatedShardError)" in caplog.text
    assert keys(url) == keys(url) == WANT
    assert len(Path("opened").read_text()) == 5


def test_a_shard_of_unknown_size_is_fetched_once_more(proxy: FaultProxy, shard: bytes) -> None:
    def whole() -> list[bytes]:
        return [b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", shard]

    def cut() -> list[bytes]:
        return [b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", shard[:8000]]

    proxy.hides_size = True
    proxy.faults[:] = [Fault(wire=pieces) for pieces in (whole, cut, whole)]  # the first request is for the size
    assert keys(address(proxy), retries=0) == keys(address(proxy)) == WANT
    assert len(proxy.asked) == 4


def test_a_rewritten_shard_is_fetched_again(
    nginx: Nginx, proxy: FaultProxy, shard: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file, url = nginx.files / "kept" / "cut.tar", address(proxy, "cut.tar")
    file.write_bytes(shard[:8000])
    with pytest.raises(TruncatedShardError, match=r"/kept/cut\.tar ends inside the member"):
        keys(url)
    other = build_shard("other.tar", [{**SAMPLES[0], "__key__": "9"}, *SAMPLES[1:]])
    versions = [shard, Path(other).read_bytes()]  # of the same size
    for number, version in enumerate(versions):
        file.write_bytes(version)
        os.utime(file, ns=(0, number * 10**9))
        for _ in range(2):
            assert keys(url) == ["9" if number else "0", *WANT[1:]]
        figures = len(proxy.asked), proxy.heads
        manifest = Manifest([ShardInfo(url, 6, len(shard), digest_of(version))])
        assert keys(url, manifest=manifest)[1:] == WANT[1:]
        assert (len(proxy.asked), proxy.heads) == figures  # its digest suffices
    assert figures == (3, 5)
    assert re.search(r"is not used: .* another version of the shard: its ETag is \S+, not ", caplog.text)
    proxy.backend = ("127.0.0.1", 1)  # nothing answers
    assert keys(url) == ["9", *WANT[1:]]
    assert caplog.text.count("Using copies without asking their store") == 1


def test_a_shard_without_its_end_marker_is_kept_if_allowed(shard: bytes) -> None:
    url = commands(shard[: 6 * 3584], 0)
    for _ in range(3):
        assert keys(url, end_marker="optional") == WANT
    assert len(Path("opened").read_text()) == 2


# Log records


@pytest.mark.parametrize("verbose", ["", "0", "1"])
def test_each_fetch_is_logged(
    proxy: FaultProxy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, verbose: str
) -> None:
    monkeypatch.setenv("WDS_VERBOSE_CACHE", verbose)
    caplog.set_level(logging.DEBUG, "wds_datapipes")
    url = address(proxy).replace("//", "//me:hunter2@")
    assert keys(url) == keys(url) == WANT
    records = [record for record in caplog.records if record.message.startswith("Downloaded")]
    assert [record.levelname for record in records] == ["WARNING" if verbose == "1" else "INFO"]
    assert re.fullmatch(
        r"Downloaded http://\*\*\*@127\S+/kept/a\.tar: 30720 bytes in \d+\.\d s, to copies/\w+-a\.tar",
        records[0].message,
    )
    assert "Downloading http://***@" in caplog.text
    assert "hunter2" not in caplog.text


# Many processes, some of which are killed

PROCESSES, KILLS, READS, MAX_BYTES = 24, 12, 6, 1_500_000
NAMES = [f"{number}.bin" for number in range(12)]


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_some(seed: int, digests: dict[str, str], said: int) -> None:
    drawn = random.Random(seed)
    folder = CacheFolder("copies", MAX_BYTES)
    for _ in range(READS):
        name = drawn.choice(NAMES)
        with contextlib.suppress(CacheFullError), opened(folder, name) as copy:
            assert digest_of(copy.read()) == digests[name]
        os.write(said, b".")


def opened(folder: CacheFolder, url: str) -> BinaryIO:
    copy = folder.open(DownloadRequest(url, FileFacts(), None, {}))
    assert copy is not None
    return copy


def test_many_processes_share_a_cache_while_others_are_killed() -> None:
    digests = {}
    for number, name in enumerate(NAMES):
        data = random.Random(number).randbytes(200_000 + 1000 * number)
        Path(name).write_bytes(data)
        digests[name] = digest_of(data)
    heard, said = os.pipe()
    forks = multiprocessing.get_context("fork")
    processes = [forks.Process(target=read_some, args=(seed, digests, said)) for seed in range(PROCESSES)]
    for process in processes:
        process.start()
    os.close(said)
    victims = random.Random(7).sample(processes, KILLS)
    for victim in victims:
        assert os.read(heard, 1), "no process has read a shard"
        victim.kill()
    for process in processes:
        process.join()
        assert process.exitcode == 0 or process in victims
    os.close(heard)
    copies = CacheFolder("copies")
    assert reserve_space(copies.path, None, 0, MAX_BYTES)  # removes what killed processes left
    assert used_bytes(copies.path) <= MAX_BYTES
    entries = {name: entry for name in NAMES if (entry := copies.entry(name)).path.exists()}
    assert entries
    for name, entry in entries.items():
        facts = entry.facts()
        assert facts is not None
        assert facts.sha256 == digests[name] == digest_of(entry.path.read_bytes())
    # A killed process may leave half of the facts, which stay for an hour.
    assert not [path for path in copies.path.iterdir() if "." not in path.stem and path.suffix == ".part"]


# Disks


def use_a_small_disk(place: Path, shard: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x20000) and libc.unshare(0x10020000):
        sys.exit(NO_MOUNTS)
    libc.mount(b"none", b"/", None, (1 << 18) | (1 << 14), None)
    if libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, b"size=1m"):
        sys.exit(NO_MOUNTS)
    folder, content = CacheFolder(place), Path(shard).read_bytes()

    def use(url: str) -> None:
        with opened(folder, url) as copy:
            assert copy.read() == content

    use(shard)
    with contextlib.suppress(OSError), (place / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
    use(shard)
    kept = opened(folder, shard)  # not evicted
    tempfile.tempdir = str(place)
    fsspec.filesystem("memory").pipe("/a.tar.wdsidx", index_bytes(build_index(shard)))
    assert IndexCopies(AccessOptions()).read("memory://a.tar.wdsidx").keys == WANT
    assert not [*place.rglob("*.wdsidx")]
    full = r"The cache \S+ cannot be used: No space left on device\. All unused copies have been evicted"
    with pytest.raises(CacheError, match=full):
        use(f"pipe:cat {shard} {shard}")
    kept.close()
    libc.mount(b"none", os.fsencode(place), None, 32 | 1, None)
    with pytest.raises(OSError, match="Read-only file system"):
        (place / "x").touch()
    use(shard)
    with pytest.raises(CacheError, match=r"The cache \S+ cannot be used: Read-only file system"):
        use(f"pipe:cat {shard}")


NO_MOUNTS = 5


def test_a_full_or_read_only_disk_still_provides_its_copies(
    tmp_path: Path, forked: Callable[[Callable[[], object]], int | None]
) -> None:
    (tmp_path / "copies").mkdir()
    shard = build_shard(tmp_path / "a.tar", SAMPLES)
    code = forked(partial(use_a_small_disk, tmp_path / "copies", shard))
    if code == NO_MOUNTS:
        pytest.skip("the kernel lets nobody but root mount a file system, and so no disk can be made full")
    assert code == 0
