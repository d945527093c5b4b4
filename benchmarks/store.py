"""A web server with the manners of a distant store: so long until an answer begins, and so many bytes a second then.

    python store.py FOLDER LATENCY_S BYTES_PER_S    # prints its port, and serves until it is killed

It sends files by ``sendfile``, so that it takes little of the processor that the readers are measured on.
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

#: Sent at a time: with a limit of bytes a second, small enough to keep an even pace.
CHUNK = 256 << 10


class Store(ThreadingHTTPServer):
    """Serves a folder."""

    daemon_threads = True

    def __init__(self, folder: Path, latency_s: float, bytes_per_s: float) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder, self.latency_s, self.bytes_per_s = folder, latency_s, bytes_per_s


class Answer(BaseHTTPRequestHandler):
    """Answers GET requests, for all of a file or a range of it."""

    protocol_version = "HTTP/1.1"
    server: Store

    def do_GET(self) -> None:
        """Wait, then send the file."""
        time.sleep(self.server.latency_s)
        with (self.server.folder / self.path.lstrip("/")).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            start, end = (int(asked[1]), int(asked[2] or size - 1) + 1) if asked else (0, size)
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.send_header("Content-Length", str(end - start))
            self.send_header("ETag", f'"{size}"')
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # whoever has read enough leaves
                self._send(file.fileno(), start, end)

    def _send(self, file: int, start: int, end: int) -> None:
        begin, at = time.perf_counter(), start
        while at < end:
            at += os.sendfile(self.connection.fileno(), file, at, min(end - at, CHUNK))
            early = (at - start) / self.server.bytes_per_s - (time.perf_counter() - begin)
            if early > 0:
                time.sleep(early)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def store(folder: Path, latency_s: float, bytes_per_s: float) -> Iterator[str]:
    """Serve a folder in a process of its own; yields the URL of the folder."""
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
