"""Is urllib3 faster than our client for HTTP, in small ranges, in large ones, and in whole shards?

Both are the store below a `RemoteFile`, so that retries, versions and the limits of ranges are the same. The server
runs on the same machine and takes part of its cores, but its processor time does not count. With urllib3, a time limit
holds for each read of the socket; ours holds for all headers of a response, and for each part of its body.

Results of urllib3 2.8 relative to ours, on two busy cores that the server shares, with connections that are used again:
ranges of 4 KiB 0.84 (in CPU time 0.79), of 256 KiB 0.79 (0.75), and whole shards of 16 MiB 0.82 (0.91). So our client
stays, which also works without another package.
"""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import urllib3
from harness.contest import Contender, Contest
from harness.store import store

from wds_datapipes.io.remote.filesystem import RemotePath
from wds_datapipes.io.remote.remote_file import RemoteFile
from wds_datapipes.io.remote.request_steps import Steps
from wds_datapipes.io.remote.resuming_stream import OpenedSource, is_strong_etag, version_of

__all__ = ["http"]

FILE_BYTES = 16 << 20
#: The size of a range, and how many are read in a run; the last one is the whole file.
RANGES = {"4 KiB": (4 << 10, 200), "256 KiB": (256 << 10, 60), "whole shard of 16 MiB": (FILE_BYTES, 2)}
BUFFER_BYTES = 256 << 10
TIMEOUT_S = 30.0


class Body:
    """The body of a response of urllib3."""

    def __init__(self, response: urllib3.BaseHTTPResponse) -> None:
        self._response: Any = response

    def read_steps(self, view: memoryview) -> Steps[int]:
        """Read the available bytes, at most ``len(view)``; 0 at the end."""
        yield None
        data = self._response.read1(len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Return the connection to the pool, or close it if the body was not read to its end."""
        if not self._response.isclosed():
            self._response.close()
        self._response.release_conn()

    abort = close


class Urllib3Store:
    """A file on a web server, opened at any offset with urllib3."""

    def __init__(self, remote: RemotePath, pool: urllib3.PoolManager) -> None:
        self._remote, self._pool = remote, pool

    def open_steps(self, start: int, end: int | None = None) -> Steps[OpenedSource]:
        """Open the file at an offset, up to ``end``."""
        yield None
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={start}-{'' if end is None else end - 1}"}
        timeout = urllib3.Timeout(connect=TIMEOUT_S, read=TIMEOUT_S)
        response = self._pool.request(
            "GET", self._remote.path, headers=headers, preload_content=False, retries=False, timeout=timeout
        )
        first_last, _, size = response.headers["Content-Range"].removeprefix("bytes ").partition("/")
        first, _, last = first_last.partition("-")
        etag = response.headers.get("ETag")
        version = version_of(etag, response.headers.get("Last-Modified"))
        facts = version, etag, is_strong_etag(etag)
        return OpenedSource(Body(response), int(first), int(size), *facts, int(last) + 1, can_seek=True)

    def close(self) -> None:
        """Do nothing: the pool is shared."""


def remote_file(url: str, pool: urllib3.PoolManager | None) -> RemoteFile:
    """Open a file with our client, or with a pool of urllib3."""
    remote = RemotePath(url)
    file = RemoteFile(remote)
    if pool is not None:
        file._store = Urllib3Store(remote, pool)
    assert file._probe()
    return file


def read_ranges(file: RemoteFile, starts: Iterable[int], count: int) -> Iterator[int]:
    """Read ranges of a file, and yield the size of each."""
    buffer = memoryview(bytearray(BUFFER_BYTES))
    for start in starts:
        size = 0
        with file.part(start, start + count) as stream:
            while received := stream.readinto(buffer):  # type: ignore[attr-defined]  # the stream of a store has it
                size += received
        yield size


def http(arguments: Namespace) -> list[dict[str, Any]]:
    """Compare the clients."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a.bin").write_bytes(os.urandom(FILE_BYTES))
        with store(Path(folder), 0.0, 1e12) as site, urllib3.PoolManager(maxsize=32) as pool:
            files = {"ours": remote_file(f"{site}/a.bin", None), "urllib3": remote_file(f"{site}/a.bin", pool)}
            contests = []
            for name, (count, times) in RANGES.items():
                random = Random(0)
                starts = [random.randint(0, FILE_BYTES - count) for _ in range(max(1, int(times * arguments.scale)))]
                contenders = [
                    Contender(client, partial(read_ranges, file, starts, count), int) for client, file in files.items()
                ]
                contests.append(Contest(f"Ranges: {name}", contenders, "ours", unit="range").run(arguments.rounds))
    return contests
