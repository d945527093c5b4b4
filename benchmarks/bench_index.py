"""How fast are indexes built, and samples read by them, and what does it cost to plan an epoch of a very large dataset?

    python benchmarks/bench_index.py --sets SMALL IMG

Each contender yields all samples of the same local shards, in the page cache, with their fields as bytes. "stream"
reads whole shards with ``.load_wds_shards().group_samples()``. The others are the orders of ``IndexedSamples``, from a
manifest. "one field" reads only the smallest field of each sample. "pread" reads the files of each sample by their
offsets, and makes no sample and checks no header: "shuffled" shows what another order alone takes.

Indexes are built in one process: "ours" has keys and fields, and "ours, with SHA-256" also reads the data. "tar, as
wds2idx" runs GNU tar twice and parses its output, as DALI's tool does. "mapped, as wids" scans a memory map and reads
only the size and name of ustar headers, as wids does: it supports neither checksums nor long names nor end markers.

A last table shows the time and memory to begin an epoch of 10,000 samples in each of a million shards, and to find
256 positions in it.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import subprocess
import tarfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import webdataset
from harness.contest import Contender
from harness.datasets import SETS, contests_on_sets
from harness.processes import cost_of, in_child
from harness.questions import Question, answer, options

from wds_datapipes import IndexedSamples, ShardList
from wds_datapipes.index import IndexOptions, Manifest, build_index, build_indexes
from wds_datapipes.index.order.sample_order import EpochOrder, Order

REFERENCE = "webdataset"
#: The dataset whose epochs are planned, and their orders.
SHARDS, SAMPLES = 10**6, 10**4
PLANNED: Sequence[Order] = ("global", "window")


def payload(sample: dict[str, Any]) -> int:
    return sum(len(value) for value in sample.values() if isinstance(value, bytes))


Places = Sequence[Sequence[tuple[str, int, int]]]
"""For each sample, the shard, the offset and the size of each of its files."""


def places_of(urls: list[str]) -> Places:
    found: list[list[tuple[str, int, int]]] = []
    for url in urls:
        with tarfile.open(url) as archive:
            for _, members in itertools.groupby(archive, lambda member: member.name.partition(".")[0]):
                found.append([(url, member.offset_data, member.size) for member in members])
    return found


def pread(places: Places) -> Iterator[int]:
    """Yield the number of bytes that were read of each sample."""
    descriptors = {url: os.open(url, os.O_RDONLY) for url in {url for sample in places for url, *_ in sample}}
    try:
        for sample in places:
            data = [os.pread(descriptors[url], size, offset) for url, offset, size in sample]
            yield sum(map(len, data))
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def contenders(urls: list[str]) -> list[Contender]:
    manifest = Manifest(build_indexes(urls))
    places = places_of(urls)
    shuffled = random.Random(0).sample(places, len(places))
    orders: Sequence[Order] = ("sequential", "window", "global")
    return [
        Contender(REFERENCE, lambda: webdataset.WebDataset(urls, shardshuffle=False), payload),
        Contender("stream", lambda: ShardList(urls).load_wds_shards().group_samples(), payload),
        *(Contender(order, partial(IndexedSamples, manifest, order=order), payload) for order in orders),
        Contender(
            "one field", lambda: IndexedSamples(manifest, order="sequential", fields=["cls"]), payload, is_limit=True
        ),
        Contender("pread, in order", lambda: pread(places), int, is_limit=True),
        Contender("pread, shuffled", lambda: pread(shuffled), int, is_limit=True),
    ]


#: The name of a member, the offset of its data, and its size.
MemberLocation = tuple[str, int, int]
BUILT_BY = "tarfile"


def by_ours(urls: list[str], *, digest: bool = False) -> Iterator[MemberLocation]:
    for url in urls:
        index = build_index(url, options=IndexOptions(digest=digest))
        columns = index.columns
        offsets, sizes = columns["member_offsets"].tolist(), columns["member_sizes"].tolist()
        yield from zip(map(index.fields.__getitem__, columns["member_fields"].tolist()), offsets, sizes, strict=True)


def by_tarfile(urls: list[str]) -> Iterator[MemberLocation]:
    for url in urls:
        with tarfile.open(url, "r:") as archive:
            for member in archive:
                if member.isreg():
                    yield member.name, member.offset_data, member.size


def by_gnu_tar(urls: list[str]) -> Iterator[MemberLocation]:
    for url in urls:
        commands = [["tar", "--list", "--block-num", "--file", url], ["tar", "-tv", "--numeric-owner", "--file", url]]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
        blocks, types = [each.communicate()[0].split(b"\n") for each in running]
        for block, line in zip(blocks, types, strict=False):
            if block and line[:1] == b"-":
                block_number, _, name = block.partition(b": ")
                yield os.fsdecode(name), (int(block_number[6:]) + 1) * 512, int(line.split(maxsplit=5)[2])


def by_map(urls: list[str]) -> Iterator[MemberLocation]:
    for url in urls:
        with Path(url).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            at = 0
            while at < len(view) and view[at]:
                size = int(view[at + 124 : at + 135].strip(b"\0 "), 8)
                if view[at + 156] == ord("0"):
                    yield view[at : at + 100].partition(b"\0")[0].decode(), at + 512, size
                at += 512 + size + -size % 512


def member_size(member: MemberLocation) -> int:
    return member[2]


def builders(urls: list[str]) -> list[Contender]:
    return [
        Contender("ours", lambda: by_ours(urls), member_size),
        Contender("ours, with SHA-256", lambda: by_ours(urls, digest=True), member_size),
        Contender(BUILT_BY, lambda: by_tarfile(urls), member_size),
        Contender("tar, as wds2idx", lambda: by_gnu_tar(urls), member_size),
        Contender("mapped, as wids", lambda: by_map(urls), member_size),
    ]


def plan(order: Order) -> dict[str, Any]:
    """Return the seconds to begin an epoch and to find positions, and the growth of memory in MB."""
    sizes = np.full(SHARDS, SAMPLES)
    times = [time.perf_counter()]

    def begin_and_find() -> EpochOrder:
        epoch = EpochOrder(sizes, order, seed=0)
        times.append(time.perf_counter())
        epoch.find(np.arange(SHARDS, SHARDS + 256))
        times.append(time.perf_counter())
        return epoch

    cost = cost_of(begin_and_find)
    begin_s, find_s = np.diff(times).tolist()
    return {"order": order, "begin_s": begin_s, "find_s": find_s, "grown_mb": cost.bytes / 1e6}


def indexed(arguments: Namespace) -> list[dict[str, Any]]:
    """Read and build indexes on each dataset, and plan an epoch."""
    return [
        *contests_on_sets(arguments, "Read {} by index", contenders, REFERENCE),
        *contests_on_sets(arguments, "Index {}", builders, BUILT_BY, unit="member"),
        *(in_child(plan, order) for order in PLANNED),
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS, help="the datasets (all)")
    answer(parser, Question("indexed", indexed, 7))


if __name__ == "__main__":
    main()
