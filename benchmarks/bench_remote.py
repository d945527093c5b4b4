"""How fast are shards read from a web server, near and far?

    python benchmarks/bench_remote.py --json remote.json --plot remote.png

The server runs on the same machine. It responds at once and at full speed ("near"), or after 100 ms with 100 MB/s per
connection ("far"). Shards of 10 MB are read and grouped into samples, or also decoded, as a worker does in training on
images. Ours prefetches, across the ends of shards; "ours, no read-ahead" does not. webdataset reads from curl through a
pipe.

A second table compares reading samples by their indexes with streaming them, from near and with a latency of 10 ms.

Results relative to webdataset, on two cores with other load: reading from near 3.5 (4.0 without read-ahead; 2.2 and 2.8
in CPU time), from far 2.3 (1.2), at 94 of the 100 MB/s of a connection; decoding from far is as fast as from the disk,
within the spread (0.93 and 0.95). The near server uses the same two cores as the reader.

By index, relative to streaming with one connection: with 10 ms, sequential order 1.8 (370 MB/s), shuffled orders 0.7
(1,500 requests per second), and from local copies 5.8; from near 0.7, 0.2 and 2.2, since a request takes 0.4 ms of
processor time, and a thread of the server as well.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable
from functools import partial
from random import Random
from typing import Any, get_args

import numpy as np
import webdataset
from contest import Contender, Contest, options, parse, plot_contests, write_report
from datasets import SETS, DataSet, Fields, folder
from PIL import Image
from store import store
from webdataset.tariterators import tarfile_to_samples

from wds_datapipes import IndexedSamples, ShardList
from wds_datapipes.index import Manifest, build_indexes
from wds_datapipes.index.order.epoch_order import Order

Sample = dict[str, Any]
REFERENCE = "webdataset"
#: The latency in seconds, and the bandwidth of a connection in bytes per second.
SERVERS = {"near": (0.0, 1e12), "far": (0.1, 1e8)}
#: Those from which samples are read by their indexes.
INDEXED_SERVERS = {"near": (0.0, 1e12), "10 ms": (0.01, 1e8)}


def photo(random: Random, index: int) -> Fields:
    """Return an image with the detail of a JPEG file of 100 kB."""
    noise = np.frombuffer(random.randbytes(80 * 60 * 3), np.uint8).reshape(60, 80, 3)
    file = io.BytesIO()
    Image.fromarray(noise).resize((640, 480), Image.Resampling.BICUBIC).save(file, "jpeg", quality=90)
    return {"jpg": file.getvalue(), "cls": b"%d" % (index % 1000)}


#: Datasets with many small shards.
SMALL_SHARDS = {
    "read": SETS["IMG"]._replace(shards=10, samples=100),
    "decoded": DataSet("PHOTO", 10, 100, photo, SETS["IMG"].tar_format),
}


def ours(urls: list[str], decode: str, read_ahead: int | None) -> Iterable[Sample]:
    ahead = {} if read_ahead is None else {"read_ahead": read_ahead}
    samples: Any = ShardList(urls).load_wds_shards(**ahead).group_samples()
    return samples.wds_decode(decode) if decode else samples  # type: ignore[no-any-return]  # a datapipe is iterable


def webdataset_pipeline(urls: list[str], decode: str) -> Iterable[Sample]:
    pipeline = webdataset.DataPipeline(webdataset.SimpleShardList(urls), tarfile_to_samples())
    return pipeline.compose(webdataset.decode(decode)) if decode else pipeline  # type: ignore[no-any-return]  # the same


def indexed_contenders(urls: list[str], paths: list[str], folder: str) -> list[Contender]:
    """Return contenders that read samples by their indexes, which are built in a folder."""
    manifest = Manifest(build_indexes(urls, folder=f"{folder}/indexes"))
    local = Manifest(build_indexes(paths, folder=f"{folder}/indexes-of-files"))

    def samples(order: Order = "sequential", **options: Any) -> Iterable[Sample]:
        return IndexedSamples(manifest, order=order, index_folder=f"{folder}/indexes", **options)

    return [
        Contender("stream", partial(ours, urls, "", None), payload),
        *(Contender(order, partial(samples, order), payload) for order in get_args(Order)),
        Contender("sequential, from copies", partial(samples, cache_dir=f"{folder}/copies"), payload),
        Contender(
            "sequential, from the disk",
            lambda: IndexedSamples(local, order="sequential", index_folder=f"{folder}/indexes-of-files"),
            payload,
        ),
        Contender("one field", partial(samples, fields=["cls"]), is_limit=True),
        Contender("one field, global", partial(samples, "global", fields=["cls"]), is_limit=True),
    ]


def payload(sample: Sample) -> int:
    """Return the size of the image in bytes, decoded or not."""
    image = sample["jpg"]
    return len(image) if isinstance(image, bytes) else image.nbytes


def main() -> None:
    arguments = parse(options(__doc__, rounds=7))
    contests = []
    data_folder = folder(arguments.data)
    for work, data in SMALL_SHARDS.items():
        paths = data.write(data_folder, arguments.scale)
        for server, (latency_s, bytes_per_s) in SERVERS.items():
            with store(data_folder, latency_s, bytes_per_s) as address:
                urls = [f"{address}/{path.rpartition('/')[2]}" for path in paths]
                decode = "rgb8" if work == "decoded" else ""
                contest = Contest(
                    f"{data.name} {work}, {server}",
                    [
                        Contender("ours", partial(ours, urls, decode, None), payload),
                        Contender("ours, no read-ahead", partial(ours, urls, decode, 0), payload),
                        Contender("ours, from the disk", partial(ours, paths, decode, None), payload),
                        Contender(REFERENCE, partial(webdataset_pipeline, urls, decode), payload),
                    ],
                    REFERENCE,
                )
                contest.run(arguments.rounds)
            contest.show()
            contests.append(contest)
    data = SMALL_SHARDS["read"]
    paths = data.write(data_folder, arguments.scale)
    for server, (latency_s, bytes_per_s) in INDEXED_SERVERS.items():
        with store(data_folder, latency_s, bytes_per_s) as address, tempfile.TemporaryDirectory() as temporary:
            urls = [f"{address}/{path.rpartition('/')[2]}" for path in paths]
            title = f"{data.name} by index, {server}"
            contest = Contest(title, indexed_contenders(urls, paths, temporary), "stream")
            contest.run(arguments.rounds)
        contest.show()
        contests.append(contest)
    write_report(arguments.json, [contest.facts() for contest in contests])
    plot_contests(arguments.plot, contests)


if __name__ == "__main__":
    main()
