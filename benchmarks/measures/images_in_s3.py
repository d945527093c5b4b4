"""Reading the images of shards in S3 without decoding them, by loaders in processes of their own, near and far.

The server runs on the same machine, and its processor time does not count. It counts requests, and how many it answers
at the same time, and responds immediately and at full speed, or after 20 or 100 ms with 90 MB/s per connection. Figures
are those of further passes of a process, so that imports do not count. The processor time includes that of commands.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from harness.contest import in_turn
from harness.datasets import PhotographSet
from harness.store import BUCKET, distant_s3
from loaders.process import LoaderError, Reading, converted, read_images
from loaders.table import LOADERS, OURS
from loaders.tar import Source

from wds_datapipes.index import build_indexes

__all__ = ["S3_SERVERS", "Reader", "compare_readers", "readers_of"]

#: The latency in seconds, and the bandwidth of a connection in bytes per second; AWS gives 85 to 90 MB/s.
S3_SERVERS = {"at once": (0.0, 1e12), "20 ms": (0.02, 9e7), "100 ms": (0.1, 9e7)}


class Reader(NamedTuple):
    """A loader that takes part, and the number of bytes that it reads ahead, if that is not its default."""

    loader: str
    read_ahead: int | None = None


def compare_readers(
    readers: Mapping[str, Reader], reference: str, data: PhotographSet, arguments: Namespace
) -> list[dict[str, Any]]:
    """Compare reading the images of a dataset from each server.

    Args:
        readers: the participants by name. All must read the same images; those that fail are left out, unless they are
            ours or the reference.
        reference: the name of the reference.
        data: the dataset.
        arguments: those of the command line.
    """
    shards = data.write(arguments.data, arguments.scale)
    copies, lacking = converted((reader.loader for reader in readers.values()), shards, arguments.data)
    names = [name for name in readers if readers[name].loader not in lacking]
    files = [Path(path).name for path in shards]
    found = []
    with tempfile.TemporaryDirectory() as indexes:
        # Indexes are named by shards, and shards by addresses, which are the same for all servers.
        build_indexes(shards, index_dir=indexes)
        for server in list(S3_SERVERS)[: 1 if arguments.quick else None]:
            with distant_s3([*shards, *copies.values()], *S3_SERVERS[server]) as address:
                in_s3 = f"s3://{BUCKET}/"
                urls, addresses = [in_s3 + file for file in files], [f"{address}/{BUCKET}/{file}" for file in files]
                work: set[tuple[int, int]] = set()
                measures = {}
                for name in names:
                    copy = copies.get(readers[name].loader)
                    copy_url = "" if copy is None else in_s3 + Path(copy).name
                    source = Source(urls, addresses, indexes, copy_url, readers[name].read_ahead)
                    measures[name] = partial(_read_the_same, readers[name].loader, source, work)
                required = [name for name in names if name == reference or readers[name].loader.startswith(OURS)]
                runs, left_out = in_turn(server, measures, arguments.rounds, errors=LoaderError, required=required)
            found.append(
                {
                    "server": server,
                    "reference": reference,
                    "runs": {name: [run._asdict() for run in some] for name, some in runs.items()},
                    "left_out": left_out | lacking,
                }
            )
    return found


def readers_of(names: list[str]) -> dict[str, Reader]:
    """Return loaders with their defaults."""
    return {name: Reader(name) for name in names if LOADERS[name].images is not None}


def _read_the_same(name: str, source: Source, work: set[tuple[int, int]]) -> Reading:
    """Read the images; the first reading adds their number and bytes to ``work``, which others must equal."""
    run = read_images(name, source)
    if {(run.images, run.bytes)} != (work or {(run.images, run.bytes)}):
        raise LoaderError(f"it read {run.images} images of {run.bytes} bytes")
    work.add((run.images, run.bytes))
    return run
