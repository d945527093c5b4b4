"""Plain requests to web servers: their targets, their headers, and how they are interrupted."""

from __future__ import annotations

import base64
import select
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import ClassVar

import pytest
from error_facts import naming
from fsspec.config import conf  # type: ignore[import-untyped]  # it carries no types
from nginx_server import Nginx
from readers import bytes_of
from site_server import Site
from web_server import serving

from wds_datapipes.errors import ShardError, ShardOpenError
from wds_datapipes.io.openers import open_url

LIMIT_S = 300.0


@pytest.mark.parametrize("status", [301, 308])
def test_redirects_are_followed(site: Site, status: int) -> None:
    site.answers = {"/a/b.tar": (status, "../c.tar?x=1"), "/c.tar?x=1": (status, site.url("/d.tar"))}
    assert bytes_of(site.url("/a/b.tar")) == b"/d.tar"


def test_a_redirect_loop_ends(site: Site) -> None:
    site.answers = {"/a.tar": (302, "/b.tar"), "/b.tar": (302, "/a.tar")}
    with pytest.raises(ShardOpenError, match=r"/a\.tar cannot be opened: HTTP status 302, it redirects 10"):
        bytes_of(site.url("/a.tar"))


@pytest.mark.parametrize("place", ["file:///etc/passwd", "ftp://host/a.tar", "pipe:echo a"])
def test_redirects_never_lead_to_a_file_or_a_command(site: Site, place: str) -> None:
    site.answers = {"/a.tar": (302, place)}
    with pytest.raises(ShardOpenError, match=f"the scheme '{place.partition(':')[0]}' or no host"):
        bytes_of(site.url("/a.tar"))


def test_names_are_quoted_once(site: Site) -> None:
    assert bytes_of(site.url("/a b/ü%20.tar?sign=a%2Fb&x=1 2#part")) == b"/a%20b/%C3%BC%20.tar?sign=a%2Fb&x=1%202"


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer one"}])
def test_a_password_in_the_url_is_sent_unless_another_is_given(site: Site, headers: dict[str, str]) -> None:
    bytes_of(site.url("/a.tar", "me:p%40ss@"), storage_options={"headers": headers})
    (_, found) = site.asked[0]
    want = headers.get("authorization", f"Basic {base64.b64encode(b'me:p@ss').decode()}")
    assert {name.lower(): value for name, value in found.items()}["authorization"] == want


def test_a_secret_stays_on_its_host(site: Site) -> None:
    with serving(Site()) as other:
        site.answers = {"/a.tar": (302, "/b.tar"), "/b.tar": (302, other.url("/c.tar"))}
        headers = {"Authorization": "secret", "cookie": "secret", "X-Mine": "plain"}
        bytes_of(site.url("/a.tar"), storage_options={"headers": headers})
    assert [found["Authorization"] for _, found in site.asked] == ["secret"] * 2
    (_, found) = other.asked[0]
    assert found["X-Mine"] == "plain"
    assert "secret" not in found.values()


