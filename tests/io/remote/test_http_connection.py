"""Connections to web servers: kept between requests, replaced when the server closes them, and never shared."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from site_server import Site

from wds_datapipes import IndexedSamples, ShardList
from wds_datapipes.errors import ShardError, ShardOpenError
from wds_datapipes.index import AccessOptions, Manifest, build_indexes
from wds_datapipes.io.openers import open_parts, open_url
from wds_datapipes.io.remote import http, http_connection, known_stores
from wds_datapipes.io.remote.http_connection import close_idle
from wds_datapipes.io.timeouts import Timeouts
from wds_datapipes.testing import build_shard

BODY = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def body(site: Site) -> None:
    """Let the server send a file of some length."""
    site.body = BODY


def read(url: str, **options: Any) -> bytes:
    with open_url(url, retries=0, **options) as stream:
        return b"".join(iter(lambda: stream.read(1000), b""))


def test_requests_one_after_the_other_share_a_connection(site: Site) -> None:
    site.answers = {"/none": (404, ""), "/moved": (302, "/a.tar")}
    parts = open_parts(site.url(), retries=0)
    assert parts is not None
    for start in range(0, 1000, 100):
        with parts.part(start, start + 100) as stream:
            assert stream.read(100) == BODY[start : start + 100]
    assert read(site.url("/b.tar")) == BODY
    assert read(site.url("/moved")) == BODY
    with pytest.raises(ShardOpenError, match="404"):
        read(site.url("/none"))
    assert read(site.url()) == BODY
    assert len(site.accepted) == 1


def test_shards_and_indexed_samples_are_read_over_few_connections(site: Site, tmp_path: Path) -> None:
    samples: list[dict[str, Any]] = [{"__key__": str(number), "bin": bytes(1000)} for number in range(50)]
    site.body = Path(build_shard(tmp_path / "a.tar", samples)).read_bytes()
    urls = [site.url(f"/{number}.tar") for number in range(10)]
    assert len(list(ShardList(urls).load_wds_shards(read_ahead=0))) == 500
    assert len(site.accepted) == 1
    manifest = Manifest(build_indexes(urls, index_dir=tmp_path))
    assert len(list(IndexedSamples(manifest, order="global", access=AccessOptions(index_dir=tmp_path)))) == 500
    assert len(site.accepted) <= http_connection.MAX_IDLE + 1


def test_many_small_shards_are_requested_at_once(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_stores, "NEAR_S", -1.0)  # otherwise the server might be near
    site.body = Path(build_shard(tmp_path / "a.tar", [{"__key__": "a", "bin": bytes(1000)}])).read_bytes()
    # Several shards are requested at once only when the size of one is known, so the first requests depend on timing.
    site.free, site.at_once = {"/0.tar", "/1.tar"}, threading.Barrier(4)
    assert len(list(ShardList([site.url(f"/{number}.tar") for number in range(6)]).load_wds_shards())) == 6


def test_a_connection_closed_in_the_meantime_is_replaced(site: Site) -> None:
    for _ in range(3):
        assert read(site.url()) == BODY
        for accepted in site.accepted:
            with contextlib.suppress(OSError):
                accepted.shutdown(socket.SHUT_RDWR)
    assert len(site.accepted) == 3


def test_a_connection_closed_at_a_request_is_replaced(site: Site) -> None:
    assert read(site.url()) == BODY
    site.hangs_up = True
    assert read(site.url()) == BODY
    assert len(site.accepted) == 2
    close_idle()
    site.hangs_up = True  # a new connection that is closed is an error
    with pytest.raises(ShardOpenError, match="RemoteDisconnected"):
        read(site.url())


def test_a_body_that_is_not_read_to_its_end_closes_its_connection(site: Site) -> None:
    site.body = bytes(8 << 20)
    for _ in range(2):
        with open_url(site.url()) as stream:
            assert len(stream.read(1000)) == 1000
    assert len(site.accepted) == 2


@pytest.mark.parametrize("size", [1, 100, 100_000])
def test_bytes_after_a_body_are_never_taken_for_the_next_response(site: Site, size: int) -> None:
    site.body = os.urandom(size)
    site.extra = b'HTTP/1.1 200 OK\r\nContent-Length: 3\r\nETag: "1"\r\n\r\nbad'
    for _ in range(3):
        assert read(site.url()) == site.body


def test_a_connection_is_not_kept_if_its_last_byte_is_unknown(site: Site) -> None:
    site.headers = {"Connection": "close"}
    for _ in range(2):
        assert read(site.url()) == BODY
    assert len(site.accepted) == 2


def test_chunks_end_with_an_empty_one(site: Site) -> None:
    site.headers = {"Transfer-Encoding": "chunked"}
    site.body, site.extra = b"4\r\nbody\r\n", b"0\r\nTrailer: 1\r\n\r\n"
    for _ in range(2):
        assert read(site.url()) == b"body"
    assert len(site.accepted) == 1
    for size in (b"-4", b"+4", b"4_0", b"", b"0x4"):
        site.body, site.extra = size + b"\r\nbody\r\n", b"0\r\n\r\n"
        with pytest.raises(ShardError, match="the size of a chunk is"):
            read(site.url())


@pytest.mark.parametrize("coding", ["gzip", "gzip, chunked", "deflate"])
def test_a_body_with_another_transfer_coding_is_an_error(site: Site, coding: str) -> None:
    """Its bytes are not those of the file."""
    site.headers = {"Transfer-Encoding": coding}
    with pytest.raises(ShardError, match=re.escape(f"the transfer coding {coding!r}")):
        read(site.url())


def test_threads_never_share_a_connection(site: Site) -> None:
    site.at_once = threading.Barrier(8)
    with ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            assert set(threads.map(read, [site.url()] * 8)) == {BODY}
    assert len(site.accepted) == 8


def test_a_forked_process_opens_its_own_connections(site: Site) -> None:
    assert read(site.url()) == BODY
    half_read = open_url(site.url("/half.tar"))
    first = half_read.read(100)
    child = os.fork()
    if not child:
        half_read.close()
        del half_read
        gc.collect()
        os._exit(read(site.url()) != BODY)
    assert os.waitpid(child, 0)[1] == 0
    assert len(site.accepted) == 2
    with half_read:  # the forked process has not closed it
        assert first + b"".join(iter(lambda: half_read.read(1000), b"")) == BODY
    assert read(site.url()) == BODY
    assert len(site.accepted) == 2


def test_a_few_connections_are_kept_for_a_limited_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(http_connection, "MAX_IDLE", 3)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    close_idle()
    site.at_once = threading.Barrier(5)
    with ThreadPoolExecutor(5) as threads:
        assert set(threads.map(read, [site.url()] * 5)) == {BODY}
    site.at_once = threading.Barrier(1)
    assert len(site.accepted) == 5
    now[0] += 15.0
    for count in (5, 5, 6):
        assert read(site.url()) == BODY
        assert len(site.accepted) == count
        now[0] += {5: 15.0, 6: 0.0}[count] + (count == 5 and now[0] > 15.0)


def test_threads_that_start_together_read_the_system_certificates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, start, create = list[None](), threading.Barrier(16), ssl.create_default_context

    def count() -> Any:
        calls.append(None)
        return create()

    def connect(_: int) -> None:
        start.wait()
        http.HttpClient("", {}, Timeouts().resolve())

    monkeypatch.setattr(ssl, "create_default_context", count)
    http._ssl_context.cache_clear()
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(connect, range(16)))
    assert len(calls) == 1
