"""How fast are samples read by their indexes, and what does it cost to plan an epoch of a very large dataset?

    python benchmarks/bench_indexed.py --json indexed.json --plot indexed.png

Each contender yields all samples of the same local shards, in the page cache, with their fields as bytes. "stream"
reads whole shards with ``.load_wds_shards().group_samples()``. The others are the orders of ``IndexedSamples``, from a
manifest. "one field" reads only the smallest field of each sample. "pread" reads the files of each sample by their
offsets, and makes no sample and checks no header: "shuffled" shows what another order alone takes.

A second table shows the time and memory to begin an epoch of 10,000 samples in each of a million shards, and to find
256 positions in it.
"""

from __future__ import annotations

import itertools
import os
import random
import resource
import tarfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import webdataset
from contest import Contender, in_child, plot_contests, write_report
from datasets import run_on_sets
from rich.console import Console
from rich.table import Table

from wds_datapipes import IndexedSamples, ShardList
from wds_datapipes.index import Manifest, build_indexes
from wds_datapipes.index.order.sample_order import EpochOrder, Order

REFERENCE = "webdataset"
SHARDS, SAMPLES = 10**6, 10**4


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


def plan(order: Order) -> dict[str, Any]:
    """Return the seconds to begin an epoch and to find positions, and the growth of memory in MB."""
    sizes = np.full(SHARDS, SAMPLES)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    epoch = EpochOrder(sizes, order, seed=0)
    begun = time.perf_counter()
    epoch.find(np.arange(SHARDS, SHARDS + 256))
    found = time.perf_counter()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"order": order, "begin_s": begun - started, "find_s": found - begun, "grown_mb": grown}


def main() -> None:
    arguments, contests = run_on_sets(__doc__, "Read {} by index", contenders, reference=REFERENCE, rounds=7)
    table = Table("order", "begin (s)", "find 256 (s)", "memory (MB)", title="An epoch of 10¹⁰ samples in 10⁶ shards")
    plans = [in_child(plan, order) for order in ("global", "window")]
    for each in plans:
        table.add_row(each["order"], f"{each['begin_s']:.3f}", f"{each['find_s']:.3f}", f"{each['grown_mb']:.0f}")
    Console().print(table)
    write_report(arguments.json, [*(contest.facts() for contest in contests), *plans])
    plot_contests(arguments.plot, contests)


if __name__ == "__main__":
    main()
