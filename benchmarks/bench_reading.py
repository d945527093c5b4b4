"""How fast are shards read and grouped into samples, and with how much memory?

    python benchmarks/bench_reading.py --only reading --sets SMALL IMG

**reading**: Each contender yields the samples of the same local shards, in the page cache, as dicts of bytes. Counts
and bytes are compared before anything is timed. "raw read" only reads the files, 1 MiB at a time: the limit of the
machine.

**memory**: The additional memory of each contender at its peak, while it reads members of 4 MiB in a process of its own
(VmHWM, on Linux only). A consumer holds its last sample while the next one is read, so two members,
8.4 MB, are the least to expect.
"""

from __future__ import annotations

import statistics
import tarfile
import warnings
from argparse import Namespace
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import webdataset
from harness.contest import Contender
from harness.datasets import SETS, contests_on_sets
from harness.processes import cost_of, in_child
from harness.questions import Question, answer, options
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


def read(name: str, urls: list[str]) -> None:
    next(contender for contender in contenders(urls) if contender.name == name).run()


def measure_memory(name: str, small: list[str], big: list[str]) -> int:
    """Return the additional memory of reading some shards, in bytes, after others were read."""
    read(name, small)
    return cost_of(partial(read, name, big)).bytes


def reading(arguments: Namespace) -> list[dict[str, Any]]:
    """Compare the speed on each dataset."""
    return contests_on_sets(arguments, "Read and group {}", contenders, REFERENCE)


def memory(arguments: Namespace) -> dict[str, Any]:
    """Compare the memory, each contender in processes of its own."""
    small = in_child(SETS["SMALL"].write, arguments.data, 0.02)
    big = in_child(SETS["BIG"].write, arguments.data, max(arguments.scale, 0.2))
    found = {}
    for contender in contenders(big):
        sizes = [in_child(measure_memory, contender.name, small, big) / 1e6 for _ in range(arguments.rounds)]
        found[contender.name] = {"mb": statistics.median(sizes), "least": min(sizes), "most": max(sizes)}
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS, help="the datasets (all)")
    answer(parser, Question("reading", reading, 9), Question("memory", memory, 3))


if __name__ == "__main__":
    main()
