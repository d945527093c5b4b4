"""Parts in flight: their memory and connections are limited, and they end with the loop, Ctrl-C or the process."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from faults import FaultProxy, fault_proxy
from fsspec.asyn import get_loop  # type: ignore[import-untyped]  # it carries no types
from nginx_server import Nginx
from shard_in_parts import PART, SHARD, address, log_of_calls, members_of, small_parts, threads, until

from wds_datapipes import ShardReadingService
from wds_datapipes.errors import ShardReadError, WorkerDiedError
from wds_datapipes.io import prefetch
from wds_datapipes.io.part_share import CommonParts, PartShare
from wds_datapipes.io.remote.part_fetch import PartFetch
from wds_datapipes.io.remote.remote_parts import RemoteParts
from wds_datapipes.io.remote.resuming_stream import ResumingStream
from wds_datapipes.testing import build_shard

from torchdata.dataloader2 import DataLoader2  # isort: skip  # its banner is silenced by the imports above

pytestmark = pytest.mark.usefixtures("nothing_left")

COUNT = 1000
#: The samples of a large shard have this size with their header.
SAMPLE = 1 << 10


@pytest.fixture(scope="module")
def server(nginx: Nginx) -> Iterator[FaultProxy]:
    folder = nginx.files / "parts"
    folder.mkdir(exist_ok=True)
    (folder / "a.tar").write_bytes(SHARD)
    build_shard(folder / "large.tar", [{"__key__": f"{n:03}", "bin": bytes([n % 256]) * 512} for n in range(COUNT)])
    get_loop()  # of fsspec: keeps descriptors while the process runs
    with fault_proxy(("127.0.0.1", nginx.http)) as made:
        yield made


@pytest.fixture
def proxy(server: FaultProxy, nothing_left: None) -> Iterator[FaultProxy]:
    """Return the server without requests and connections, and let it be read in parts."""
    server.asked.clear()
    server.accepted = 0
    with small_parts():
        yield server
    for thread in threads():
        thread.join()


def large(proxy: FaultProxy, count: int = 1, **options: Any) -> Any:
    url, _ = address(proxy, name="large.tar")
    return members_of([url] * count, **options)


class Held:
    """The number of bytes that are received and not taken yet, and its maximum."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.now += count
            self.most = max(self.most, self.now)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Count the bytes that are received and not taken yet."""
    readinto, take, found = ResumingStream.readinto, RemoteParts.take, Held()

    def received(stream: ResumingStream, buffer: bytearray) -> int:
        count = readinto(stream, buffer)
        found.add(count)
        return count

    def taken(parts: RemoteParts, size: int) -> bytes:
        data = take(parts, size)
        found.add(-len(data))
        return data

    monkeypatch.setattr(ResumingStream, "readinto", received)
    monkeypatch.setattr(RemoteParts, "take", taken)
    return found


@pytest.mark.parametrize("open_shards", [1, 3])
def test_many_parts_share_the_limit(
    proxy: FaultProxy, held: Held, monkeypatch: pytest.MonkeyPatch, open_shards: int
) -> None:
    monkeypatch.setattr(prefetch, "FIRST_PARTS", 64)
    limit = 64 * PART
    samples = iter(large(proxy, 4, read_ahead=limit, open_shards=open_shards).group_samples())
    for _ in range(100):
        next(samples)
    until(lambda: held.now > limit / 4)
    assert sum(1 for _ in samples) == 4 * COUNT - 100
    # A part may arrive before the bytes that were just taken are counted.
    assert limit / 4 < held.most <= limit + PART


def test_downloads_of_copies_share_a_limit(proxy: FaultProxy, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "FIRST_PARTS", 64)
    url, size, common = address(proxy, name="large.tar")[0], COUNT * SAMPLE, CommonParts(40)
    shares = [PartShare(common) for _ in range(5)]
    with ExitStack() as stack:
        streams = [stack.enter_context(prefetch.open_ahead(url, 32 * PART, share)) for share in shares]
        found = [bytearray(stream.read(1)) for stream in streams]
        until(lambda: not threads())  # each thread ends with its part
        assert -(-held.most // PART) == 40 + 5  # a byte of each was taken
        for data, stream in zip(found, streams, strict=True):
            data += stream.read()
            assert len(data) >= size
            assert data == found[0]
    # Without the others, one has all that it may hold.
    held.now = held.most = 0
    with prefetch.open_ahead(url, 32 * PART, shares[0]) as stream:
        stream.read(1)
        until(lambda: not threads())
        assert -(-held.most // PART) == 32


def test_a_reader_that_never_waits_keeps_to_the_first_connections(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_ready = RemoteParts.is_ready

    def ready(parts: RemoteParts, count: int) -> bool:
        """Return whether it is ready once all parts in flight have arrived, so that the reader is the slow one."""
        until(lambda: all(fetch.is_ready(PART) for fetch in parts.fetches))
        return is_ready(parts, count)

    monkeypatch.setattr(RemoteParts, "is_ready", ready)
    assert len(list(large(proxy))) == COUNT
    assert proxy.accepted <= prefetch.FIRST_PARTS


def test_a_reader_that_waits_opens_more_connections_up_to_the_limit(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates: dict[int, threading.Event] = {}
    original = RemoteParts._begin

    def begin(parts: RemoteParts, open_part: Any, max_bytes: int) -> None:
        gate = gates.setdefault(len(gates), threading.Event())

        def gated() -> ResumingStream:
            gate.wait(60)
            return open_part()  # type: ignore[no-any-return]

        original(parts, gated, max_bytes)
        numbers[parts.fetches[-1]] = len(numbers)

    def note_wait(parts: RemoteParts, count: int) -> None:
        awaited.add(numbers[parts.fetches[0]])
        wait(parts, count)

    wait, numbers, awaited = RemoteParts.wait, dict[Any, int](), set[int]()
    monkeypatch.setattr(RemoteParts, "_begin", begin)
    monkeypatch.setattr(RemoteParts, "wait", note_wait)

    def is_next_awaited(number: int) -> bool:
        """Whether the reader has taken all parts before this one, and waits for it, or has ended."""
        return number in awaited or not reader.is_alive()

    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.extend(large(proxy)))
    reader.start()
    counts = []
    until(lambda: bool(gates))
    for number in range(1000):
        if number not in gates:
            break
        counts.append(len(gates) - number)
        gates[number].set()
        until(partial(is_next_awaited, number + 1))
    reader.join()
    assert len(found) == COUNT
    assert max(counts) == prefetch.MAX_PARTS
    assert proxy.accepted <= prefetch.MAX_PARTS


@pytest.mark.parametrize("count", [0, 1, 5, 400])
@pytest.mark.parametrize("open_shards", [1, 3])
def test_a_loop_that_ends_early_leaves_no_thread(proxy: FaultProxy, count: int, open_shards: int) -> None:
    for end in (lambda members: members.close(), lambda members: None):
        samples = iter(large(proxy, 3, open_shards=open_shards).group_samples())
        for _ in range(count):
            next(samples)
        if hasattr(samples, "close"):
            end(samples)
        del samples
        until(lambda: not threads())


def test_each_open_shard_has_a_part_ahead(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "MAX_PARTS", prefetch.FIRST_PARTS)
    samples = iter(large(proxy, 30, read_ahead=10 << 20, open_shards=12).group_samples())
    for _ in range(12):
        next(samples)
    until(lambda: not threads())  # each ends with its part
    begins = [part for _, part in proxy.asked]
    assert begins.count(f"bytes={PART}-{2 * PART - 1}") == 12
    assert len(begins) <= 12 * 2 + 1
    samples.close()


@pytest.mark.parametrize("open_shards", [1, 3])
def test_all_threads_are_stopped_before_the_first_is_awaited(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, open_shards: int
) -> None:
    """Otherwise a store that accepts no connections would delay the end of a loop by seconds for each shard."""
    log = log_of_calls(monkeypatch, PartFetch, "stop", "join")
    urls = [address(proxy)[0]] * 9
    samples = iter(members_of(urls, read_ahead=300_000, open_shards=open_shards).group_samples())
    for _ in range(open_shards):
        next(samples)
    log.clear()
    samples.close()
    count = log.count("join")
    assert log[:count] == ["stop"] * count
    assert count > 3


@pytest.mark.parametrize("calls", [1, 2, 3, 7])
@pytest.mark.parametrize("name", ["is_ready", "wait", "take", "begin_next", "close"])
def test_ctrl_c_leaves_no_thread(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, name: str, calls: int) -> None:
    count, method = [0], getattr(RemoteParts, name)

    def interrupted(parts: RemoteParts, *arguments: Any) -> Any:
        count[0] += 1
        if count[0] == calls:
            signal.raise_signal(signal.SIGINT)
        return method(parts, *arguments)

    monkeypatch.setattr(RemoteParts, name, interrupted)
    try:
        list(large(proxy, 9))
    except KeyboardInterrupt:
        assert count[0] >= calls
    else:
        assert (name, count[0] < calls) == ("wait", True)  # a fast server lets the reader wait less often
    until(lambda: not threads())


def test_a_forked_process_cannot_read_on_but_its_parent_can(
    proxy: FaultProxy, forked: Callable[..., int | None]
) -> None:
    members = iter(large(proxy, 3))
    found = [next(members).name for _ in range(30)]

    def read_on() -> None:
        with pytest.raises(ShardReadError, match=r"/parts/large\.tar cannot be read on in a forked process"):
            for _ in members:
                pass
        del members_of_child[:]
        gc.collect()
        assert len(list(large(proxy))) == COUNT  # from its beginning

    members_of_child = [members]
    assert forked(read_on) == 0
    found += [member.name for member in members]
    assert found == [f"{n:03}.bin" for n in range(COUNT)] * 3


def test_a_killed_worker_leaves_nothing(proxy: FaultProxy) -> None:
    pipe = large(proxy, 4).group_samples()
    with DataLoader2(pipe, reading_service=ShardReadingService(num_workers=2)) as loader:
        samples = iter(loader)
        next(samples)
        os.kill(loader.reading_service.report().workers[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            for _ in samples:
                pass
    until(lambda: not threads())
