"""How fast does one process read from a distant store, by the number of bytes that it reads ahead?

"stream" reads samples of S3 in the order of the shards, with a limit of the bytes ahead. bench_peers.py compares the
default, and reading by index, with other loaders. "connections" is the largest number of requests that the server
answered at the same time.

The sweep streams samples with each size and number of parts, and a limit that all parts together have. It sets
constants of ``io/prefetch.py``, which no user can set, to find their defaults.
"""

from __future__ import annotations

import itertools
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from harness.contest import in_turn
from harness.datasets import PHOTOGRAPHS
from harness.processes import in_child
from harness.store import store
from loaders.table import S3_REFERENCE

from measures.images_in_s3 import S3_SERVERS, Reader, compare_readers
from wds_datapipes import ShardList

__all__ = ["parts"]

#: Shards of 130 MB, which have many parts.
SHARDS = PHOTOGRAPHS["IMG"]._replace(name="PARTS", shards=4, samples=1536)
#: The limits of the bytes ahead in MiB.
AHEAD = (0, 32, 64, 128)
#: The sizes of parts in MiB, and the numbers of parts, of the sweep.
PART_MIB, PART_COUNTS = (1, 2, 4, 8), (8, 16, 32, 64)
#: The time limit of a measurement in seconds.
LIMIT_S = 300.0


def parts(arguments: Namespace) -> dict[str, Any]:
    """Compare the limits of the bytes ahead, beside webdataset; and the sizes and numbers of parts."""
    readers = {
        S3_REFERENCE: Reader(S3_REFERENCE),
        **{f"stream, {mib} MiB": Reader("ours, stream", mib << 20) for mib in AHEAD},
    }
    return {
        "servers": compare_readers(readers, S3_REFERENCE, SHARDS, arguments),
        "sweep": [sweep(server, arguments) for server in S3_SERVERS if S3_SERVERS[server][0]],
    }


def sweep(server: str, arguments: Namespace) -> dict[str, Any]:
    """Measure all sizes and numbers of parts with one server."""
    files = [Path(path).name for path in SHARDS.write(arguments.data, arguments.scale)]
    cells = list(itertools.product(PART_MIB, PART_COUNTS))[: 2 if arguments.quick else None]
    with store(arguments.data, *S3_SERVERS[server]) as address:
        urls = [f"{address}/{file}" for file in files]
        measures = {
            f"{mib} MiB, {count} parts": partial(in_child, stream_in_parts, urls, mib << 20, count, timeout_s=LIMIT_S)
            for mib, count in cells
        }
        runs, _ = in_turn(f"Sizes and numbers of parts, {server}", measures, arguments.rounds)
    return {"server": server, "runs": runs}


def stream_in_parts(urls: list[str], part_bytes: int, count: int) -> dict[str, float]:
    """Stream samples in parts of one size; return their bytes, and what that takes."""
    constants: Any = {
        "MIN_PART_BYTES": part_bytes,
        "MAX_PART_BYTES": part_bytes,
        "FIRST_PARTS": count,
        "MAX_PARTS": count,
    }
    with patch.multiple("wds_datapipes.io.prefetch", **constants):
        for _ in _samples(urls[:1], part_bytes * count):  # so that connecting does not count
            pass
        begin, cpu = time.perf_counter(), time.process_time()
        size = sum(len(sample["jpg"]) for sample in _samples(urls, part_bytes * count))
        return {"bytes": size, "s": time.perf_counter() - begin, "cpu_s": time.process_time() - cpu}


def _samples(urls: list[str], read_ahead: int) -> Any:
    return ShardList(urls).load_wds_shards(read_ahead=read_ahead).group_samples()
