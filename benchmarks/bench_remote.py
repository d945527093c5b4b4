"""How fast are shards read from a store, near and far, and how much processor time does it take?

    python benchmarks/bench_remote.py --only remote stores

- **remote**: shards from a web server, as streams and by their indexes, by ours and webdataset.
- **stores**: S3, in whole shards and in ranges, by ours, s3fs and obstore (measures/s3_clients.py).
- **parts**: samples from S3, by the bytes that are read ahead, and the size and number of parts (measures/parts.py).

**remote**: The server runs on the same machine. It responds at once and at full speed ("near"), or after 10 or 100 ms
with 100 MB/s per connection. Shards of 10 MB are read and grouped into samples, or also decoded, as a worker does in
training on images. Ours prefetches from the distant server, across the ends of shards; "ours, no read-ahead" does not.
webdataset reads from curl through a pipe. "our tar reader over urllib" is a limit: what reading costs without retries,
time limits and checks.

Another table compares reading samples by their indexes with streaming them, from the near server and with a latency of
10 ms. The last one compares loaders with 1, 2 and 8 workers, which deliver images to the loop, with as many workers
that download the same shards by the same client, each on one connection, without parsing or delivering them.
"""

from __future__ import annotations

import io
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, get_args
from urllib.request import urlopen

import numpy as np
import webdataset
from harness.contest import Contender, Contest
from harness.datasets import SETS, DataSet, Fields
from harness.questions import Question, answer, options
from harness.store import store
from measures.parts import parts
from measures.s3_clients import stores
from PIL import Image
from webdataset.tariterators import tarfile_to_samples

from wds_datapipes import IndexedSamples, ShardList, ShardReadingService
from wds_datapipes.index import AccessOptions, Manifest, build_indexes
from wds_datapipes.index.order.sample_order import Order
from wds_datapipes.io.openers import open_url
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.tar.reader import read_members
from wds_datapipes.types import MemberTuple, Shard

# Silenced by the import above.
from torchdata.dataloader2 import DataLoader2  # isort: skip

Sample = dict[str, Any]
REFERENCE = "webdataset"
LOCAL = "ours, from the disk"
#: The latency in seconds, and the bandwidth of a connection in bytes per second.
SERVERS = {"near": (0.0, 1e12), "10 ms": (0.01, 1e8), "100 ms": (0.1, 1e8)}
#: What is done with samples from which servers, by dataset.
WORK = {"IMG": ("near", "100 ms"), "SMALL": ("near",), "PHOTO": ("10 ms", "100 ms")}
#: The servers from which samples are read by their indexes.
INDEXED_SERVERS = ("near", "10 ms")
#: The servers from which workers deliver images, and the numbers of workers.
DELIVERED_SERVERS, WORKERS = ("near", "10 ms"), (1, 2, 8)
RAW = "raw download"
#: How often shards are read in a run: by workers, for as many shards each; and to decode photographs, so that the time
#: to the first response does not count.
DELIVERIES, PASSES = 4, 4


def photo(random: Random, index: int) -> Fields:
    """Return an image with the detail of a JPEG file of 100 kB."""
    noise = np.frombuffer(random.randbytes(80 * 60 * 3), np.uint8).reshape(60, 80, 3)
    file = io.BytesIO()
    Image.fromarray(noise).resize((640, 480), Image.Resampling.BICUBIC).save(file, "jpeg", quality=90)
    return {"jpg": file.getvalue(), "cls": b"%d" % (index % 1000)}


#: Datasets with many small shards.
SMALL_SHARDS = {
    "IMG": SETS["IMG"]._replace(shards=10, samples=100),
    "SMALL": SETS["SMALL"],
    "PHOTO": DataSet("PHOTO", 10, 100, photo, SETS["IMG"].tar_format),
}


def ours(urls: list[str], decode: str, read_ahead: int | None) -> Iterable[Sample]:
    ahead = {} if read_ahead is None else {"read_ahead": read_ahead}
    samples: Any = ShardList(urls).load_wds_shards(**ahead).group_samples()
    return samples.wds_decode(decode) if decode else samples  # type: ignore[no-any-return]  # a datapipe is iterable


def tar_over_urllib(urls: list[str]) -> Iterable[Sample]:
    """Read with our tar reader from urllib: no retries, time limits, checks of lengths, or read-ahead."""

    def members(shard: Shard, response: Any) -> Iterator[MemberTuple]:
        with io.BufferedReader(response, 1 << 20) as stream:
            yield from read_members(stream, shard=shard)
        shard.is_complete = True

    shards = (Shard(url, None, number) for number, url in enumerate(urls))
    return group_samples((shard, members(shard, urlopen(shard.url))) for shard in shards)


def webdataset_pipeline(urls: list[str], decode: str) -> Iterable[Sample]:
    pipeline = webdataset.DataPipeline(webdataset.SimpleShardList(urls), tarfile_to_samples())
    return pipeline.compose(webdataset.decode(decode)) if decode else pipeline  # type: ignore[no-any-return]  # the same


