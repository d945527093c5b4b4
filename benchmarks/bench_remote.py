"""How fast are shards read from a web server, near and far?

    python benchmarks/bench_remote.py --json remote.json --plot remote.png

The server runs on the same machine. It responds at once and at full speed ("near"), or after 10 or 100 ms with 100 MB/s
per connection. Shards of 10 MB are read and grouped into samples, or also decoded, as a worker does in training on
images. Ours prefetches from the distant server, across the ends of shards; "ours, no read-ahead" does not. webdataset
reads from curl through a pipe. "our tar reader over urllib" is a limit: what reading costs without retries, time limits
and checks.

Another table compares reading samples by their indexes with streaming them, from the near server and with a latency of
10 ms. The last one compares loaders with 1, 2 and 8 workers, which deliver images to the loop, with as many workers
that download the same shards by the same client, each on one connection, without parsing or delivering them.

By index, relative to streaming: with 10 ms, sequential order 2.2, shuffled orders 1.2; from the near server 0.7 and
0.35, because each request takes processor time.

Delivered from 1, 2 and 8 workers, relative to the raw download: with 10 ms, 3.3, 3.1 and 1.1; from the near server
about 0.3, because parsing and delivery take processor time, and downloading takes little.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any, get_args
from urllib.request import urlopen

import numpy as np
import webdataset
from contest import Contender, Contest, options, parse, plot_contests, write_report
from datasets import SETS, DataSet, Fields, folder
from PIL import Image
from store import store
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


def main() -> None:
    arguments = parse(options(__doc__, rounds=7))
    contests = []
    data_folder = folder(arguments.data)
    for name, servers in WORK.items():
        data, passes = SMALL_SHARDS[name], PASSES if name == "PHOTO" and not arguments.quick else 1
        paths = data.write(data_folder, arguments.scale)
        for server in servers:
            with store(data_folder, *SERVERS[server]) as address:
                urls = [f"{address}/{path.rpartition('/')[2]}" for path in paths]
                title = f"{name} {'decoded' if name == 'PHOTO' else 'read'}, {server}"
                contest = Contest(title, *streamed(name, urls * passes, paths * passes))
                contest.run(arguments.rounds)
            contest.show()
            contests.append(contest)
    paths = SMALL_SHARDS["IMG"].write(data_folder, arguments.scale)
    for server in INDEXED_SERVERS:
        with store(data_folder, *SERVERS[server]) as address, tempfile.TemporaryDirectory() as temporary:
            urls = [f"{address}/{path.rpartition('/')[2]}" for path in paths]
            contest = Contest(f"IMG by index, {server}", indexed_contenders(urls, paths, temporary), "stream")
            contest.run(arguments.rounds)
        contest.show()
        contests.append(contest)
    for server in DELIVERED_SERVERS:
        with store(data_folder, *SERVERS[server]) as address:
            urls = [f"{address}/{path.rpartition('/')[2]}" for path in paths] * DELIVERIES
            for workers in WORKERS:
                with delivered(urls, workers) as some:
                    title = f"IMG delivered, {server}, {workers} worker{'s' if workers > 1 else ''}"
                    contest = Contest(title, some, RAW, has_workers=True)
                    contest.run(arguments.rounds)
                contest.show()
                contests.append(contest)
    write_report(arguments.json, [contest.facts() for contest in contests])
    plot_contests(arguments.plot, contests)


if __name__ == "__main__":
    main()
