"""Plain requests to web servers: where they go, what they carry along, and that they can be broken off."""

from __future__ import annotations

import base64
import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from fsspec.config import conf  # type: ignore[import-untyped]  # it carries no types

from wds_datapipes.core.openers import open_url
from wds_datapipes.errors import ShardError, ShardNotOpened

LIMIT_S = 30.0


class Site(http.server.ThreadingHTTPServer):
    """Answers each path with what `answers` says: a status and a place to go to, or "stall"; all else with its name.

    Attributes:
        asked: the paths and headers of all requests.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, tuple[int, str]] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.stalled, self.left = threading.Event(), threading.Event()

    def url(self, path: str, user: str = "") -> str:
        return f"http://{user}127.0.0.1:{self.server_port}{path}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers)))
        status, place = self.server.answers.get(self.path, (200, ""))
        self.send_response(status)
        if status != 200:
            self.send_header("Location", place)
        body = self.path.encode()
        self.send_header("Content-Length", str(len(body) + 100 * (place == "stall")))
        self.end_headers()
        self.wfile.write(body)
        if place == "stall":
            self.wfile.flush()
            self.server.stalled.set()
            self.server.left.wait(LIMIT_S)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.left.set()
        server.shutdown()
        thread.join()


def read(url: str, **options: Any) -> bytes:
    with open_url(url, **options) as stream:
        return b"".join(iter(lambda: stream.read(1000), b""))


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_place_that_a_server_names_is_gone_to(site: Site, status: int) -> None:
    site.answers = {"/a/b.tar": (status, "../c.tar?x=1"), "/c.tar?x=1": (status, site.url("/d.tar"))}
    assert read(site.url("/a/b.tar")) == b"/d.tar"


def test_a_circle_ends(site: Site) -> None:
    site.answers = {"/a.tar": (302, "/b.tar"), "/b.tar": (302, "/a.tar")}
    with pytest.raises(
        ShardNotOpened, match=r"/a\.tar cannot be opened: HTTP status 302, it leads to another place 10"
    ):
        read(site.url("/a.tar"))


@pytest.mark.parametrize("place", ["file:///etc/passwd", "ftp://host/a.tar", "pipe:echo a"])
def test_no_server_leads_to_a_file_or_a_command(site: Site, place: str) -> None:
    site.answers = {"/a.tar": (302, place)}
    with pytest.raises(
        ShardNotOpened, match=f"of the scheme '{place.partition(':')[0]}', which is no place on the web"
    ):
        read(site.url("/a.tar"))


def test_names_are_quoted_once(site: Site) -> None:
    assert read(site.url("/a b/ü%20.tar?sign=a%2Fb&x=1 2#part")) == b"/a%20b/%C3%BC%20.tar?sign=a%2Fb&x=1%202"


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer one"}])
def test_a_password_in_the_url_is_sent_unless_another_is_given(site: Site, headers: dict[str, str]) -> None:
    read(site.url("/a.tar", "me:p%40ss@"), storage_options={"headers": headers})
    (_, found) = site.asked[0]
    want = headers.get("authorization", f"Basic {base64.b64encode(b'me:p@ss').decode()}")
    assert {name.lower(): value for name, value in found.items()}["authorization"] == want


def test_a_secret_stays_on_its_host(site: Site) -> None:
    with Site() as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.01,))
        thread.start()
        site.answers = {"/a.tar": (302, "/b.tar"), "/b.tar": (302, other.url("/c.tar"))}
        headers = {"Authorization": "secret", "cookie": "secret", "X-Mine": "plain"}
        read(site.url("/a.tar"), storage_options={"headers": headers})
        other.shutdown()
        thread.join()
    assert [found["Authorization"] for _, found in site.asked] == ["secret"] * 2
    (_, found) = other.asked[0]
    assert found["X-Mine"] == "plain"
    assert "secret" not in found.values()


def test_options_of_the_library_go_to_the_library(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    read(site.url("/a.tar"))
    read(site.url("/a.tar"), storage_options={"client_kwargs": {"headers": {"X-Mine": "1"}}})
    monkeypatch.setitem(conf, "http", {"client_kwargs": {"headers": {"X-Mine": "2"}}})
    read(site.url("/a.tar"), storage_options={"skip_instance_cache": True})
    read(site.url("/a.tar"))
    assert [found.get("X-Mine") for _, found in site.asked] == [None, "1", "2", "2"]


def test_what_a_thread_waits_for_can_be_broken_off(site: Site) -> None:
    site.answers = {"/a.tar": (200, "stall")}
    stream = open_url(site.url("/a.tar"), retries=0, timeout_s=LIMIT_S)
    errors = []

    def read_on() -> None:
        try:
            while stream.read(1000):
                pass
        except ShardError as error:
            errors.append(error)

    with closing(stream):
        thread = threading.Thread(target=read_on)
        thread.start()
        assert site.stalled.wait(LIMIT_S)
        abandon: Callable[[], None] = stream.abandon  # type: ignore[attr-defined]  # it is that of a store
        abandon()
        thread.join(LIMIT_S / 2)
        assert not thread.is_alive()
    assert "failed after 6 bytes" in str(errors[0])
    assert not site.left.is_set()