def test_headers_come_from_options_or_fsspecs_configuration(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_of(site.url("/a.tar"))
    bytes_of(site.url("/a.tar"), storage_options={"headers": {"X-Mine": "1"}})
    monkeypatch.setitem(conf, "http", {"headers": {"X-Mine": "2"}})
    bytes_of(site.url("/a.tar"))
    bytes_of(site.url("/a.tar"), storage_options={"headers": {"X-Mine": "3"}})
    assert [found.get("X-Mine") for _, found in site.asked] == [None, "1", "2", "3"]


def test_unknown_storage_options_are_an_error(site: Site) -> None:
    with pytest.raises(ShardOpenError, match=naming("headers", "ca_file", "client_kwargs", "trust")):
        bytes_of(site.url("/a.tar"), storage_options={"trust": 1, "client_kwargs": {"headers": {}}})
    assert site.asked == []


class Tunnel(socketserver.StreamRequestHandler):
    """A proxy for TLS, which tunnels data to the requested host, or refuses."""

    asked: ClassVar[list[str]] = []
    answer: ClassVar[bytes] = b"HTTP/1.1 200 OK\r\n\r\n"

    def handle(self) -> None:
        lines = [*iter(lambda: self.rfile.readline().decode().strip(), "")]
        self.asked.extend(line for line in lines if line.startswith(("CONNECT", "Proxy-Authorization")))
        self.wfile.write(self.answer)
        if b" 200 " not in self.answer:
            return
        host, _, port = lines[0].split()[1].rpartition(":")
        with socket.create_connection((host, int(port))) as there:
            others = {self.connection: there, there: self.connection}
            while True:
                for source in select.select([*others], [], [])[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    others[source].sendall(data)


@pytest.fixture
def tunnel(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a proxy for TLS, and return its address."""
    monkeypatch.setattr(Tunnel, "asked", [])
    for name in ("no_proxy", "NO_PROXY", "HTTPS_PROXY", "http_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Tunnel)
    server.daemon_threads = True
    with serving(server):
        yield f"127.0.0.1:{server.server_address[1]}"


def test_requests_go_through_the_proxy_of_the_environment(
    site: Site, monkeypatch: pytest.MonkeyPatch, tunnel: str
) -> None:
    monkeypatch.setenv("http_proxy", site.url("", "me:p%40ss@"))
    assert bytes_of("http://me:too@far.invalid:81/a b.tar?x=1") == b"http://far.invalid:81/a%20b.tar?x=1"
    (_, found) = site.asked[0]
    assert found["Proxy-Authorization"] == f"Basic {base64.b64encode(b'me:p@ss').decode()}"
    assert found["Authorization"] == f"Basic {base64.b64encode(b'me:too').decode()}"
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert bytes_of(site.url("/a.tar")) == b"/a.tar"
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:1")
    with pytest.raises(ShardOpenError, match=r"http_proxy.* names a proxy of the scheme 'socks5'"):
        bytes_of("http://far.invalid/a.tar")


def test_tls_goes_through_a_tunnel(nginx: Nginx, tunnel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (nginx.files / "proxied.tar").write_bytes(b"whole")
    monkeypatch.setenv("https_proxy", f"http://me:pass@{tunnel}")
    url = f"https://127.0.0.1:{nginx.https}/proxied.tar"
    options = {"ca_file": str(nginx.authority), "headers": {"Authorization": "secret"}}
    assert bytes_of(url, storage_options=options) == b"whole"
    words = base64.b64encode(b"me:pass").decode()
    assert Tunnel.asked == [f"CONNECT 127.0.0.1:{nginx.https} HTTP/1.0", f"Proxy-Authorization: Basic {words}"] or (
        Tunnel.asked == [f"CONNECT 127.0.0.1:{nginx.https} HTTP/1.1", f"Proxy-Authorization: Basic {words}"]
    )


@pytest.mark.parametrize("status", [403, 407])
def test_a_proxy_that_refuses_is_logged(tunnel: str, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr(Tunnel, "answer", f"HTTP/1.1 {status} Not you\r\n\r\n".encode())
    monkeypatch.setenv("https_proxy", tunnel)
    with pytest.raises(
        ShardOpenError, match=rf"far\.invalid/a\.tar cannot be opened: HTTP status {status}, Not you \(of the proxy"
    ) as found:
        bytes_of("https://far.invalid/a.tar")
    assert found.value.concerns_all


def test_a_request_of_a_thread_can_be_interrupted(site: Site) -> None:
    site.answers = {"/a.tar": (200, "stall")}
    stream = open_url(site.url("/a.tar"), retries=0, timeout_s=LIMIT_S)
    errors = []
    received = threading.Event()

    def read_on() -> None:
        try:
            while stream.read(1000):
                received.set()
        except ShardError as error:
            errors.append(error)

    with closing(stream):
        thread = threading.Thread(target=read_on)
        thread.start()
        assert received.wait(LIMIT_S)
        assert site.stalled.wait(LIMIT_S)
        abandon: Callable[[], None] = stream.abandon  # type: ignore[attr-defined]  # it is that of a store
        abandon()
        thread.join(LIMIT_S / 2)
        assert not thread.is_alive()
    assert "failed after 6 bytes" in str(errors[0])
    assert not site.left.is_set()
