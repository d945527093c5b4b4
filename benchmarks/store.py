"""A web server that simulates a distant store, with a latency and a bandwidth per connection.

    python store.py FOLDER LATENCY_S BYTES_PER_S    # prints its port, and serves until it is killed

It sends files with ``sendfile``, which takes little CPU time from the readers.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

__all__ = ["store"]

#: The number of bytes sent at a time, small enough for an even rate.
CHUNK = 256 << 10


class Store(ThreadingHTTPServer):
    """Serves a folder."""

    daemon_threads = True
    request_queue_size = 128  # with 5, the system would drop some of many connections at once

    def __init__(self, folder: Path, latency_s: float, bytes_per_s: float) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.latency_s, self.bytes_per_s = folder, latency_s, bytes_per_s


class Handler(BaseHTTPRequestHandler):
    """Handles GET requests for a file or a range of it."""

    protocol_version = "HTTP/1.1"
    server: Store

    def do_GET(self) -> None:
        """Wait, then send the file."""
        time.sleep(self.server.latency_s)
        with (self.server.folder / self.path.lstrip("/")).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            requested = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            start, end = (int(requested[1]), int(requested[2] or size - 1) + 1) if requested else (0, size)
            self.send_response(206 if requested else 200)
            if requested:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.send_header("Content-Length", str(end - start))
            self.send_header("ETag", f'"{size}"')
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the client may disconnect early
                self._send(file.fileno(), start, end)

    def _send(self, file: int, start: int, end: int) -> None:
        begin, at = time.perf_counter(), start
        while at < end:
            at += os.sendfile(self.connection.fileno(), file, at, min(end - at, CHUNK))
            early = (at - start) / self.server.bytes_per_s - (time.perf_counter() - begin)
            if early > 0:
                time.sleep(early)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def store(folder: Path, latency_s: float, bytes_per_s: float) -> Iterator[str]:
    """Serve a folder in a separate process, and yield its URL."""
    command = [sys.executable, __file__, str(folder), str(latency_s), str(bytes_per_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


if __name__ == "__main__":
    with Store(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
