"""TLS and proxies for it: connections that are cut, and handshakes and answers of proxies that never end."""

from __future__ import annotations

import itertools
import json
import socketserver
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from nginx_server import Nginx
from web_server import serving

from wds_datapipes import DatasetSpec, ShardList
from wds_datapipes.errors import SidecarError, WdsError
from wds_datapipes.index.format.builder import build_index
from wds_datapipes.index.format.manifest import read_manifest
from wds_datapipes.io.openers import open_url
from wds_datapipes.io.remote.remote_file import file_facts
from wds_datapipes.io.sidecars import read_sidecar
from wds_datapipes.testing import build_shard

pytestmark = pytest.mark.usefixtures("pauses", "nothing_left", "no_proxies")

LINES = [json.dumps({"id": number, "text": "y" * 300}).encode() + b"\n" for number in range(200)]
#: The answer of a proxy that forwards all that follows.
TUNNEL = b"HTTP/1.1 200 OK\r\n\r\n"
#: A record of TLS with a part of a handshake, whose other bytes never come.
HANDSHAKE = b"\x16\x03\x03\x40\x00\x02\x00\x3f\xfc"
ENDLESS = {
    "a proxy's status in drips": (b"HTTP/1.1 200 Connection", b" established"),
    "a proxy's headers in drips": (b"HTTP/1.1 200 OK\r\nX-A: ", b"a"),
    "a proxy's headers without end": (b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n" * 100),
    "a handshake in drips": (TUNNEL, HANDSHAKE, b"\x00"),
    "no handshake": (TUNNEL, b""),
}
LIMITS: dict[str, Any] = {"retries": 0, "timeout_s": 0.3}
ASKS: dict[str, Callable[[str, Path], object]] = {
    "stream": lambda url, _: list(ShardList(url).load_wds_shards(**LIMITS)),
    "records": lambda url, _: list(ShardList(f"{url}.jsonl").load_wds_records(storage_options=LIMITS)),
    "cache": lambda url, folder: list(ShardList(url).cache_wds_shards(folder).load_wds_shards(**LIMITS)),
    "index": lambda url, _: build_index(url, storage_options=LIMITS),
    "facts": lambda url, _: file_facts(url, **LIMITS),
    "sidecar": lambda url, _: read_sidecar(url, LIMITS),
    "specification": lambda url, _: DatasetSpec(f"{url}.json", storage_options=LIMITS),
    "manifest": lambda url, _: read_manifest(f"{url}.json", storage_options=LIMITS),
}


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


class Drips(socketserver.StreamRequestHandler):
    """Answers with the pieces of its server; sends the last one until the server is stopped."""

    def handle(self) -> None:
        server: Any = self.server
        *begin, last = server.pieces
        with suppress(OSError):
            if begin[0] != HANDSHAKE:
                while self.rfile.readline().strip():
                    pass
            for piece in itertools.chain(begin, itertools.repeat(last)):
                self.wfile.write(piece)
                if piece == TUNNEL:
                    self.rfile.read(1)  # the client begins its handshake
                if server.stopped.wait(0.02):
                    return


@pytest.fixture
def dripping() -> Iterator[Any]:
    """A server of `Drips`, with the attribute ``pieces``."""
    server: Any = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Drips)
    server.daemon_threads, server.stopped = True, Event()
    with serving(server):
        yield server
        server.stopped.set()


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("name", ENDLESS)
def test_a_proxy_or_handshake_without_end_is_given_up(
    dripping: Any, name: str, ask: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dripping.pieces = ENDLESS[name]
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{dripping.server_address[1]}")
    with pytest.raises((WdsError, SidecarError), match=r"far\.invalid/a\.tar.* (within|longer than) 0\.3 s"):
        ASKS[ask]("https://far.invalid/a.tar", tmp_path)


def test_a_handshake_without_end_is_given_up_without_a_proxy(dripping: Any, tmp_path: Path) -> None:
    dripping.pieces = (HANDSHAKE, b"\x00")
    for ask in ASKS.values():
        with pytest.raises((WdsError, SidecarError), match=r"/a\.tar.* longer than 0\.3 s"):
            ask(f"https://127.0.0.1:{dripping.server_address[1]}/a.tar", tmp_path)


class Closing(socketserver.BaseRequestHandler):
    """Sends the body of its server without its size, and closes the connection as TLS demands, or cuts it."""

    def handle(self) -> None:
        server: Any = self.server
        with suppress(OSError), server.context.wrap_socket(self.request, server_side=True) as connection:
            connection.recv(1 << 16)
            connection.sendall(server.head + server.body)
            if server.says_end:
                connection.unwrap()


@pytest.fixture
def closing(nginx: Nginx) -> Iterator[Any]:
    """A server of `Closing`, with the attributes ``url``, ``options``, ``head``, ``body`` and ``says_end``."""
    server: Any = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Closing)
    server.daemon_threads, server.says_end = True, False
    server.head, server.body = b"HTTP/1.1 200 OK\r\n\r\n", b""
    server.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.context.load_cert_chain(nginx.authority.parent / "certificate.pem")
    server.url = f"https://127.0.0.1:{server.server_address[1]}/a"
    server.options = {"ca_file": str(nginx.authority), "retries": 1, "timeout_s": 60}
    with serving(server):
        yield server


