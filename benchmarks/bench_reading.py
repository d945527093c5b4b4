"""How fast are shards read and grouped into samples?

    python benchmarks/bench_reading.py --json reading.json --plot reading.png

Each contender yields the samples of the same local shards, in the page cache, as dicts of bytes. Counts and bytes are
compared before anything is timed. "raw read" only reads the files, 1 MiB at a time: the limit of the machine.

Results relative to webdataset: SMALL 14.3, IMG 5.7 and BIG 5.3, where the raw read has 233, 12.2 and 8.1. On one core
of another processor (spread 1 to 3 %): SMALL 12.9 (256,000 samples/s), PAX 13.0 (125,000 samples/s), IMG 5.2 (4.5 GB/s)
and BIG 5.5 to 7.7 (10.6 GB/s). tarfile with manual grouping is about as fast as webdataset on SMALL, so tarfile
dominates the cost there. On IMG and BIG, most of the time is spent on copying from the page cache. If other programs
use the memory at the same time, copying takes longer, and the ratio decreases to 4.5 on IMG and 4.6 on BIG.
"""

from __future__ import annotations

import tarfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import webdataset
from contest import Contender, plot_contests, write_report
from datasets import run_on_sets
from torch.utils.data.datapipes.iter import FileOpener, IterableWrapper
from webdataset.tariterators import tarfile_to_samples

from wds_datapipes import ShardList
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.shards.loading import read_shards

with warnings.catch_warnings():
    # torchdata's deprecation warning
    warnings.simplefilter("ignore")
    import torchdata.datapipes.iter  # noqa: F401  registers load_from_tar and webdataset

Sample = dict[str, Any]
REFERENCE = "webdataset"


def ours_through_pipes(urls: list[str]) -> Iterable[Sample]:
    pipe: Iterable[Sample] = ShardList(urls).load_wds_shards().group_samples()
    return pipe


def ours_without_pipes(urls: list[str]) -> Iterable[Sample]:
    return group_samples(read_shards(urls))


def webdataset_pipeline(urls: list[str]) -> Iterable[Sample]:
    pipeline: Iterable[Sample] = webdataset.DataPipeline(webdataset.SimpleShardList(urls), tarfile_to_samples())
    return pipeline


def torchdata_pipes(urls: list[str]) -> Iterator[Sample]:
    pipe = FileOpener(IterableWrapper(urls), mode="b").load_from_tar(mode="r:").webdataset()
    for sample in pipe:
        yield {key: value if key == "__key__" else value.read() for key, value in sample.items()}


def plain_tarfile(urls: list[str], mode: str) -> Iterator[Sample]:
    """A typical manual implementation."""
    for url in urls:
        sample: Sample = {}
        with tarfile.open(url, mode) as archive:  # type: ignore[call-overload]  # the mode is one of two, in a variable
            for member in archive:
                if not member.isreg():
                    continue
                directory, slash, base = member.name.rpartition("/")
                stem, _, field = base.partition(".")
                key = directory + slash + stem
                if key != sample.get("__key__"):
                    if sample:
                        yield sample
                    sample = {"__key__": key}
                sample[field] = archive.extractfile(member).read()
                archive.members = []  # otherwise it keeps a record of each member until it is closed
        if sample:
            yield sample


def payload(sample: Sample) -> int:
    return sum(len(value) for value in sample.values() if type(value) is bytes)


def raw_read(urls: list[str]) -> Iterator[int]:
    buffer = bytearray(1024 * 1024)
    for url in urls:
        with Path(url).open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                yield count


def contenders(urls: list[str]) -> list[Contender]:
    return [
        Contender("ours, through the pipes", lambda: ours_through_pipes(urls), payload),
        Contender("ours, without pipes", lambda: ours_without_pipes(urls), payload),
        Contender(REFERENCE, lambda: webdataset_pipeline(urls), payload),
        Contender("torchdata load_from_tar, grouped", lambda: torchdata_pipes(urls), payload),
        Contender("tarfile r|, grouped manually", lambda: plain_tarfile(urls, "r|"), payload),
        Contender("tarfile r:, grouped manually", lambda: plain_tarfile(urls, "r:"), payload),
        Contender("raw read, nothing parsed", lambda: raw_read(urls), int, is_limit=True),
    ]


def main() -> None:
    arguments, contests = run_on_sets(__doc__, "Read and group {}", contenders, reference=REFERENCE, rounds=9)
    write_report(arguments.json, [contest.facts() for contest in contests])
    plot_contests(arguments.plot, contests)


if __name__ == "__main__":
    main()
