"""Overload: after a store has refused requests, fewer are in flight, and slowly more again."""

from __future__ import annotations

import http.server
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from shard_in_parts import PART, small_parts, until
from site_server import Site
from web_server import QuietHandler, serving

from wds_datapipes import IndexedSamples, ShardList
from wds_datapipes.index import AccessOptions, build_indexes
from wds_datapipes.index.read.fetch import ShardRanges
from wds_datapipes.io import prefetch
from wds_datapipes.io.remote.http_request import HttpStatusError
from wds_datapipes.io.remote.known_stores import KnownStore, known_store
from wds_datapipes.io.remote.overload import ANSWERS, StoreLimit
from wds_datapipes.io.request_threads import RequestThreads
from wds_datapipes.io.urls import store_of
from wds_datapipes.testing import build_shard

SAMPLES, FIRST = 80, 16
pytestmark = pytest.mark.usefixtures("nothing_left")


class Busy(http.server.ThreadingHTTPServer):
    """Serves a number of requests at the same time and refuses others.

    Attributes:
        most: the number.
        may_answer: tells whether answers may be sent, except the first one of a file.
        asked: of each request, the offset, how many were in flight, and whether it was refused.
    """

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, body: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.body, self.url = body, f"http://127.0.0.1:{self.server_port}/a.tar"
        self.limit = known_store(store_of(self.url)).limit
        self.most, self.asked = 8, list[tuple[int, int, bool]]()
        self.may_answer: Callable[[], bool] = lambda: True
        self.in_flight, self.lock = 0, threading.Lock()


class _Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    server: Busy

    def do_GET(self) -> None:
        server = self.server
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        with server.lock:
            is_refused = server.in_flight >= server.most
            server.asked.append((first, server.in_flight + 1, is_refused))
            server.in_flight += not is_refused
        if not is_refused:
            until(lambda: not first or server.may_answer())
            threading.Event().wait(0.01)  # for others, if there are any
            with server.lock:  # before the client knows
                server.in_flight -= 1
        body = b"" if is_refused else server.body[first : last + 1]
        self.send_response(503 if is_refused else 206)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{len(server.body)}")
        self.send_header("ETag", '"1"')
        self.end_headers()
        self.wfile.write(body)


def test_fewer_requests_are_in_flight_after_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "FIRST_PARTS", FIRST)
    monkeypatch.setattr(prefetch, "MAX_PARTS", FIRST)
    samples: list[dict[str, Any]] = [{"__key__": f"{n:02}", "bin": bytes([n]) * 2000} for n in range(SAMPLES)]
    shard = Path(build_shard(tmp_path / "a.tar", samples))
    with small_parts(), serving(Busy(shard.read_bytes())) as server:
        allowed = [FIRST]

        def has_reacted() -> bool:
            allowed.append(server.limit.allow(FIRST))
            return 1 in allowed

        server.may_answer = has_reacted
        pipe = ShardList([server.url]).load_wds_shards(retries=1000).group_samples()
        assert [sample["bin"] for sample in pipe] == [sample["bin"] for sample in samples]
        answers = sum(not is_refused for *_, is_refused in server.asked)
        assert len(server.asked) - answers >= 4
        later = [(count, is_refused) for first, count, is_refused in server.asked if first > 2 * FIRST * PART]
        assert len(later) > 5
        assert max(later) <= (1 + answers / ANSWERS, False)


def test_a_single_file_is_read_from_a_store_that_serves_one_request_at_a_time(tmp_path: Path) -> None:
    body = Path(build_shard(tmp_path / "a.tar", [{"__key__": "0", "bin": bytes(SAMPLES * PART)}])).read_bytes()
    with small_parts(), serving(Busy(body)) as server:
        server.most = 1
        with prefetch.open_ahead(server.url, FIRST * PART, retries=1000) as file:
            assert file.read() == body
        assert server.limit.allow(FIRST) <= FIRST // 2


def test_a_reader_by_index_keeps_to_the_limit_of_its_store(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.body = Path(
        build_shard(tmp_path / "a.tar", [{"__key__": f"{n}", "txt": f"{n}"} for n in range(9)])
    ).read_bytes()
    build_indexes([site.url()], index_dir=tmp_path)
    await_answer, found = RequestThreads.await_answer, list[Any]()

    def recorded(threads: RequestThreads, answer: Any, is_near: Any, allow: Any) -> None:
        found.append(allow)
        await_answer(threads, answer, is_near, allow)

    monkeypatch.setattr(RequestThreads, "await_answer", recorded)
    read = ShardRanges.read

    def read_later(ranges: ShardRanges, *span: Any) -> bytes:
        until(lambda: bool(found))
        return read(ranges, *span)

    monkeypatch.setattr(ShardRanges, "read", read_later)
    samples = IndexedSamples([site.url()], order="sequential", access=AccessOptions(index_dir=tmp_path))
    assert [int(sample["txt"]) for sample in samples] == [*range(9)]
    assert found[0] == known_store(store_of(site.url())).limit.allow


def test_a_burst_of_refusals_halves_once_and_answers_allow_slowly_more() -> None:
    limit = StoreLimit()

    def refuse(sent_at: float, status: int = 503) -> int:
        with suppress(HttpStatusError), limit.watch(sent_at):
            raise HttpStatusError(status, "", {})
        return limit.allow(64)

    assert limit.allow(64) == 64
    assert [refuse(0, 404), refuse(0), refuse(0), refuse(math.inf, 429), refuse(math.inf)] == [64, 32, 32, 16, 8]
    for _ in range(ANSWERS):
        with limit.watch(0):
            pass
    assert limit.allow(64) == 9
    assert [refuse(math.inf) for _ in range(4)] == [4, 2, 1, 1]


def test_all_threads_know_the_same_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    found, begin = list[KnownStore](), KnownStore.__init__

    def observed(store: KnownStore) -> None:
        monkeypatch.undo()
        thread = threading.Thread(target=lambda: found.append(known_store("s3://new")))
        thread.start()
        thread.join()
        begin(store)

    monkeypatch.setattr(KnownStore, "__init__", observed)
    assert known_store("s3://new") is found[0] is known_store("s3://new")
