"""Shards on an SFTP server: resumed epochs, and connections that break anywhere."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from readers import keys_of
from sftp_server import PASSWORD, USER, SftpServer
from wires import Cut, Wire, wire

from wds_datapipes import ShardList
from wds_datapipes.errors import ChangedShardError, ShardError, ShardOpenError, ShardReadError
from wds_datapipes.io.openers import open_url
from wds_datapipes.io.remote import fsspec_file
from wds_datapipes.pipes.state.pipeline_state import load_state, save_state
from wds_datapipes.shards.position import unpack_positions
from wds_datapipes.testing import build_shard

SAMPLES: list[dict[str, Any]] = [
    {"__key__": f"{number}", "bin": random.Random(number).randbytes(9_000 * number + 100), "cls": f"{number}"}
    for number in range(9)
]
WANT = [(sample["__key__"], sample["bin"]) for sample in SAMPLES]
pytestmark = pytest.mark.usefixtures("pauses")
URL = "sftp://127.0.0.1/a.tar"
#: More than a busy machine needs for a handshake.
TIMEOUT_S = 3.0


@pytest.fixture(autouse=True)
def no_connection_left(sftp_server: SftpServer) -> Iterator[None]:
    """Connections end with their files."""
    threads = {*threading.enumerate()}
    yield
    gc.collect()
    # paramiko does not stop its timers if a handshake fails; each ends by itself after some seconds.
    mine = {sftp_server.reader, *(thread for thread in threading.enumerate() if isinstance(thread, threading.Timer))}
    left = {*threading.enumerate()} - threads - mine
    for thread in left:
        thread.join(60)
    assert [thread for thread in left if thread.is_alive()] == []


@pytest.fixture
def server(sftp_server: SftpServer, monkeypatch: pytest.MonkeyPatch) -> SftpServer:
    """Serve a.tar correctly; it is read in several blocks."""
    monkeypatch.setattr(fsspec_file, "BLOCK_BYTES", 64 << 10)
    if not sftp_server.is_running:
        sftp_server.start()
    build_shard(sftp_server.files / "a.tar", SAMPLES)
    return sftp_server


@pytest.fixture
def line(server: SftpServer) -> Iterator[Wire]:
    with wire(server.port) as made:
        yield made


def read(options: dict[str, Any], **others: Any) -> list[tuple[str, bytes]]:
    samples = ShardList(URL).load_wds_shards(storage_options=options, **others).group_samples()
    return [(sample["__key__"], sample["bin"]) for sample in samples]


def pipeline(options: dict[str, Any], **others: Any) -> Any:
    pipe = ShardList(URL).load_wds_shards(storage_options=options, **others).group_samples().shuffle_samples(3)
    pipe.set_seed(5)
    return pipe


def state_at(pipe: Any, cut: int) -> Any:
    items = iter(pipe)
    for _ in range(cut):
        next(items)
    state = json.loads(json.dumps(save_state(pipe)))
    items.close()
    return state


def test_a_shard_is_read_whole_and_listed(server: SftpServer) -> None:
    assert read(server.options()) == WANT
    url = f"sftp://{USER}:{PASSWORD}@127.0.0.1:{server.port}/a.tar"
    found = ShardList(url).load_wds_shards(storage_options={"known_hosts": server.known_hosts(server.port)})
    assert keys_of(found.group_samples()) == [key for key, _ in WANT]
    listed = ShardList("sftp://127.0.0.1/*.tar", storage_options=server.options())
    assert [url.rpartition("/")[2] for url in listed] == ["a.tar"]


def test_the_rest_of_an_epoch_is_read_by_seeking(server: SftpServer, line: Wire) -> None:
    cut, options = 4, server.options(line.port)
    whole = keys_of(pipeline(options))
    state = state_at(pipeline(options), cut)
    load_state(resumed := pipeline(options), state)
    before = len(line.sent)  # on the connections: bytes still in flight do not count
    assert keys_of(resumed) == whole[cut:]
    size = (server.files / "a.tar").stat().st_size
    waiting = sum((size if end < 0 else end) - start for _, start, end, _ in unpack_positions(state[1]["waiting"]))
    # The connection itself takes a few thousand bytes, and paramiko reads up to 32 KiB more of each range.
    assert sum(line.sent[before:]) < waiting + size - int(state[0]["next"][1]) + 100_000


def test_a_resumed_epoch_continues_where_the_connection_breaks(server: SftpServer, line: Wire) -> None:
    options = server.options(line.port)
    whole = keys_of(pipeline(options))
    state = state_at(pipeline(options), 2)
    for at, how in ((1_000, "reset"), (90_000, "close")):
        line.cuts[:] = [Cut(at, how)]
        load_state(resumed := pipeline(options), state)
        assert keys_of(resumed) == whole[2:]
        assert not line.cuts


#: Where a connection breaks, among all its bytes: in the handshake, in the answers to opening, in the body.
PLACES = [0, 20, 500, 1_800, 2_200, 2_600, 3_000, 10_000, 250_000]


def test_a_broken_connection_changes_no_sample(server: SftpServer, line: Wire) -> None:
    assert read(server.options(line.port)) == WANT
    (whole,) = line.sent
    places = [*PLACES, whole - 200, whole - 1]
    for at, how in zip(places, itertools.cycle(["reset", "close"]), strict=False):
        line.cuts[:] = [Cut(at, how)]
        assert read(server.options(line.port)) == WANT
        assert not line.cuts


@pytest.mark.parametrize("at", [20, 250_000])
def test_a_stalled_request_is_abandoned_and_retried(server: SftpServer, line: Wire, at: int) -> None:
    line.cuts[:] = [Cut(at, "stall")]
    assert read(server.options(line.port), timeout_s=TIMEOUT_S) == WANT
    assert len(line.sent) > 1


def test_breaking_repeatedly_is_an_error_with_the_offset(server: SftpServer, line: Wire) -> None:
    line.cuts[:] = [Cut(100_000, "stall")] + [Cut(20, "close")] * 9
    with pytest.raises(
        ShardReadError, match=r"Reading sftp://127\.0\.0\.1/a\.tar failed after \d{5} bytes: .*\(4 attempts\)"
    ):
        read(server.options(line.port), retries=3, timeout_s=TIMEOUT_S)
    line.cuts[:] = [Cut(20, "close")] * 9
    with pytest.raises(ShardOpenError, match=r"sftp://127\.0\.0\.1/a\.tar cannot be opened: .*\(4 attempts\)"):
        read(server.options(line.port), retries=3)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_shard_replaced_while_reading_is_not_spliced(server: SftpServer, line: Wire, on_error: str) -> None:
    options = server.options(line.port)
    state = state_at(pipeline(options), 2)
    line.cuts[:] = [Cut(100_000, "held")]
    members = iter(ShardList(URL).load_wds_shards(storage_options=options, on_error=on_error))
    assert next(members)[1] == "0.bin"
    other = server.files / "other"
    build_shard(other, SAMPLES[::-1])
    os.utime(other, (1, 1))
    other.replace(server.files / "a.tar")
    line.released.set()
    with pytest.raises(ChangedShardError, match=r"a\.tar was replaced while it was read: after \d+ bytes"):
        list(members)
    load_state(resumed := pipeline(options, on_error=on_error), state)
    with pytest.raises(ChangedShardError, match=r"a\.tar"):
        list(resumed)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_wrong_password_ends_the_run_under_any_policy(server: SftpServer, pauses: list[float], on_error: str) -> None:
    with pytest.raises(ShardOpenError, match=r"a\.tar cannot be opened: permission denied") as found:
        read(server.options(password="wrong-and-secret"), on_error=on_error)
    assert found.value.concerns_all
    assert "secret" not in f"{found.value!r} {found.value.args} {vars(found.value)}"
    assert pauses == []
    with pytest.raises(ShardOpenError, match="there is no such file"):
        list(ShardList("sftp://127.0.0.1/b.tar").load_wds_shards(storage_options=server.options()))
    server.stop()  # it keeps the refused connection for a while


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize(("known", "why"), [("", "not found in known_hosts"), ("another key", "does not match")])
def test_a_server_with_an_unknown_or_changed_key_is_refused(
    server: SftpServer, tmp_path: Path, pauses: list[float], known: str, why: str, on_error: str
) -> None:
    import paramiko  # type: ignore[import-untyped]  # it carries no types

    file = tmp_path / "known_hosts"
    key = paramiko.ECDSAKey.generate()
    file.write_text(f"[127.0.0.1]:{server.port} {key.get_name()} {key.get_base64()}\n" if known else "")
    with pytest.raises(ShardOpenError, match=f"the key of the server is not trusted .*{why}.*known_hosts") as found:
        read(server.options(known_hosts=str(file)), on_error=on_error)
    assert found.value.concerns_all
    assert pauses == []


def test_keys_come_from_the_user_unless_any_key_is_accepted(
    server: SftpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    options = server.options()
    known = Path(options.pop("known_hosts"))
    with pytest.raises(ShardOpenError, match="the key of the server is not trusted"):
        list(ShardList("sftp://127.0.0.1/*.tar", storage_options=options))
    assert read({**options, "known_hosts": None}) == WANT
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "known_hosts").write_text(known.read_text())
    assert read(options) == WANT


def test_two_threads_read_two_shards_at_the_same_time(server: SftpServer) -> None:
    """paramiko's channels mix up answers if two threads wait for one."""
    streams = [open_url(URL, storage_options=server.options()) for _ in range(2)]
    found: list[bytes] = []

    def drain(stream: Any) -> None:
        found.append(b"".join(iter(lambda: stream.read(4096), b"")))

    with contextlib.ExitStack() as opened:
        threads = [threading.Thread(target=drain, args=[opened.enter_context(stream)]) for stream in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert found == [(server.files / "a.tar").read_bytes()] * 2


def test_broken_streams_leave_nothing(server: SftpServer, line: Wire) -> None:
    assert read(server.options(line.port)) == WANT
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        line.cuts[:] = [Cut(100_000, "reset"), *[Cut(20, "close")] * 3]
        with contextlib.suppress(ShardError):
            read(server.options(line.port), retries=2)
    gc.collect()
    for _ in range(6000):  # the other end of the connection may take a moment
        if len(os.listdir("/proc/self/fd")) <= before:
            return
        threading.Event().wait(0.01)
    raise AssertionError("there are more open files than before")
