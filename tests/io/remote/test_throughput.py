"""Slow stores: reads that almost stall are abandoned and retried, and each library is given its timeouts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import fsspec  # type: ignore[import-untyped]  # it carries no types
import pytest
from faults import Fault, FaultProxy
from fsspec.registry import _registry  # type: ignore[import-untyped]  # the same
from nginx_server import Nginx

from wds_datapipes import ShardList
from wds_datapipes.counters import Counters
from wds_datapipes.errors import ChangedShardError, ShardReadError
from wds_datapipes.io.daemon_threads import TooSlowError
from wds_datapipes.io.file_systems import FILE_SYSTEMS, FileSystem, file_system_of
from wds_datapipes.io.openers import open_parts, open_url
from wds_datapipes.io.remote.filesystem import RemotePath
from wds_datapipes.io.remote.fsspec_file import BLOCK_BYTES
from wds_datapipes.io.remote.retry import is_transient
from wds_datapipes.io.remote.source import MonitoredFile
from wds_datapipes.io.timeouts import BLOCK_RESPONSES, RESPONSE_S, Timeouts
from wds_datapipes.io.urls import store_of
from wds_datapipes.testing import build_shard

SAMPLES: list[dict[str, Any]] = [{"__key__": str(n), "bin": bytes([n]) * 30_000} for n in range(3)]


pytestmark = pytest.mark.usefixtures("pauses")


@pytest.fixture(autouse=True)
def shard(nginx: Nginx) -> None:
    build_shard(nginx.files / "slow.tar", SAMPLES)


@pytest.fixture
def url(proxy: FaultProxy) -> str:
    return f"http://127.0.0.1:{proxy.port}/slow.tar"


def begins(proxy: FaultProxy) -> list[int]:
    """The first bytes of the requested ranges."""
    return [int((part or "bytes=0-").removeprefix("bytes=").partition("-")[0]) for _, part in proxy.asked]


@pytest.mark.parametrize("limits", [1, Timeouts(response_s=60, stalled_s=1)])
def test_a_dripping_response_is_resumed_over_another_connection(
    proxy: FaultProxy, url: str, limits: float | Timeouts
) -> None:
    # Each byte arrives well within the timeout of a read.
    proxy.faults[:] = [Fault(at=20_000, how="drip")] * 2
    samples = list(ShardList([url]).load_wds_shards(timeout_s=limits, read_ahead=0).group_samples())
    assert [(sample["__key__"], sample["bin"]) for sample in samples] == [(s["__key__"], s["bin"]) for s in SAMPLES]
    (_, first, second) = begins(proxy)
    assert 20_000 <= first < 21_000
    assert 40_000 <= second < 42_000


@pytest.mark.parametrize("read_ahead", [0, 1 << 20])
def test_a_server_that_only_drips_ends_in_an_error(proxy: FaultProxy, url: str, read_ahead: int) -> None:
    proxy.faults[:] = [Fault(at=1000, how="drip")] * 9
    with pytest.raises(
        ShardReadError, match=r"w\.tar failed after \d+ bytes: TooSlowError: received only \d+ bytes in .* \(2 attempts"
    ):
        list(ShardList([url]).load_wds_shards(timeout_s=1, retries=1, read_ahead=read_ahead))
    assert len(proxy.asked) == 2


class Steady:
    """Delivers a number of bytes in a number of seconds of the clock, for each read."""

    def __init__(self) -> None:
        self.now, self.pace = 1000.0, (0, 0.0)

    def readinto(self, _: object) -> int:
        self.now += self.pace[1]
        return self.pace[0]

    def close(self) -> None:
        pass

    abort = close


def test_time_without_a_reader_does_not_count() -> None:
    remote, file = RemotePath("memory://x", timeout_s=60), Steady()
    remote.retry.clock = lambda: file.now
    steady = MonitoredFile(file, remote)
    for count, bytes_s in ((100_000, (1 << 20, 0.0005)), (20, (10 << 10, 10.0)), (1, (0, 100.0)), (5, (1, 10.0))):
        file.pace = bytes_s  # 1 KB/s is slow, but not a stall; the end may take longer
        for _ in range(count):
            steady.readinto(memoryview(b""))
            file.now += 1000
    with pytest.raises(TooSlowError):
        steady.readinto(memoryview(b""))
    assert is_transient(TooSlowError())


def test_a_report_states_which_worker_waited_for_stores(proxy: FaultProxy, url: str) -> None:
    from torchdata.dataloader2 import DataLoader2

    from wds_datapipes import ShardReadingService

    proxy.faults[:] = [Fault(at=50_000, how="drip")]
    pipe = ShardList([url, f"{url}?b"]).sharding_filter().load_wds_shards(timeout_s=1).group_samples()
    with DataLoader2(pipe, reading_service=ShardReadingService(num_workers=2)) as loader:
        assert len(list(loader)) == 6
        report = loader.reading_service.report()
    with open_url(url, counters=(counters := Counters())) as stream:
        size = len(stream.read())
    assert counters.figures()[f"fetched_bytes/{store_of(url)}"] == size
    assert len(report.workers) == 2
    assert all(size <= worker.fetched_bytes <= size + 2000 for worker in report.workers)
    assert max(worker.fetching_s for worker in report.workers) >= 1
    # The timeout counts as a retry, not as time that a report attributes to stores.
    assert report.total.figures[f"retries/{store_of(url)}"] == report.total.retries >= 1
    assert report.as_dict()[f"fetched_bytes_per_s/{store_of(url)}"] > 0
    assert " came from stores, in " in str(report)


# Stores read by blocks ----------------------------------------------------------------------------------------------


class Blocks(fsspec.AbstractFileSystem):  # type: ignore[misc]  # it carries no types
    """A library without timeouts, which requests files only by name."""

    protocol = "blocks"
    body: bytes
    version = 1
    #: Called with the number of each block read.
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
    Blocks.body = bytes(range(256)) * (3 * BLOCK_BYTES // 256)
    Blocks.version, Blocks.closed, Blocks.on_block = 1, 0, lambda _: None
    yield Blocks
    del _registry["blocks"]


def test_a_stalled_library_without_timeouts_is_abandoned(blocks: type[Blocks]) -> None:
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
    seconds = rf"{0.02 * BLOCK_RESPONSES:g} s"
    with (
        pytest.raises(
            ShardReadError, match=rf"blocks://a failed after 0 bytes: TooSlowError: .* within {seconds}.* \(3 attempts"
        ),
        open_url("blocks://a", timeout_s=0.02, retries=2) as stream,
    ):
        stream.read(1)
    hangs.set()


def test_all_blocks_are_of_one_version(blocks: type[Blocks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILE_SYSTEMS, "blocks", FileSystem(may_mix_versions=True))

    def replace(block: int) -> None:
        blocks.version = 1 if block < 2 else 2

    blocks.on_block = replace
    with open_url("blocks://a") as stream:
        received = [stream.read(1 << 20) for _ in range(2 * BLOCK_BYTES >> 20)]
        assert b"".join(received) == blocks.body[: 2 * BLOCK_BYTES]
        with pytest.raises(ChangedShardError, match="blocks://a was replaced while it was read"):
            stream.read(1)
    assert all(file_system_of(scheme).may_mix_versions for scheme in ("gs", "az", "abfs", "hf"))


@pytest.mark.parametrize(("name", "is_noticed"), [("a", True), (f"name@{'0' * 40}/a", False)])
def test_all_parts_are_of_one_version(
    blocks: type[Blocks], monkeypatch: pytest.MonkeyPatch, name: str, is_noticed: bool
) -> None:
    """The library does not notice that a file was replaced; those of a commit of a hub cannot be."""
    monkeypatch.setitem(FILE_SYSTEMS, "blocks", FileSystem(may_mix_versions=True))
    file = open_parts(f"blocks://{name}")
    assert file is not None
    assert file.part(1000, 2000).read() == blocks.body[1000:2000]
    blocks.version = 2
    with file.part(2000, 3000) as part, pytest.raises(ChangedShardError) if is_noticed else nullcontext():
        assert part.read() == blocks.body[2000:3000]


# The options of libraries ------------------------------------------------------------------------------------------


def of_ssh(seconds: float) -> dict[str, float]:
    return {**dict.fromkeys(["timeout", "auth_timeout", "channel_timeout"], seconds), "banner_timeout": 1}


def seconds_of(filesystem: Any) -> tuple[float, float]:
    filesystem.connect()
    config = filesystem.s3.meta.config
    return config.connect_timeout, config.read_timeout


def test_the_client_of_s3_has_the_timeouts(s3_store: Any) -> None:
    options = {**s3_store.options(), "skip_instance_cache": True}
    own = {**options, "config_kwargs": {"read_timeout": 3, "max_pool_connections": 5}}
    for given, timeout_s, expected in [(options, 7.5, (7.5, 7.5)), (own, 7.5, (7.5, 3)), (options, None, (5, 15))]:
        assert seconds_of(RemotePath("s3://bucket/a.tar", given, timeout_s).filesystem) == expected
    assert own["config_kwargs"] == {"read_timeout": 3, "max_pool_connections": 5}


@pytest.mark.parametrize(
    ("scheme", "own", "expected", "by_default"),
    [
        ("az", {}, {"connection_timeout": 7, "read_timeout": 7}, {}),
        ("az", {"connection_timeout": 3, "read_timeout": 3}, {"connection_timeout": 3, "read_timeout": 3}, None),
        ("abfs", {}, {"connection_timeout": 7, "read_timeout": 7}, {}),
        ("ftp", {}, {"timeout": 7}, {}),
        ("ftp", {"timeout": 3}, {"timeout": 3}, None),
        ("https", {}, {}, None),  # for each request
        ("memory", {}, {}, None),
        # Without them, these libraries would wait forever.
        ("ssh", {"banner_timeout": 1}, of_ssh(7), of_ssh(RESPONSE_S)),
        ("sftp", {"banner_timeout": 1}, of_ssh(7), of_ssh(RESPONSE_S)),
        ("gs", {"requests_timeout": 5}, {"requests_timeout": 5}, None),
        ("gs", {"session_kwargs": {"timeout": 5}}, {"session_kwargs": {"timeout": 5}}, None),
    ],
)
def test_each_library_gets_its_timeouts_unless_the_user_has_set_them(
    scheme: str, own: dict[str, Any], expected: dict[str, Any], by_default: dict[str, Any] | None
) -> None:
    set_timeouts = file_system_of(scheme).set_timeouts
    assert set_timeouts(own, Timeouts(response_s=7)) == expected
    assert set_timeouts(own, Timeouts()) == (own if by_default is None else by_default)


def test_the_client_of_gs_gets_the_timeouts_of_aiohttp() -> None:
    from aiohttp import ClientTimeout

    for timeout_s, seconds in ((7, 7), (None, RESPONSE_S)):
        limits = ClientTimeout(total=300, sock_connect=seconds, sock_read=seconds)
        assert file_system_of("gs").set_timeouts({}, Timeouts.of(timeout_s)) == {"requests_timeout": limits}
