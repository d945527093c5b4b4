"""A web server that keeps connections open, and records the requests on each."""

from __future__ import annotations

import http.server
import socket
import threading
from typing import Any

from web_server import QuietHandler

__all__ = ["Site"]

LIMIT_S = 300.0


class Site(http.server.ThreadingHTTPServer):
    """Sends a file, or a range of it, at every path that is not in `answers`.

    Attributes:
        answers: a status and the place of a redirect, or "stall", for each path.
        body: the file; None is the path.
        pages: other files, by path.
        headers: sent with each response.
        extra: sent after each body.
        hangs_up: whether to close the connection instead of responding, once.
        at_once: lets that many requests wait for each other, except those for the paths in `free`.
        asked: the paths and headers of all requests.
        accepted: the sockets of all connections.
        stalled: set once an answer stalls, until `left` is set.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, tuple[int, str]] = {}
        self.body: bytes | None = None
        self.pages: dict[str, str] = {}
        self.headers: dict[str, str] = {}
        self.extra, self.hangs_up = b"", False
        self.at_once, self.free = threading.Barrier(1), set[str]()
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.accepted: list[socket.socket] = []
        self.stalled, self.left = threading.Event(), threading.Event()

    def get_request(self) -> Any:
        accepted = super().get_request()
        self.accepted.append(accepted[0])
        return accepted

    def handle_error(self, *_: object) -> None:
        """Log nothing: connections break here on purpose."""

    def url(self, path: str = "/a.tar", user: str = "") -> str:
        return f"http://{user}127.0.0.1:{self.server_port}{path}"


class _Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # a small body arrives with its headers
    server: Site

    def do_GET(self) -> None:
        site = self.server
        site.asked.append((self.path, dict(self.headers)))
        if site.hangs_up:
            site.hangs_up, self.close_connection = False, True
            return
        if self.path not in site.free:
            site.at_once.wait(LIMIT_S)
        status, place = site.answers.get(self.path, (200, ""))
        whole = site.body if site.body is not None and status == 200 else self.path.encode()
        body = whole = site.pages[self.path].encode() if self.path in site.pages else whole
        if status == 200 and (part := self.headers.get("Range")):
            first, _, last = part.removeprefix("bytes=").partition("-")
            body, status = body[int(first) : int(last) + 1 if last else None], 206
        headers = {"Content-Length": str(len(body) + 100 * (place == "stall")), "ETag": '"1"', **site.headers}
        if status == 206:
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(body) - 1}/{len(whole)}"
        if status // 100 == 3:
            headers["Location"] = place
        if "Transfer-Encoding" in headers:
            del headers["Content-Length"]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body + site.extra)
        if place == "stall":
            self.wfile.flush()
            site.stalled.set()
            site.left.wait(LIMIT_S)

    do_HEAD = do_GET
