"""What a run on 64 hosts costs each of them, as bench_scale.py measures it."""

from __future__ import annotations

import io
import math
import os
import time
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from harness.processes import Cost, cost_of, in_child

from measures.starts import PROCESSES, Row, rows_of_starts
from wds_datapipes import ShardList, register_opener
from wds_datapipes.counters import Counters
from wds_datapipes.index import Manifest, read_manifest, write_manifest
from wds_datapipes.index.order.batch_share import BatchShare
from wds_datapipes.index.order.lanes import Lanes
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.sample_order import EpochOrder, LaneOrder, LengthOrder, Order, SampleOrder
from wds_datapipes.io.openers import open_url
from wds_datapipes.pipes.state.shard_order import guard_listings
from wds_datapipes.types import Instance, ShardInfo

__all__ = ["hosts"]

HOSTS, RANKS, WORKERS, BATCH = 64, 512, 8, 32_768
SHARDS, SAMPLES, MANY = 20_000, 5000, 10**6
#: How many shards a worker keeps open, and the size of an index in bytes.
OPEN_SHARDS, INDEX_BYTES = 64, 491_000
#: The size of an archive without members.
EMPTY_BYTES = 1024
#: The number of global batches that are sorted by length together, and how many windows are timed.
BUCKET_WINDOW, WINDOWS = 50, 40


