"""Web servers of tests, which run in a thread."""

from __future__ import annotations

import contextlib
import http.server
import socketserver
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

__all__ = ["QuietHandler", "serving", "web_server"]

S = TypeVar("S", bound=socketserver.BaseServer)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Handles requests, and logs nothing."""

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def serving(server: S) -> Iterator[S]:
    """Run a server in a thread, and end it."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def web_server(handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve with a handler, and yield the URL of the server."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    with serving(server):
        yield f"http://127.0.0.1:{server.server_port}"
