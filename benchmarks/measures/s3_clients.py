"""Which client reads S3 with the least processor time, in whole shards and in ranges, near and far?

"ours" signs requests with s3fs, and sends them by urllib3; "s3fs" reads by itself, in blocks of 8 MiB. "obstore" takes
part if it is installed. The server runs on the same machine, and its processor time does not count; it responds
immediately or after 20 or 100 ms. Ranges are of 100 kB, and 32 threads read them.

Results with s3fs 2026.9 and obstore 0.12.1 on two cores that were busy with other work, in processor time relative to
s3fs: shards, ours 2.8, 2.5 and 3.6 with 0, 20 and 100 ms, obstore 1.4, 1.5 and 1.5; ranges, ours 4.2, 4.1 and 4.1,
obstore 9.7, 7.8 and 7.1. In time on this machine: shards, ours 1.6, 2.4 and 5.4, obstore 6.2, 10.8 and 3.0; ranges,
ours 5.2, 3.7 and 3.5, obstore 12.4, 7.0 and 3.6. obstore receives in threads of its own, as the prefetching of ours
does in a pipeline. It is not used, although small ranges take it less: in a forked worker whose parent has used it, as
`DataLoader` starts them on Linux, the first request waits forever.
"""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import fsspec  # type: ignore[import-untyped]  # it carries no types
from harness.contest import Contender, Contest
from harness.store import store

from wds_datapipes.io.openers import open_parts, open_url
from wds_datapipes.io.remote.resuming_stream import fill

__all__ = ["stores"]

Read: TypeAlias = Callable[[str, int, int], int]
"""Reads a range of a file, and returns its size."""

FILE_BYTES, FILES = 50_000_000, 4
RANGE_BYTES, RANGES, THREADS = 100_000, 400, 32
BLOCK_BYTES = 8 << 20
#: The latency in seconds.
SERVERS = {"near": 0.0, "20 ms": 0.02, "100 ms": 0.1}


def stream_ours(names: list[str], storage: dict[str, Any]) -> Iterator[int]:
    """Read files, and yield the size of each."""
    buffer = bytearray(1 << 20)
    for name in names:
        with open_url(f"s3://bucket/{name}", storage_options=storage) as stream:
            yield sum(iter(partial(stream.readinto, buffer), 0))  # type: ignore[attr-defined]  # that of a store has it


def stream_s3fs(names: list[str], storage: dict[str, Any]) -> Iterator[int]:
    """Read files, and yield the size of each."""
    filesystem = fsspec.filesystem("s3", **storage)
    for name in names:
        with filesystem.open(f"bucket/{name}", "rb", block_size=BLOCK_BYTES, cache_type="none") as file:
            yield sum(map(len, iter(partial(file.read, BLOCK_BYTES), b"")))


def stream_obstore(names: list[str], bucket: Any) -> Iterator[int]:
    """Read files, and yield the size of each."""
    for name in names:
        yield sum(map(len, bucket.get(name).stream(min_chunk_size=1 << 20)))


def obstore_bucket(storage: dict[str, Any]) -> Any:
    from obstore.store import S3Store  # type: ignore[import-not-found]  # it may not be installed

    return S3Store(
        "bucket",
        endpoint=storage["endpoint_url"],
        access_key_id=storage["key"],
        secret_access_key=storage["secret"],
        region="us-east-1",
        client_options={"allow_http": True},
    )


def read_ranges(read: Read, names: list[str], count: int) -> Iterator[int]:
    """Read ranges of files in threads, and yield the size of each."""
    random = Random(0)
    starts = [(random.choice(names), random.randrange(FILE_BYTES - RANGE_BYTES)) for _ in range(count)]
    with ThreadPoolExecutor(THREADS) as threads:
        yield from threads.map(lambda start: read(start[0], start[1], start[1] + RANGE_BYTES), starts)


def contenders(names: list[str], storage: dict[str, Any], count: int) -> tuple[list[Contender], list[Contender]]:
    """Return contenders for whole shards, and for ranges."""
    filesystem = fsspec.filesystem("s3", **storage)
    files: dict[str, Any] = {name: open_parts(f"s3://bucket/{name}", storage_options=storage) for name in names}

    def ours(name: str, start: int, end: int) -> int:
        with files[name].part(start, end) as stream:
            return fill(stream, memoryview(bytearray(end - start)))

    def s3fs(name: str, start: int, end: int) -> int:
        return len(filesystem.cat_file(f"bucket/{name}", start=start, end=end))

    streams = {"ours": partial(stream_ours, names, storage), "s3fs": partial(stream_s3fs, names, storage)}
    reads: dict[str, Read] = {"ours": ours, "s3fs": s3fs}
    if find_spec("obstore") is not None:
        bucket = obstore_bucket(storage)
        streams["obstore"] = partial(stream_obstore, names, bucket)
        reads["obstore"] = lambda name, start, end: len(bucket.get_range(name, start=start, end=end).to_bytes())
    return (
        [Contender(name, stream, int) for name, stream in streams.items()],
        [Contender(name, partial(read_ranges, read, names, count), int) for name, read in reads.items()],
    )


def stores(arguments: Namespace) -> list[dict[str, Any]]:
    """Compare the clients."""
    contests = []
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{number}.tar" for number in range(FILES)]
        Path(folder, "bucket").mkdir()
        for name in names:
            Path(folder, "bucket", name).write_bytes(os.urandom(FILE_BYTES))
        for server, latency_s in SERVERS.items():
            with store(Path(folder), latency_s, 1e12) as site:
                storage = {"key": "access", "secret": "secret-of-mine", "endpoint_url": site}
                streams, ranges = contenders(names, storage, max(1, int(RANGES * arguments.scale)))
                for title, some, unit in (("Shards of 50 MB", streams, "shard"), ("Ranges of 100 kB", ranges, "range")):
                    contests.append(Contest(f"{title}, {server}", some, "s3fs", unit=unit).run(arguments.rounds))
    return contests
