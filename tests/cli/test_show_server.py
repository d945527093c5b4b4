"""``show --serve``: a page of all samples, with filters, for browsers of this host."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wds_datapipes.cli.show_server import CONNECTIONS, Filters, SampleServer
from wds_datapipes.prepare.dataset_contents import DatasetContents
from wds_datapipes.testing import build_shard

EVIL = '<script>alert(1)</script>"&'


def samples_of(shard: int) -> list[dict[str, Any]]:
    """Samples with classes, and with sizes that grow by 100 bytes."""
    numbers = range(10 * shard, 10 * shard + 10)
    return [{"__key__": f"k{n:03d}", "txt": b"x" * (100 * n), "cls": f"{n % 3}"} for n in numbers]


@pytest.fixture
def table(folder: Path) -> DatasetContents:
    return DatasetContents([build_shard(f"{shard}.tar", samples_of(shard)) for shard in range(3)], label="cls")


@pytest.fixture
def server(table: DatasetContents) -> Iterator[SampleServer]:
    with SampleServer(table, EVIL, count=7, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: SampleServer, path: str = "/", host: str = "") -> tuple[int, dict[str, str], str]:
    """Request a page; return its status, headers and text."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=600)
    try:
        connection.request("GET", path, headers={"Host": host} if host else {})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read().decode()
    finally:
        connection.close()


def keys_in(page: str) -> list[str]:
    return re.findall(r"<b[^>]*>(k\d+)</b>", page)


def keys_on_all_pages(server: SampleServer, query: str) -> list[str]:
    """The keys on a page and those after it, by its links."""
    found: list[str] = []
    path: str | None = f"/?{query}"
    while path is not None:
        _, _, page = get(server, path)
        found += keys_in(page)
        following = re.search(r'rel="next" href="([^"]*)"', page)
        path = following[1].replace("&amp;", "&") if following else None
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(
    key=st.sampled_from(["", "k", "1", "k01", "nothing"]),
    label=st.sampled_from(["", "0", "2", "9"]),
    smallest=st.integers(0, 3000),
    largest=st.integers(1, 3000) | st.none(),
)
def test_pages_together_have_each_sample_that_passes_the_filters_once(
    server: SampleServer, key: str, label: str, smallest: int, largest: int | None
) -> None:
    filters = Filters(key, label, str(smallest) if smallest else "", "" if largest is None else str(largest))
    expected = [
        sample["__key__"]
        for shard in range(3)
        for sample in samples_of(shard)
        if key in sample["__key__"]
        and label in ("", sample["cls"])
        and smallest <= len(sample["txt"]) + 1 <= (largest or 10**6)
    ]
    assert keys_on_all_pages(server, filters.query(1)) == expected


def test_the_page_allows_no_scripts_and_escapes_what_shards_and_users_say(server: SampleServer) -> None:
    status, headers, page = get(server, f"/?key={quote(EVIL)}&label={quote(EVIL)}")
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;&quot;&amp;") >= 2


@pytest.mark.parametrize(
    ("path", "host", "status", "text"),
    [
        ("/", "evil.example", 403, "Open the address that the command has printed"),
        ("/etc/passwd", "", 404, "one page only"),
        ("/?page=two", "", 400, "The page must be a number, not &#x27;two&#x27;"),
        ("/?smallest=tiny", "", 400, "The smallest size must be a number of bytes"),
        ("/?page=999", "", 200, "Page 5 of 5"),
        ("/?unknown=1", "", 200, "Page 1 of 5"),
        ("/?key=nothing", "", 200, "There are no samples."),
    ],
)
def test_other_requests_are_answered(server: SampleServer, path: str, host: str, status: int, text: str) -> None:
    found, _, page = get(server, path, host)
    assert found == status
    assert text in page


def test_only_this_host_is_served(server: SampleServer) -> None:
    assert urlsplit(server.url).hostname == "127.0.0.1"
    assert server.server_address[0] == "127.0.0.1"


def test_a_shard_that_changes_is_named_on_the_page(server: SampleServer) -> None:
    build_shard("1.tar", [{"__key__": "new", "txt": "x"}])
    _, _, page = get(server, "/?key=k01")
    assert 'role="alert"' in page
    assert "1.tar" in page
    assert keys_in(get(server, "/?key=k02")[2]) == [f"k02{n}" for n in range(7)]


def test_faults_of_shards_are_shown_beside_the_samples_before_them(folder: Path) -> None:
    whole = Path(build_shard("cut.tar", samples_of(0))).read_bytes()
    Path("cut.tar").write_bytes(whole[: len(whole) // 2])
    table = DatasetContents(["cut.tar"], label="cls")
    assert 0 < len(table) < 10
    with SampleServer(table, "cut.tar", count=20, port=0) as server:
        _, page = server.render("")
    assert len(keys_in(page)) == len(table)
    assert "cut.tar ends inside the member" in page


def answering_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]


def test_idle_connections_do_not_take_threads_without_end(server: SampleServer) -> None:
    with contextlib.ExitStack() as opened:
        idle = [
            opened.enter_context(socket.create_connection(("127.0.0.1", server.server_port), timeout=600))
            for _ in range(300)
        ]
        assert get(server)[0] == 200  # connections are accepted in order
        for connection in idle[: 300 - CONNECTIONS]:
            assert connection.recv(1) == b""  # the server has closed it
        idle[-1].sendall(b"GET / HTTP/1.1\r\nHost: localhost:%d\r\n\r\n" % server.server_port)
        assert idle[-1].recv(12) == b"HTTP/1.1 200"
        live = set(answering_threads())
        while len(live) > CONNECTIONS:
            live.pop().join(0.01)
            live = set(answering_threads())
    for thread in answering_threads():
        thread.join()


@pytest.mark.parametrize("request_line", [b"", b"GET / HT", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_connection_that_is_reset_prints_nothing(
    server: SampleServer, request_line: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(5):
        connection = socket.create_connection(("127.0.0.1", server.server_port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
        connection.sendall(request_line)
        connection.close()
    assert get(server)[0] == 200  # connections are accepted in order
    for thread in answering_threads():
        thread.join()
    assert capfd.readouterr().err == ""


def test_a_port_in_use_is_an_error(program: Any, shards: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = program("show", *shards, "--serve", "--port", str(other.getsockname()[1]))
    assert done.code == 2
    assert "cannot be used: it is in use. Choose another port with --port" in done.err
    done = program("show", *shards, "--serve", "--html", "x.html")
    assert (done.code, Path("x.html").exists()) == (2, False)