def records(url: str, options: dict[str, Any], *caches: Path) -> list[Any]:
    pipe: Any = ShardList(f"{url}.jsonl")
    for folder in caches:
        pipe = pipe.cache_wds_shards(folder)
    return list(pipe.load_wds_records(storage_options=options))


CUT = "ended without close_notify of TLS"


@pytest.mark.parametrize("count", [0, 1, 120, 200])
def test_records_of_a_cut_connection_are_an_error(closing: Any, tmp_path: Path, count: int) -> None:
    closing.body = b"".join(LINES[:count])
    for caches in ([], [tmp_path / "copies"]):
        with pytest.raises(WdsError, match=rf"a\.jsonl.*{CUT}.*\(2 attempts\)"):
            records(closing.url, closing.options, *caches)
    assert not [path for path in (tmp_path / "copies").glob("*") if path.suffix == ".jsonl"]
    closing.says_end = True
    if count:  # a shard without records is an error
        for caches in ([], [tmp_path / "copies"]):
            assert len(records(closing.url, closing.options, *caches)) == count


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nX-A"])
@pytest.mark.parametrize("says_end", [False, True])
def test_a_connection_that_ends_in_the_headers_is_an_error_that_says_so(
    closing: Any, head: bytes, says_end: bool
) -> None:
    closing.head, closing.says_end = head, says_end
    with pytest.raises(WdsError, match=r"a\.jsonl.*has closed the connection before the end of its headers"):
        records(closing.url, closing.options)


def test_other_files_of_a_cut_connection_are_an_error(closing: Any, tmp_path: Path) -> None:
    shard = Path(build_shard(tmp_path / "a.tar", [{"__key__": "a", "txt": "b"}])).read_bytes()
    options = closing.options

    def read_text(url: str) -> object:
        return read_sidecar(f"{url}.json", options)

    def read_spec(url: str) -> object:
        return DatasetSpec(f"{url}.json", storage_options=options)

    def read_shard(url: str) -> object:
        return list(ShardList(f"{url}.tar").load_wds_shards(storage_options=options))

    def index(url: str) -> object:
        return build_index(f"{url}.tar", storage_options=options)

    def read_bytes(url: str) -> object:
        with open_url(url, storage_options=options) as stream:
            return stream.read()

    for ask, body in (
        (read_text, b'{"a": 1}'),
        (read_spec, b'{"datasets": [{"shards": "a.tar"}]}'),
        (read_shard, shard[:512]),
        (read_shard, shard),
        (index, shard),
        (read_bytes, b"a"),
    ):
        closing.body, closing.says_end = body, False
        with pytest.raises(WdsError, match=CUT):
            ask(closing.url)
        closing.says_end = True
        if len(body) != 512:
            ask(closing.url)
