"""What does a run on 64 hosts cost each of them: orders, caches, lengths, lists and manifests, counted without hosts?

    python benchmarks/bench_scale.py

Real processes start, agree, change epochs and resume. The rest is computed: the code of the package finds what some of
512 ranks with 8 workers read of 20,000 shards of 5,000 samples, with 64 samples for a rank and step. Times are those of
one process, in CPU seconds, but for processes that start. The first column has what was measured before; the last one
is the goal. `bench_merged_state.py` has the sizes of states.
"""

from __future__ import annotations

import io
import math
import multiprocessing
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import s3fs  # type: ignore[import-untyped]  # noqa: F401  before processes are forked, which would all import it
import torch
import torch.distributed as dist
from contest import in_child, options, parse
from memory import in_use, peak, reset_peak
from processes import memory
from rich.console import Console
from rich.table import Table
from store import request_count, store
from torch._C._distributed_c10d import TCPStore
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import IndexedSamples, ShardList, ShardReadingService, register_opener
from wds_datapipes.counters import Counters
from wds_datapipes.index import AccessOptions, Manifest, build_index, read_manifest, write_index, write_manifest
from wds_datapipes.index.order.batch_share import BatchShare
from wds_datapipes.index.order.lanes import Lanes
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.sample_order import EpochOrder, LaneOrder, LengthOrder, Order, SampleOrder
from wds_datapipes.io.openers import open_url
from wds_datapipes.pipes.state.shard_order import guard_listings
from wds_datapipes.testing import build_shard
from wds_datapipes.types import Instance, ShardInfo

HOSTS, RANKS, WORKERS, BATCH = 64, 512, 8, 32_768
SHARDS, SAMPLES, MANY = 20_000, 5000, 10**6
#: How many shards a worker keeps open, and the size of an index in bytes.
OPEN_SHARDS, INDEX_BYTES = 64, 491_000
#: The size of an archive without members.
EMPTY_BYTES = 1024
#: The number of global batches that are sorted by length together, and how many windows are timed.
BUCKET_WINDOW, WINDOWS = 50, 40


class Row(NamedTuple):
    """A figure: what it was, what it is, and what it should be."""

    figure: str
    before: str
    now: str
    goal: str


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


def cost_of(action: Callable[[], Any]) -> tuple[float, float]:
    """Return the CPU seconds of an action, and by how many MiB the memory of this process grows at most."""
    reset_peak()
    before, begin = in_use(), time.process_time()
    kept = action()
    spent = time.process_time() - begin
    del kept
    return spent, (peak() - before) / (1 << 20)


def urls_of(count: int) -> str:
    return f"s3://bucket/data/train-{{0000000..{count - 1:07d}}}.tar"


def write_manifest_of(count: int, path: str) -> None:
    write_manifest(Manifest(ShardInfo(url, SAMPLES, 10**9) for url in ShardList(urls_of(count))), path)


def cost_of_listing(count: int) -> tuple[float, float]:
    """Return the cost of finding the shards of a worker in an epoch, as loaders do."""
    pipe: Any = ShardList(urls_of(count)).shuffle().sharding_filter()
    pipe.apply_sharding(RANKS * WORKERS, 5)
    reader = pipe.load_wds_shards()
    guard_listings(reader, 1)
    return cost_of(lambda: list(reader.source))


def cost_of_manifest(path: str) -> tuple[float, float]:
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
    spent, _ = in_child(cost_of_listing, many)
    yield Row(f"a worker's shards of {many:,}, s", "2.5", f"{spent:.2f}", "0.2")
    with TemporaryDirectory() as folder:
        path = os.fspath(Path(folder, "manifest.json"))
        in_child(write_manifest_of, many, path)
        spent, grown = in_child(cost_of_manifest, path)
    yield Row(f"read_manifest of {many:,} shards, s", "10.3", f"{spent:.2f}", "1")
    yield Row("  MiB", "661", f"{grown:.0f}", "150")


#: How many processes of a host start together.
PROCESSES = 4, 16, 64
#: The figures of these: their names, digits and goals. The goals are for local shards: most of the time that S3 adds is
#: that of botocore, with which each process signs its requests.
STARTS = (
    ("requests until they know the shards", 0, ""),
    ("first item, s", 1, "1.9"),
    ("first item of epoch 2, s", 1, "0.6"),
    ("first item after a resume, s", 1, "1.9"),
    ("MiB (PSS) of a process", 0, "equal"),
)
LOCAL = "ShardList of local files"
STARTS_BEFORE = {
    LOCAL: ("", "1.2 to 1.9", "0.2 to 0.6", "", ""),
    "ShardList with a pattern": ("4, 16, 64", "", "", "", ""),
    "IndexedSamples with a pattern": ("516, 2064, 8256", "", "", "", ""),
    "IndexedSamples with a manifest": ("4, 16, 64", "", "", "", ""),
}


class Started(NamedTuple):
    """What a process took to start.

    Attributes:
        requests: those of all processes together until they know the shards.
        first_s: the time to the first item, in seconds.
        second_s: to that of the second epoch.
        resumed_s: to that after a resume in the middle of this epoch.
        memory: its memory (PSS) in MiB.
    """

    requests: float
    first_s: float
    second_s: float
    resumed_s: float
    memory: float