def indexed_contenders(urls: list[str], paths: list[str], folder: str) -> list[Contender]:
    """Return contenders that read samples by their indexes, which are built in a folder."""
    manifest = Manifest(build_indexes(urls, index_dir=f"{folder}/indexes"))
    local = Manifest(build_indexes(paths, index_dir=f"{folder}/indexes-of-files"))

    def samples(order: Order = "sequential", cache_dir: str | None = None, **options: Any) -> Iterable[Sample]:
        access = AccessOptions(index_dir=f"{folder}/indexes", cache_dir=cache_dir)
        return IndexedSamples(manifest, order=order, access=access, **options)

    return [
        Contender("stream", partial(ours, urls, "", None), payload),
        *(Contender(order, partial(samples, order), payload) for order in get_args(Order)),
        Contender("sequential, from copies", partial(samples, cache_dir=f"{folder}/copies"), payload),
        Contender(
            "sequential, from the disk",
            lambda: IndexedSamples(
                local, order="sequential", access=AccessOptions(index_dir=f"{folder}/indexes-of-files")
            ),
            payload,
        ),
        Contender("one field", partial(samples, fields=["cls"]), is_limit=True),
        Contender("one field, global", partial(samples, "global", fields=["cls"]), is_limit=True),
    ]


def download(url: str) -> int:
    """Read a shard, and return its size."""
    buffer = bytearray(1 << 20)
    with open_url(url) as stream:
        return sum(iter(partial(stream.readinto, buffer), 0))  # type: ignore[attr-defined]  # that of a server has it


@contextmanager
def delivered(urls: list[str], workers: int) -> Iterator[list[Contender]]:
    """Start workers; yield contenders that deliver images from them, or download the shards."""
    shards: Any = ShardList(urls).sharding_filter()
    pipes = {"ours": shards.load_wds_shards().group_samples(), RAW: shards.map(download)}
    loaders: dict[str, DataLoader2[Any]] = {
        name: DataLoader2(pipe, reading_service=ShardReadingService(num_workers=workers))
        for name, pipe in pipes.items()
    }
    yield [Contender(name, partial(iter, loader), is_limit=name == RAW) for name, loader in loaders.items()]
    for loader in loaders.values():
        loader.shutdown()


def payload(sample: Sample) -> int:
    """Return the size of the image or text in bytes, decoded or not."""
    data = sample.get("jpg", sample.get("txt"))
    return len(data) if isinstance(data, bytes) else int(getattr(data, "nbytes", 0))


def streamed(name: str, urls: list[str], paths: list[str]) -> tuple[list[Contender], str]:
    """Return contenders that read shards forward, and the name of the reference."""
    decode = "rgb8" if name == "PHOTO" else ""
    contenders = [
        Contender("ours", partial(ours, urls, decode, None), payload),
        Contender("ours, no read-ahead", partial(ours, urls, decode, 0), payload),
        Contender(LOCAL, partial(ours, paths, decode, None), payload),
        Contender(REFERENCE, partial(webdataset_pipeline, urls, decode), payload),
    ]
    if decode:
        return contenders, LOCAL
    return [*contenders, Contender("our tar reader over urllib", partial(tar_over_urllib, urls), payload)], REFERENCE


def contests_of(arguments: Namespace) -> Iterator[Contest]:
    """Yield contests whose servers run until the next one."""
    data = arguments.data

    @contextmanager
    def served(paths: list[str], server: str) -> Iterator[list[str]]:
        with store(data, *SERVERS[server]) as address:
            yield [f"{address}/{Path(path).name}" for path in paths]

    for name, servers in WORK.items():
        passes = PASSES if name == "PHOTO" and not arguments.quick else 1
        paths = SMALL_SHARDS[name].write(data, arguments.scale)
        for server in servers:
            with served(paths, server) as urls:
                title = f"{name} {'decoded' if name == 'PHOTO' else 'read'}, {server}"
                yield Contest(title, *streamed(name, urls * passes, paths * passes))
    paths = SMALL_SHARDS["IMG"].write(data, arguments.scale)
    for server in INDEXED_SERVERS:
        with served(paths, server) as urls, tempfile.TemporaryDirectory() as temporary:
            yield Contest(f"IMG by index, {server}", indexed_contenders(urls, paths, temporary), "stream")
    for server in DELIVERED_SERVERS:
        with served(paths, server) as urls:
            for workers in WORKERS:
                with delivered(urls * DELIVERIES, workers) as some:
                    title = f"IMG delivered, {server}, {workers} worker{'s' if workers > 1 else ''}"
                    yield Contest(title, some, RAW, has_workers=True)


def remote(arguments: Namespace) -> list[dict[str, Any]]:
    """Compare reading from each server."""
    return [contest.run(arguments.rounds) for contest in contests_of(arguments)]


if __name__ == "__main__":
    answer(options(__doc__), Question("remote", remote, 7), Question("stores", stores, 5), Question("parts", parts, 3))
