"""A proxy that forwards requests and injects faults into the responses."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import re
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Fault", "FaultProxy", "fault_proxy"]

#: Headers that concern only one connection.
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "date", "server"}


@dataclass(frozen=True)
class Fault:
    """A fault of a response.

    Attributes:
        at: the number of bytes of the body sent before the fault.
        how: ``"reset"`` the connection, ``"close"`` it, ``"stall"``, ``"drip"`` byte by byte, ``"held"`` for
            a reset once the proxy's `released` is set, or ``""`` for none of these.
        status: an answer without the body, with this status.
        headers: sent instead of those of the server; None omits one.
        body: sent instead of that of the server.
        path: requested from the server instead of the path that was requested.
        no_range: whether the whole file is requested from the server, whatever part was requested.
        sent_status: sent instead of that of the server, with the body.
        wire: sent piece by piece instead of the whole answer; it may be endless.
        pause_s: the pause between these pieces.
    """

    at: int = 0
    how: str = ""
    status: int = 0
    headers: dict[str, str | None] = field(default_factory=dict)
    body: bytes | None = None
    path: str = ""
    no_range: bool = False
    sent_status: int = 0
    wire: Callable[[], Iterable[bytes]] | None = None
    pause_s: float = 0.0


class FaultProxy(http.server.ThreadingHTTPServer):
    """Forwards requests, and injects the `faults` into the responses to GET requests, one after the other.

    Attributes:
        faults: the next faults; None means no fault, as do all requests after the last one.
        faults_from: faults apply only to requests for parts that begin at this byte or later.
        faults_at: the next faults of the requests for parts that begin at a byte, in whichever order they arrive.
        accepted: the number of connections.
        asked: the ``Range`` of each GET request, and its path.
        heads: the number of HEAD requests.
        part_bytes: the maximum size of a response to a request for a part, in bytes.
        hides_size: whether responses to HEAD omit the size.
        unreadable: parts of files that cannot be read, by path: requests for a part with any of these bytes get 410.
        awaited: holds GET requests until this many wait for a response at the same time; applies once.
        met: set when that many wait.
        released: ends the hold of responses that begin from now on.
        at_once: the number of GET requests that wait for a response.
    """

    daemon_threads = True
    request_queue_size = 128  # with 5, the system would drop some of many simultaneous connections

    def __init__(self, backend: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.backend = backend
        self.faults: list[Fault | None] = []
        self.faults_from = 0
        self.faults_at: dict[int, list[Fault | None]] = {}
        self.accepted = 0
        self.asked: list[tuple[str, str | None]] = []
        self.heads = 0
        self.part_bytes = sys.maxsize
        self.hides_size = False
        self.unreadable: dict[str, range] = {}
        self.awaited = self.at_once = 0
        self.met = threading.Event()
        self._lock = threading.Lock()
        self.stalled = threading.Event()
        self.released = threading.Event()

    def get_request(self) -> tuple[socket.socket, Any]:
        self.accepted += 1
        return super().get_request()

    @property
    def port(self) -> int:
        return self.server_address[1]

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Make a request wait for others, and count those that wait at the same time."""
        with self._lock:
            self.at_once += 1
            if self.at_once >= self.awaited:
                self.met.set()
        try:
            self.met.wait(60)
            yield
        finally:
            with self._lock:
                self.at_once -= 1

    def refuses(self, method: str, path: str) -> bool:
        """Whether to respond with 403 instead of forwarding a request that may change something."""
        return False

    def answered(self, method: str, path: str) -> None:
        """Called for each such request after the server has responded, before the response is forwarded."""

    def handle_error(self, *_: object) -> None:
        """Log nothing: connections break here on purpose."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise a reset would drop bytes that wait for an acknowledgement
    server: FaultProxy

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Range")))
        with self.server.waiting():
            first = self._asked()[0]
            if self._is_unreadable():
                self._pass_on(Fault(status=410))
            elif faults := self.server.faults_at.get(first):
                self._pass_on(faults.pop(0))
            else:
                has_fault = self.server.faults and first >= self.server.faults_from
                self._pass_on(self.server.faults.pop(0) if has_fault else None)

    def _asked(self) -> tuple[int, int]:
        """Return the first and last byte of the requested part."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = map(int, asked.groups()) if asked else (0, sys.maxsize)
        return first, last

    def _is_unreadable(self) -> bool:
        bad = self.server.unreadable.get(self.path, range(0))
        first, last = self._asked()
        return bool(bad) and first < bad.stop and last >= bad.start

    def do_HEAD(self) -> None:
        self.server.heads += 1
        self._pass_on(None)

    def do_PUT(self) -> None:
        self._pass_on(Fault(status=403) if self.server.refuses(self.command, self.path) else None)

    do_POST = do_DELETE = do_PUT

    def _pass_on(self, fault: Fault | None) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or None
        if fault is not None and fault.wire is not None:
            self._send(fault.wire(), fault.pause_s)
            return
        if fault is not None and fault.status:
            self.send_response(fault.status)
            for name, value in {"Content-Length": "0", **fault.headers}.items():
                if value is not None:
                    self.send_header(name, value)
            self.end_headers()
            return
        backend = http.client.HTTPConnection(*self.server.backend, timeout=60)
        with contextlib.closing(backend):
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in ("expect", "connection")
            }
            if fault is not None and fault.no_range:
                headers.pop("Range", None)
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("Range", ""))
            if asked and self.server.part_bytes < sys.maxsize:
                last = min(int(asked[2] or sys.maxsize), int(asked[1]) + self.server.part_bytes - 1)
                headers["Range"] = f"bytes={asked[1]}-{last}"
            path = self.path if fault is None or not fault.path else fault.path
            backend.request(self.command, path, content, headers)
            answer = backend.getresponse()
            body = answer.read()
            if self.command in ("PUT", "POST", "DELETE"):
                self.server.answered(self.command, self.path)
            self._answer(answer, body, fault or Fault())

    def _answer(self, answer: http.client.HTTPResponse, body: bytes, fault: Fault) -> None:
        released = self.server.released  # a test replaces it for the next response, which this one may overlap
        body = body if fault.body is None else fault.body
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in HOP_BY_HOP}
        if self.command != "HEAD":
            headers["Content-Length"] = str(len(body))
        elif self.server.hides_size:
            headers.pop("Content-Length", None)
        headers = {name: value for name, value in headers.items() if name.lower() not in map(str.lower, fault.headers)}
        self.send_response(fault.sent_status or answer.status)
        for name, value in {**headers, **fault.headers}.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if not fault.how:
            self.wfile.write(body)
            return
        self.wfile.write(body[: fault.at])
        self.wfile.flush()
        self.close_connection = True
        if fault.how == "drip":
            self._send((bytes([each]) for each in body[fault.at :]), 0.02)
            return
        if fault.how == "stall":
            self.server.stalled.wait(60)
            return
        if fault.how == "held":
            released.wait(60)
        if fault.how != "close":
            # The system sends RST instead of FIN.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def _send(self, pieces: Iterable[bytes], pause_s: float) -> None:
        """Send these until the client has disconnected."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            for piece in pieces:
                self.wfile.write(piece)
                if self.server.stalled.wait(pause_s):
                    return

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def fault_proxy(backend: tuple[str, int]) -> Iterator[FaultProxy]:
    """Run a proxy in front of a server."""
    proxy = FaultProxy(backend)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield proxy
    finally:
        proxy.stalled.set()
        proxy.released.set()
        proxy.shutdown()
        proxy.server_close()
        thread.join()
