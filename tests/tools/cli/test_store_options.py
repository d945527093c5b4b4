"""The options ``--timeout`` and ``--retries`` of commands that read stores."""

from __future__ import annotations

import re
import socket
import socketserver
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from web_server import serving

#: The commands, with SHARD for a shard.
CALLS: list[tuple[str, ...]] = [
    ("ls", "SHARD"),
    ("cat", "SHARD", "-o", "out.tar"),
    ("verify", "SHARD", "--num-workers", "1"),
    ("index", "SHARD", "--index-dir", "indexes", "--num-workers", "1"),
    ("shuffle", "SHARD", "-o", "out.tar"),
    ("map", "-c", "true", "SHARD", "-o", "out/", "--num-workers", "0", "--shard-retries", "0"),
    ("cache", "warm", "SHARD", "--cache-dir", "copies"),
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
    with serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Silent)) as server:
        yield server


def requests(server: socketserver.ThreadingTCPServer) -> Counter[bytes]:
    """Return the number of requests of each method that the server has received, after it has read them all."""
    with socket.create_connection(("127.0.0.1", server.server_address[1])) as last:
        last.sendall(b"LAST")
    while b"LAST" not in Silent.asked:
        time.sleep(0.001)
    server.shutdown()
    server.server_close()  # waits for the threads that read requests
    return Counter(data.partition(b" ")[0] for data in Silent.asked if data != b"LAST")


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
def test_an_unresponsive_store_is_retried_the_requested_number_of_times(
    program: Any, silent: socketserver.ThreadingTCPServer, call: tuple[str, ...]
) -> None:
    url = f"http://127.0.0.1:{silent.server_address[1]}/a.tar"
    command = [url if word == "SHARD" else word for word in call]
    Silent.asked.clear()
    done = program(*command, "--timeout", "0.1", "--retries", "1")
    assert done.code in (1, 2)
    assert re.search(r"has not sent its headers, or the next bytes, within 0.1 s.*\(2 attempts\)", done.out + done.err)
    # Some commands request the size first, and then read the shard regardless.
    assert set(requests(silent).values()) == {2}
    assert not Path("out.tar").exists()
