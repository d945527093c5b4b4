"""Slow stores: one that sends next to nothing is abandoned and retried."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # it carries no types
import pytest
from fsspec.registry import _registry  # type: ignore[import-untyped]  # the same
from web_server import QuietHandler, web_server

from wds_datapipes import ShardList
from wds_datapipes.counters import Counters
from wds_datapipes.errors import ChangedShardError, ShardReadError
from wds_datapipes.io.call_threads import TooSlowError
from wds_datapipes.io.openers import open_url
from wds_datapipes.io.remote.filesystem import RemotePath
from wds_datapipes.io.remote.fsspec_file import BLOCK_BYTES, BLOCK_TIMEOUTS, UNGUARDED
from wds_datapipes.io.remote.resuming_stream import MonitoredFile
from wds_datapipes.io.remote.retry import RetryPolicy, is_transient
from wds_datapipes.testing import build_shard


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RetryPolicy.__init__, "__defaults__", (lambda _: None,))


class Drips(QuietHandler):
    """Sends some bytes of a file, and then one byte per interval."""

    protocol_version = "HTTP/1.1"
    body = b""
    #: How many of the next answers drip, and after how many bytes.
    dripping, good = 0, 0
    begins: list[int] = []  # noqa: RUF012  of the server, which is one in a test
    stop = threading.Event()

    def do_GET(self) -> None:
        kind = type(self)
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        kind.begins.append(begin)
        body = kind.body[begin:]
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(kind.body) - 1}/{len(kind.body)}")
        self.send_header("ETag", '"one"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            if kind.dripping:
                kind.dripping -= 1
                self.wfile.write(body[: kind.good])
                body = body[kind.good :]
                while body and not kind.stop.wait(0.02):
                    self.wfile.write(body[:1])
                    body = body[1:]
            self.wfile.write(body)


@pytest.fixture
def drips(tmp_path: Path) -> Iterator[str]:
    build_shard(tmp_path / "a.tar", [{"__key__": str(n), "bin": bytes([n]) * 30_000} for n in range(3)])
    Drips.body, Drips.begins, Drips.dripping = (tmp_path / "a.tar").read_bytes(), [], 0
    Drips.stop.clear()
    with web_server(Drips) as url:
        yield f"{url}/a.tar"
        Drips.stop.set()


def test_a_dripping_answer_is_abandoned_and_resumed_by_another_connection(drips: str) -> None:
    # Each byte arrives well within the time-out of a read.
    Drips.dripping, Drips.good = 2, 20_000
    samples = list(ShardList([drips]).load_wds_shards(timeout_s=2, read_ahead=0).group_samples())
    assert [(sample["__key__"], sample["bin"][:1]) for sample in samples] == [(str(n), bytes([n])) for n in range(3)]
    assert len(Drips.begins) == 3
    assert 20_000 <= Drips.begins[1] < 21_000
    assert 40_000 <= Drips.begins[2] < 42_000


@pytest.mark.parametrize("read_ahead", [0, 1 << 20])
def test_a_server_that_only_drips_ends_in_an_error(drips: str, read_ahead: int) -> None:
    Drips.dripping, Drips.good = 99, 1000
    with pytest.raises(
        ShardReadError, match=r"a\.tar failed after \d+ bytes: TooSlowError: received only \d+ bytes in .* \(3 attempts"
    ):
        list(ShardList([drips]).load_wds_shards(timeout_s=2, retries=2, read_ahead=read_ahead))
    assert len(Drips.begins) == 3


class Steady:
    """Delivers a number of bytes in a number of seconds of the clock, for each read."""

    def __init__(self) -> None:
        self.now, self.pace = 1000.0, (0, 0.0)

    def readinto(self, _: object) -> int:
        self.now += self.pace[1]
        return self.pace[0]

    def close(self) -> None:
        pass


def test_time_without_a_reader_does_not_count() -> None:
    remote, file = RemotePath("memory://x", timeout_s=60), Steady()
    remote.retry.clock = lambda: file.now
    steady = MonitoredFile(file, remote)
    for count, bytes_s in ((100_000, (1 << 20, 0.0005)), (20, (10 << 10, 10.0)), (1, (0, 100.0)), (5, (1, 10.0))):
        file.pace = bytes_s  # 1 KB/s is slow, but not next to nothing; the end may take its time
        for _ in range(count):
            steady.readinto(b"")
            file.now += 1000
    with pytest.raises(TooSlowError):
        steady.readinto(b"")
    assert is_transient(TooSlowError())


def test_bytes_from_stores_are_counted(drips: str) -> None:
    counters = Counters()

    def count() -> None:
        for _ in range(2000):
            counters.count_fetched(3, 0.5)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.fetched() == (24_000, 4000.0)
    counters = Counters()
    with open_url(drips, counters=counters) as stream:
        assert stream.read() == Drips.body
    assert counters.fetched()[0] == len(Drips.body)


def test_a_report_states_which_worker_waited_for_stores(drips: str) -> None:
    from torchdata.dataloader2 import DataLoader2

    from wds_datapipes import ShardReadingService

    Drips.dripping, Drips.good = 1, 50_000
    pipe = ShardList([drips, f"{drips}?b"]).sharding_filter().load_wds_shards(timeout_s=1).group_samples()
    with DataLoader2(pipe, reading_service=ShardReadingService(num_workers=2)) as loader:
        assert len(list(loader)) == 6
        report = loader.reading_service.report()
    size = len(Drips.body)
    assert len(report.workers) == 2
    assert all(size <= worker.fetched_bytes <= size + 2000 for worker in report.workers)
    assert max(worker.fetching_s for worker in report.workers) >= 1
    assert " came from stores, in " in str(report)


# Stores read by blocks ----------------------------------------------------------------------------------------------


class Blocks(fsspec.AbstractFileSystem):  # type: ignore[misc]  # it carries no types
    """A library without time-outs, which requests files only by name."""

    protocol = "blocks"
    body = bytes(range(256)) * (3 * BLOCK_BYTES // 256)
    version = 1
    #: Called with the number of each block that is read.
    on_block: Callable[[int], object]
    closed = 0

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": len(self.body), "type": "file", "etag": str(type(self).version)}

    def open(self, path: str, *_: Any, **__: Any) -> Any:
        return BlocksFile(self.info(path))


class BlocksFile:
    def __init__(self, details: dict[str, Any]) -> None:
        self.details, self._at = details, 0

    def seek(self, at: int) -> None:
        self._at = at

    def read(self, size: int) -> bytes:
        Blocks.on_block(self._at // BLOCK_BYTES)
        data = Blocks.body[self._at : self._at + size]
        self._at += len(data)
        return data

    def close(self) -> None:
        Blocks.closed += 1


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Blocks]]:
    fsspec.register_implementation("blocks", Blocks, clobber=True)
    Blocks.version, Blocks.closed, Blocks.on_block = 1, 0, lambda _: None
    yield Blocks
    del _registry["blocks"]


def test_a_stalled_library_without_time_outs_is_abandoned(blocks: type[Blocks]) -> None:
    hangs, asked = threading.Event(), []

    def hang_once(block: int) -> None:
        asked.append(block)
        if asked == [0, 1]:
            hangs.wait(600)

    blocks.on_block = hang_once
    with open_url("blocks://a", timeout_s=0.3) as stream:
        assert b"".join(iter(lambda: stream.read(1 << 20), b"")) == blocks.body
    assert asked == [0, 1, 1, 2, 3]
    assert blocks.closed == 1
    hangs.set()  # the abandoned thread closes its files
    for _ in range(60_000):
        if blocks.closed == 2:
            break
        time.sleep(0.005)
    assert blocks.closed == 2


def test_a_library_that_never_responds_is_an_error(blocks: type[Blocks]) -> None:
    hangs = threading.Event()
    blocks.on_block = lambda _: hangs.wait(60)
    seconds = rf"{0.02 * BLOCK_TIMEOUTS:g} s"
    with (
        pytest.raises(
            ShardReadError, match=rf"blocks://a failed after 0 bytes: TooSlowError: .* within {seconds}.* \(3 attempts"
        ),
        open_url("blocks://a", timeout_s=0.02, retries=2) as stream,
    ):
        stream.read(1)
    hangs.set()


def test_all_blocks_are_of_one_version(blocks: type[Blocks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wds_datapipes.io.remote.fsspec_file.UNGUARDED", UNGUARDED | {"blocks"})

    def replace(block: int) -> None:
        blocks.version = 1 if block < 2 else 2

    blocks.on_block = replace
    with open_url("blocks://a") as stream:
        received = [stream.read(1 << 20) for _ in range(2 * BLOCK_BYTES >> 20)]
        assert b"".join(received) == blocks.body[: 2 * BLOCK_BYTES]
        with pytest.raises(ChangedShardError, match="blocks://a was replaced while it was read"):
            stream.read(1)
    assert {"gs", "az", "abfs", "hf"} <= UNGUARDED