def first_item_s(loader: Any, begin: float) -> float:
    next(iter(loader))
    return time.perf_counter() - begin


def start_rank(
    rank: int, ranks: int, port: int, source: str, address: str, folder: Path, results: Any, gate: Any
) -> None:
    """Be a rank that starts, changes epoch and resumes."""
    gate.wait()  # a fork must not inherit the locks of the thread of the store, which serves the ranks before it
    torch.set_num_threads(1)
    meeting = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks)
    before = request_count(address)
    dist.barrier()
    begin = time.perf_counter()
    options = store_options(address)

    def load() -> Any:
        shards: Any = str(folder / "*.tar") if source == LOCAL else "s3://data/*.tar"
        if source.endswith("manifest"):
            shards = read_manifest("s3://data/manifest.json", storage_options=options)
        if source.startswith("IndexedSamples"):
            pipe: Any = IndexedSamples(shards, global_batch_size=ranks, access=AccessOptions(storage_options=options))
        else:
            storage = None if source == LOCAL else options
            pipe = ShardList(shards, storage_options=storage).shuffle().sharding_filter()
            pipe = pipe.load_wds_shards(storage_options=storage).group_samples()
        loader: DataLoader2[Any] = DataLoader2(pipe, reading_service=ShardReadingService(distributed=True))
        loader.seed(1)
        return loader

    loader = load()
    made_s = time.perf_counter() - begin
    dist.barrier()
    requests = request_count(address) - before
    dist.barrier()
    first_s = made_s + first_item_s(loader, time.perf_counter())
    dist.barrier()
    second_s = first_item_s(loader, time.perf_counter())
    state = loader.state_dict()
    loader.shutdown()
    dist.barrier()
    begin = time.perf_counter()
    loader = load()
    loader.load_state_dict(state)
    resumed_s = first_item_s(loader, begin)
    dist.barrier()
    results.send(Started(requests, first_s, second_s, resumed_s, memory(os.getpid()) / (1 << 20)))
    dist.barrier()
    loader.shutdown()
    dist.destroy_process_group()


def started(ranks: int, source: str, address: str, folder: Path) -> Started:
    """Return the most that any of some processes takes."""
    meeting = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fork, pairs = multiprocessing.get_context("fork"), []
    gate = fork.Event()
    for rank in range(ranks):
        ours, theirs = fork.Pipe(duplex=False)
        process = fork.Process(
            target=start_rank, args=(rank, ranks, meeting.port, source, address, folder, theirs, gate)
        )
        process.start()
        theirs.close()
        pairs.append((process, ours))
    gate.set()
    found = [ours.recv() for _, ours in pairs]
    for process, _ in pairs:
        process.join()
    return Started(*map(max, zip(*found, strict=True)))


def store_options(address: str) -> dict[str, str]:
    return {"key": "access", "secret": "secret", "endpoint_url": address}


def write_dataset(folder: Path, shards: int, address: str) -> None:
    """Write shards, their indexes and a manifest for the objects that a store makes of these files."""
    entries = []
    for number in range(shards):
        path, url = folder / f"{number:04d}.tar", f"s3://data/{number:04d}.tar"
        build_shard(path, [{"__key__": f"{number}-{n}", "cls": "1"} for n in range(4)])
        index = build_index(url, storage_options=store_options(address))
        write_index(index, f"{path}.wdsidx")
        entries.append(ShardInfo(url, len(index), path.stat().st_size))
    write_manifest(Manifest(entries), folder / "manifest.json")


def rows_of_starts(shards: int, counts: Sequence[int]) -> Iterator[Row]:
    with TemporaryDirectory() as temporary, store(Path(temporary), 0.0, 1e12) as address:
        folder = Path(temporary, "data")
        folder.mkdir()
        in_child(write_dataset, folder, shards, address)
        for source, before in STARTS_BEFORE.items():
            every = [in_child(started, processes, source, address, folder) for processes in counts]
            yield Row(f"{', '.join(map(str, counts))} processes, {source}", "", "", "")
            for (name, digits, goal), was, now in zip(STARTS, before, zip(*every, strict=True), strict=True):
                is_shared = name.startswith("requests") and "pattern" in source
                has_goal = source == LOCAL or not name.startswith("first")
                figures = ", ".join(f"{figure:.{digits}f}" for figure in now)
                yield Row(f"  {name}", was, figures, "those of 1" if is_shared else goal if has_goal else "")


def main() -> None:
    arguments = parse(options(__doc__, rounds=1))
    shards, many = max(int(SHARDS * arguments.scale), RANKS), max(int(MANY * arguments.scale), 20_000)
    table = Table(title=f"{RANKS} ranks x {WORKERS} workers, {shards:,} shards", title_justify="left")
    for number, heading in enumerate(Row._fields):
        table.add_column(heading, justify="right" if number else "left")
    counts = PROCESSES if arguments.scale >= 1 else PROCESSES[:1]
    rows = (rows_of_starts(64, counts), rows_of_orders(shards), rows_of_caches(shards), rows_of_lengths(shards))
    for row in chain(*rows, rows_of_lists(many)):
        table.add_row(*row)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