@dataclass(frozen=True)
class Run:
    """A run on many hosts."""

    shards: int
    order: Order
    lanes: int

    @property
    def samples(self) -> int:
        """The number of samples in an epoch."""
        return self.shards * SAMPLES

    def epoch(self, seed: int, lengths: Numbers | None = None) -> LaneOrder:
        """Return the order of an epoch, as `IndexedSamples` makes it."""
        sizes, lanes = np.full(self.shards, SAMPLES), Lanes(self.samples, BATCH, self.lanes)
        order: SampleOrder = EpochOrder(sizes, self.order, seed=seed, lanes=self.lanes)
        if lengths is not None:
            starts = np.arange(self.shards) * SAMPLES
            order = LengthOrder(order, lengths, starts, lanes=lanes, window=BUCKET_WINDOW, seed=seed)
        return LaneOrder(order, lanes)

    def share(self, rank: int, worker: int) -> Iterator[Numbers]:
        """Yield the positions of a worker."""
        instance = Instance(rank, RANKS, worker, WORKERS)
        return BatchShare(self.samples, BATCH, "drop", instance, lanes=self.lanes).positions()

    def opens(self) -> float:
        """Return how often a worker opens a shard, for each of its samples."""
        order, opened, samples = self.epoch(1), 0, 0
        for rank, worker in ((17, 3), (RANKS - 1, WORKERS - 1)):
            readers = OrderedDict[int, None]()
            for positions in self.share(rank, worker):
                for shard in order.find(positions)[0].tolist():
                    samples += 1
                    opened += shard not in readers
                    readers[shard] = None
                    readers.move_to_end(shard)
                    if len(readers) > OPEN_SHARDS:
                        readers.popitem(last=False)
        return opened / samples

    def shards_of_host(self, seed: int, host: int = 3) -> set[int]:
        """Return the shards that a host reads in an epoch."""
        order, own = self.epoch(seed), np.arange(BATCH // HOSTS) + BATCH // HOSTS * host
        found = set[int]()
        for first in range(0, self.samples // BATCH, 64):
            batches = np.arange(first, min(first + 64, self.samples // BATCH))
            found.update(order.find((batches[:, None] * BATCH + own).ravel())[0].tolist())
        return found

    def sort_by_length(self) -> tuple[float, float]:
        """Return the CPU time of a worker for each sample in batches of similar length, and its longest pause, in s."""
        lengths = np.random.default_rng(0).integers(1, 2000, self.samples)
        order, samples, spent, longest = self.epoch(1, lengths), 0, 0.0, 0.0
        if self.lanes > 1:  # the first call imports parts of NumPy
            order.find(np.arange(BATCH // RANKS))
        windows = WINDOWS if self.lanes > 1 else 1
        for positions in self.share(17, 3):
            started = time.process_time()
            order.find(positions)
            spent, longest = spent + time.process_time() - started, max(longest, time.process_time() - started)
            samples += len(positions)
            if samples * WORKERS >= windows * BUCKET_WINDOW * BATCH // RANKS:
                break
        return spent / samples, longest


def urls_of(count: int) -> str:
    return f"s3://bucket/data/train-{{0000000..{count - 1:07d}}}.tar"


def write_manifest_of(count: int, path: str) -> None:
    write_manifest(Manifest(ShardInfo(url, SAMPLES, 10**9) for url in ShardList(urls_of(count))), path)


def cost_of_listing(count: int) -> Cost:
    """Return the cost of finding the shards of a worker in an epoch, as loaders do."""
    pipe: Any = ShardList(urls_of(count)).shuffle().sharding_filter()
    pipe.apply_sharding(RANKS * WORKERS, 5)
    reader = pipe.load_wds_shards()
    guard_listings(reader, 1)
    return cost_of(lambda: list(reader.source))


def cost_of_manifest(path: str) -> Cost:
    return cost_of(lambda: read_manifest(path))


def first_tenth(count: int) -> str:
    order = [int(url[-11:-4]) for url in ShardList(urls_of(count)).shuffle()]
    return f"shards {min(order[: count // 10]):,} to {max(order[: count // 10]):,}"


def rows_of_orders(shards: int) -> Iterator[Row]:
    before = {1: ("0.247", "20,000", "64"), 64: ("", "", ""), 512: ("", "", ""), 4096: ("", "", "")}
    for lanes, (opened, touched, downloads) in before.items():
        run = Run(shards, "window", lanes)
        named = f"window 16, {lanes:,} lane{'s' if lanes > 1 else ''}"
        opens, own, again = in_child(run.opens), in_child(run.shards_of_host, 1), in_child(run.shards_of_host, 2)
        index_bytes = opens * run.samples / HOSTS * INDEX_BYTES
        yield Row(f"{named}: shard opens per sample", opened, f"{opens:.4f}", "0.0128" if lanes > 1 else "")
        yield Row("  GB of indexes for a host and epoch", "189" if opened else "", f"{index_bytes / 1e9:.1f}", "9.8")
        yield Row("  shards that a host touches", touched, f"{len(own):,}", "312")
        yield Row("  datasets that all hosts download", downloads, f"{len(own) * HOSTS / shards:.1f}", "1.0")
        hits = len(own & again) / len(again)
        yield Row("  shards of epoch 2 that epoch 1 has read", "", f"{hits:.0%}", "at least 95 %")


def hits_of_cache(shards: int, lanes: int, part: float) -> list[float]:
    """Return which part of the shards of the second host, in three epochs, are in its cache, which holds a part."""
    register_opener("empty", lambda _, /, **_options: io.BytesIO(bytes(EMPTY_BYTES)))
    most = math.ceil(shards / HOSTS * part) * EMPTY_BYTES
    found = []
    with TemporaryDirectory() as folder:
        order: Any = ShardList(f"empty:{{0..{shards - 1}}}.tar").shuffle(lanes=lanes)
        pipe = order.sharding_filter().cache_wds_shards(folder, max_bytes=most, prefetch=0)
        pipe.source.apply_sharding(HOSTS, 1)
        for epoch in range(3):
            order.set_seed(epoch)
            counters = Counters()
            for url in pipe:
                open_url(url, counters=counters).close()
            figures = counters.figures()
            found.append(figures["cache_hits"] / (figures["cache_hits"] + figures["cache_misses"]))
    return found


def rows_of_caches(shards: int) -> Iterator[Row]:
    for lanes, part, before, goal in ((1, 1, "0, 1.5, 3.0 %", ""), (512, 1, "", "95 %"), (512, 0.5, "", "47.5 %")):
        named = f"hits of .cache_wds_shards(), {lanes:,} lane{'s' if lanes > 1 else ''}, disks of {part:.0%}"
        hits = [f"{100 * each:.1f}" for each in in_child(hits_of_cache, shards, lanes, part)]
        yield Row(named, before, f"{', '.join(hits)} %", goal)


def rows_of_lengths(shards: int) -> Iterator[Row]:
    for lanes, before in ((1, "1,200 to 1,500"), (512, ""), (4096, "")):
        spent, longest = in_child(Run(shards, "window", lanes).sort_by_length)
        figure = f"bucket_by, µs per sample, {lanes:,} lane{'s' if lanes > 1 else ''}"
        yield Row(figure, before, f"{1e6 * spent:,.1f}", "5" if lanes > 1 else "use lanes")
        yield Row("  longest pause of a worker, ms", "seconds" if before else "", f"{1e3 * longest:,.1f}", "")


def rows_of_lists(many: int) -> Iterator[Row]:
    yield Row(f"first tenth of {many // 10:,} shuffled shards", "0 to 19,940", first_tenth(many // 10), "all")
    cost = in_child(cost_of_listing, many)
    yield Row(f"a worker's shards of {many:,}, s", "2.5", f"{cost.cpu_s:.2f}", "0.2")
    with TemporaryDirectory() as folder:
        path = os.fspath(Path(folder, "manifest.json"))
        in_child(write_manifest_of, many, path)
        cost = in_child(cost_of_manifest, path)
    yield Row(f"read_manifest of {many:,} shards, s", "10.3", f"{cost.cpu_s:.2f}", "1")
    yield Row("  MiB", "661", f"{cost.bytes / (1 << 20):.0f}", "150")


def hosts(arguments: Namespace) -> dict[str, Any]:
    """Count and measure, with smaller lists on a smaller scale."""
    shards, many = max(int(SHARDS * arguments.scale), RANKS), max(int(MANY * arguments.scale), 20_000)
    starts = rows_of_starts(64, PROCESSES if arguments.scale >= 1 else PROCESSES[:1])
    rows = (starts, rows_of_orders(shards), rows_of_caches(shards), rows_of_lengths(shards), rows_of_lists(many))
    return {"ranks": RANKS, "workers": WORKERS, "shards": shards, "rows": list(chain(*rows))}
