"""The options ``--timeout`` and ``--retries`` of commands that read stores."""

from __future__ import annotations

import inspect
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pytest

from wds_datapipes.cli import COMMANDS
from wds_datapipes.cli._app import expand_options

#: The commands, with SHARD for a shard.
CALLS: list[tuple[str, ...]] = [
    ("ls", "SHARD"),
    ("cat", "SHARD", "-o", "out.tar"),
    ("verify", "SHARD", "--workers", "1"),
    ("index", "SHARD", "--folder", "indexes", "--workers", "1"),
    ("stats", "SHARD", "--workers", "1"),
    ("show", "SHARD"),
    ("split", "SHARD", "-o", "out-%d.tar"),
    ("sort", "SHARD", "-o", "out.tar"),
    ("shuffle", "SHARD", "-o", "out.tar"),
    ("map", "-c", "true", "SHARD", "-o", "out/", "--workers", "0", "--shard-retries", "0"),
    ("cache", "warm", "SHARD", "--dir", "copies"),
    ("create", "table", "SHARD", "-o", "out-%d.tar"),
]


class Silent(socketserver.BaseRequestHandler):
    """Sends nothing until the client disconnects."""

    asked: ClassVar[list[bytes]] = []

    def handle(self) -> None:
        while data := self.request.recv(1 << 16):
            self.asked.append(data)


@pytest.fixture
def silent() -> Iterator[socketserver.ThreadingTCPServer]:
    """Run a server that accepts requests and never responds."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Silent) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def requests(server: socketserver.ThreadingTCPServer) -> Counter[bytes]:
    """Return how many requests of each method the server has received, once it has read all of them."""
    with socket.create_connection(("127.0.0.1", server.server_address[1])) as last:
        last.sendall(b"LAST")
    while b"LAST" not in Silent.asked:
        time.sleep(0.001)
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join()
    return Counter(data.partition(b" ")[0] for data in Silent.asked if data != b"LAST")


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
def test_an_unresponsive_store_is_retried_as_often_as_requested(
    program: Any, silent: socketserver.ThreadingTCPServer, call: tuple[str, ...]
) -> None:
    url = f"http://127.0.0.1:{silent.server_address[1]}/a.{'csv' if call[0] == 'create' else 'tar'}"
    command = [url if word == "SHARD" else word for word in call]
    for retries in (0, 1):
        Silent.asked.clear()
        done = program(*command, "--timeout", "0.2", "--retries", str(retries))
        assert done.code in (1, 2)
        said = done.out + done.err
        assert "has not sent its headers, or the next bytes, within 0.2 s" in said
        assert ("(2 attempts)" in said) is bool(retries)
        # Some request the size first, and read the shard in any case.
        assert set(requests(silent).values()) == {retries + 1}
    assert not Path("out.tar").exists()


def test_every_command_that_reads_stores_has_both() -> None:
    for name in COMMANDS:
        found = getattr(import_module(f"wds_datapipes.cli.{name}"), name)
        for each in found.values() if isinstance(found, Mapping) else [found]:
            options = inspect.signature(expand_options(each)).parameters
            assert ("storage_options" in options) is ("timeout" in options) is ("retries" in options), name


@pytest.mark.parametrize("option", [("--timeout", "0"), ("--timeout", "-1"), ("--timeout", "inf"), ("--retries", "-1")])
def test_invalid_options_are_refused(program: Any, option: tuple[str, str]) -> None:
    done = program("ls", "a.tar", *option)
    assert (done.code, option[0] in done.err) == (2, True)
