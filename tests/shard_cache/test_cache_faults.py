"""Caches and faults: truncated downloads, foreign files, killed processes, and disks that are full or read-only."""

from __future__ import annotations

import gzip
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import Fault, FaultProxy, fault_proxy
from nginx_server import Nginx

from wds_datapipes import ShardList
from wds_datapipes.errors import TruncatedShardError
from wds_datapipes.testing import build_shard

pytestmark = pytest.mark.usefixtures("folder", "nothing_left")

SAMPLES: list[dict[str, Any]] = [{"__key__": f"{number}", "bin": bytes([65 + number]) * 3000} for number in range(6)]
WANT = [sample["__key__"] for sample in SAMPLES]


@pytest.fixture
def shard(nginx: Nginx) -> bytes:
    if not nginx.is_running:
        nginx.start()
    (nginx.files / "kept").mkdir(exist_ok=True)
    return Path(build_shard(nginx.files / "kept" / "a.tar", SAMPLES)).read_bytes()


@pytest.fixture
def proxy(nginx: Nginx, shard: bytes) -> Iterator[FaultProxy]:
    with fault_proxy(("127.0.0.1", nginx.http)) as made:
        yield made


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


@pytest.mark.parametrize("cut", [0, 100, 512, 3584, 10_000, 21_504])
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
    proxy.faults[:] = [Fault(wire=pieces) for pieces in (whole, cut, whole, whole)]  # each time after the size
    assert keys(address(proxy), retries=0) == keys(address(proxy)) == WANT
    assert len(proxy.asked) == 4


def test_a_rewritten_shard_is_fetched_again(nginx: Nginx, proxy: FaultProxy, shard: bytes) -> None:
    (nginx.files / "kept" / "cut.tar").write_bytes(shard[:8000])
    with pytest.raises(TruncatedShardError, match=r"/kept/cut\.tar ends inside the member"):
        keys(address(proxy, "cut.tar"))
    (nginx.files / "kept" / "cut.tar").write_bytes(shard)
    assert keys(address(proxy, "cut.tar")) == WANT


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

MANY = """
import hashlib, os, random, signal, sys
from wds_datapipes.shard_cache.store import CacheFullError, DownloadRequest
from wds_datapipes.shard_cache.store import CacheFolder
from wds_datapipes.shard_cache.entry import reserve_space, used_bytes

PROCESSES, KILLS, READS, MOST = 40, 30, 6, 1_500_000
names = [f"{number}.bin" for number in range(12)]
for number, name in enumerate(names):
    with open(name, "wb") as file:
        file.write(random.Random(number).randbytes(200_000 + 1000 * number))
want = {name: hashlib.sha256(open(name, "rb").read()).hexdigest() for name in names}
drawn = random.Random(7)
heard, said = os.pipe()


def child(seed):
    chosen = random.Random(seed)
    folder = CacheFolder("copies", MOST)
    for _ in range(READS):
        name = chosen.choice(names)
        try:
            with folder.open(DownloadRequest(name, None, None, {})) as copy:
                digest = hashlib.sha256(copy.read()).hexdigest()
        except CacheFullError:
            digest = want[name]
        if digest != want[name]:
            os._exit(3)
        os.write(said, b".")
    os._exit(0)


def start(seed):
    process = os.fork()
    if not process:
        try:
            child(seed)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(4)
    return process


running = {start(seed) for seed in range(PROCESSES)}
killed = ended = 0
while running:
    if killed < KILLS and os.read(heard, 1):
        victim = drawn.choice(sorted(running))
        os.kill(victim, signal.SIGKILL)
        killed += 1
    process, status = os.waitpid(-1, 0 if killed == KILLS else os.WNOHANG)
    if not process:
        continue
    running.discard(process)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        running.add(start(1000 + len(running) + killed))
    elif code:
        sys.exit(f"a process ended with {code}")
    else:
        ended += 1
assert reserve_space(CacheFolder("copies").path, None, 0, MOST)  # removes what killed processes left
assert used_bytes(CacheFolder("copies").path) <= MOST
copies = CacheFolder("copies")
entries = [copies.entry(name) for name in names]
faults = {entry.facts().sha256 == want[name] == hashlib.sha256(entry.path.read_bytes()).hexdigest()
          for name, entry in zip(names, entries) if entry.path.exists()}
# A killed process may leave half of the facts, which stay for an hour.
left = {path.suffix for path in copies.path.iterdir() if "." not in path.stem}
print(ended, killed, faults, sorted(left & {".part", ".lock"}))
"""


def test_many_processes_share_a_cache_while_others_are_killed() -> None:
    done = subprocess.run([sys.executable, "-c", MANY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d\d 30 \{True\} \[('\.lock')?\]\n", done.stdout), done.stdout


# Disks

DISK = """
import ctypes, os, sys
from wds_datapipes.shard_cache.store import DownloadRequest
from wds_datapipes.shard_cache.store import CacheFolder
from wds_datapipes.errors import CacheError

libc = ctypes.CDLL(None, use_errno=True)
place, shard = sys.argv[1:]
if libc.unshare(0x20000) and libc.unshare(0x10020000):
    sys.exit("may not mount")
libc.mount(b"none", b"/", None, (1 << 18) | (1 << 14), None)
if libc.mount(b"tmpfs", place.encode(), b"tmpfs", 0, b"size=1m"):
    sys.exit("may not mount")
content = open(shard, "rb").read()

def use(url):
    with CacheFolder(place).open(DownloadRequest(url, None, None, {})) as copy:
        return copy.read() == content

def result(url):
    try:
        return use(url)
    except CacheError as error:
        return str(error).replace(place, "PLACE")

print(use(shard))
with open(f"{place}/filler", "wb", buffering=0) as filler:
    try:
        while filler.write(bytes(4096)):
            pass
    except OSError:
        pass
print(result(shard))
kept = CacheFolder(place).open(DownloadRequest(shard, None, None, {}))  # not evicted
print(result(f"pipe:cat {shard} {shard}"))
libc.mount(b"none", place.encode(), None, 32 | 1, None)
try:
    open(f"{place}/x", "w")
except OSError as error:
    print(error.strerror)
print(result(shard))
print(result(f"pipe:cat {shard}"))
"""


def test_a_full_or_read_only_disk_still_provides_its_copies(tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    shard = build_shard(tmp_path / "a.tar", SAMPLES)
    done = subprocess.run(
        [sys.executable, "-c", DISK, str(tmp_path / "copies"), shard], capture_output=True, text=True, check=False
    )
    if done.stderr == "may not mount\n":
        pytest.skip("the kernel lets nobody but root mount a file system, and so no disk can be made full")
    assert done.returncode == 0, done.stderr
    whole, still, full, only_read, again, missing = done.stdout.splitlines()
    assert (whole, still, again) == ("True",) * 3
    assert re.match(
        r"The copy PLACE/\w+\.part cannot be written: No space left on device\. All copies not in use", full
    )
    assert only_read == "Read-only file system"
    assert re.match("The cache PLACE cannot be used: Read-only file system", missing)
