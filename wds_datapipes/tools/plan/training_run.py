"""Plan of a run: what its hosts read and store, computed from the sample order without reading the data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np

from wds_datapipes.arguments import check_choice, check_integer, check_optional_integer
from wds_datapipes.index.format.manifest import Manifest
from wds_datapipes.index.format.options import HELD_BYTES
from wds_datapipes.index.order.batch_share import BatchShare, Remainder
from wds_datapipes.index.order.lanes import Lanes, check_lanes
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.sample_order import EpochOrder, LaneOrder, Order
from wds_datapipes.index.read.open_shards import OPENED_AT_ONCE
from wds_datapipes.index.read.plan import GROUPS, MAX_REQUEST_GAP_BYTES, gap_of
from wds_datapipes.seeds import derived_seed
from wds_datapipes.shard_cache.download import BLOCK_BYTES, COMMON_PARTS
from wds_datapipes.shard_cache.eviction import LeastRecentlyUsed
from wds_datapipes.tools.plan.planned_cache import PlannedCache
from wds_datapipes.types import Instance

#: The maximum number of samples per host and epoch for which the order is computed. With more samples, part of each
MAX_SAMPLES = 1 << 18
#: The number of samples that a worker reads before the next worker's turn.
TURN = 1024
#: The memory of an index in bytes per sample, for samples with two fields.
INDEX_BYTES = 100
#: Figures beyond these bounds cause a warning.
MAX_OPENS, MAX_LOSS, MIN_SPREAD = 0.05, 0.01, 64

_COUNTS = (
    *("hosts", "ranks_per_host", "num_workers", "global_batch_size", "lanes"),
    *("window_shards", "open_shards", "read_ahead", "epochs"),
)


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """The processes of a run and how they read an indexed dataset; see `IndexedSamples`.

    Args:
        hosts: the number of hosts.
        ranks_per_host: the number of ranks on each host.
        num_workers: the number of workers per rank.
        global_batch_size: the number of samples in the batches of all ranks together.
        order: the order of the samples.
        lanes: the number of lanes.
        window_shards: the number of shards that ``order="window"`` shuffles together.
        remainder: what to do with the samples after the last full batch.
        open_shards: the maximum number of shards that a process keeps open.
        read_ahead: the size of the samples that a process reads ahead, in bytes.
        cache_bytes: the maximum total size of the copies on each host, in bytes; None means no cache.
        epochs: the number of epochs.
        steps_per_s: the number of steps per second.
        seed: the seed of the run.

    Raises:
        ValueError: a number is not positive.
    """

    hosts: int = 1
    ranks_per_host: int = 8
    num_workers: int = 8
    global_batch_size: int
    order: Order = "window"
    lanes: int = 1
    window_shards: int = 16
    remainder: Remainder = "drop"
    open_shards: int = 128
    read_ahead: int = HELD_BYTES
    cache_bytes: int | None = None
    epochs: int = 3
    steps_per_s: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in _COUNTS:
            check_integer(name, getattr(self, name), 1)
        check_choice("order", self.order, Order)
        check_choice("remainder", self.remainder, Remainder)
        check_optional_integer("cache_bytes", self.cache_bytes, 1)
        if not 0 < self.steps_per_s < math.inf:
            raise ValueError(f"steps_per_s must be a positive number, not {self.steps_per_s}")

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True)
class RunPlan:
    """The reads and the storage of each host of a run, measured on its first host.

    Attributes:
        steps: the number of steps per epoch.
        unread: the number of samples that an epoch drops, or repeats to fill its last batch.
        idle_workers: the number of workers of each rank that get no batch.
        shards_per_batch: the number of shards that contribute samples to a global batch.
        shards_per_host: the number of shards from which a host reads, per epoch and in all epochs.
        opens_per_sample: the number of shards that a worker opens, including their indexes, per sample.
        requests_per_sample: the number of requests to the storage per sample, without a cache.
        requests_per_s: the requests of all hosts per second.
        bytes_per_epoch: the bytes that a host fetches in each epoch, either samples or, with a cache, whole shards.
        hit_rates: the fraction of the shards needed in each epoch that a host finds in its cache; empty without a
            cache.
        cache_bytes: the size of a cache in which every epoch after the first finds all its shards, in bytes.
        worker_bytes: the memory of a worker for open indexes, samples read ahead, and downloads of copies, in bytes.
        warnings: the problems of this shape, each with the argument to change.
    """

    steps: int
    unread: int
    idle_workers: int
    shards_per_batch: int
    shards_per_host: tuple[int, int]
    opens_per_sample: float
    requests_per_sample: float
    requests_per_s: float
    bytes_per_epoch: tuple[int, ...]
    hit_rates: tuple[float, ...]
    cache_bytes: int
    worker_bytes: int
    warnings: tuple[str, ...] = ()


def plan_run(manifest: Manifest, shape: RunShape) -> RunPlan:
    """Return what each host of a run reads and stores, computed from the order of the samples.

    Args:
        manifest: the dataset, with the sizes of its shards.
        shape: the run.

    Raises:
        ValueError: the run is impossible, for example because its ranks cannot share a batch evenly; or the manifest
            lacks shard sizes.

    Examples:
        >>> from wds_datapipes.writing import ShardInfo
        >>> manifest = Manifest([ShardInfo(f"{n}.tar", 1000, 10**8) for n in range(64)])
        >>> shape = RunShape(hosts=4, ranks_per_host=2, num_workers=2, global_batch_size=64, lanes=8)
        >>> plan = plan_run(manifest, shape)
        >>> plan.steps, plan.shards_per_host
        (1000, (16, 16))
    """
    if not all(manifest.sizes):
        raise ValueError("The manifest lacks the sizes of some shards, in bytes. Write it from build_indexes")
    check_lanes(shape.lanes, shape.global_batch_size, manifest.samples)
    return _Planner(manifest, shape).plan()


class _Planner:
    """Computes the figures of a run.

    Args:
        manifest: the dataset.
        shape: the run.
    """

    def __init__(self, manifest: Manifest, shape: RunShape) -> None:
        self.shape, self.counts, self.sizes = shape, manifest.counts, manifest.sizes
        self.samples = manifest.samples
        self.lanes = Lanes(self.samples, shape.global_batch_size, shape.lanes)
        #: The workers of the first host: the first worker of each of its ranks, then the second, and so on.
        self.workers = [
            Instance(rank, shape.ranks, worker, shape.num_workers)
            for worker in range(shape.num_workers)
            for rank in range(shape.ranks_per_host)
        ]
        self.steps = self.share(self.workers[0]).whole_batches
        self.sample_bytes = int(self.sizes.sum()) / self.samples
        self.own = shape.global_batch_size // shape.hosts

    def share(self, instance: Instance) -> BatchShare:
        shape = self.shape
        return BatchShare(self.samples, shape.global_batch_size, shape.remainder, instance, lanes=shape.lanes)

    def order(self, epoch: int) -> LaneOrder:
        shape = self.shape
        seed = derived_seed("epoch", shape.seed, epoch)
        order = EpochOrder(self.counts, shape.order, seed=seed, window_shards=shape.window_shards, lanes=shape.lanes)
        return LaneOrder(order, self.lanes)

    def plan(self) -> RunPlan:
        shape = self.shape
        orders = [self.order(epoch) for epoch in range(shape.epochs)]
        uses = [self.runs_of_host(order) for order in orders]
        needed = [np.unique(np.concatenate([shards for _, shards in epoch])) for epoch in uses]
        touched = np.unique(np.concatenate(needed))
        opens, requests, sample_bytes = self.reads(orders[0])
        batch = np.arange(min(shape.global_batch_size, self.samples))
        fetched: list[int] = [int(self.own * self.steps * sample_bytes)] * shape.epochs
        hits: list[float] = []
        if shape.cache_bytes is not None:
            cache = PlannedCache(self.sizes, shape.cache_bytes, shape.open_shards)
            downloads = [cache.read_epoch((worker, run.tolist()) for worker, run in epoch) for epoch in uses]
            fetched = [int(self.sizes[epoch].sum()) for epoch in downloads]
            hits = [1 - len({*some}) / len(all_) for some, all_ in zip(downloads, needed, strict=True)]
        copied = 0 if shape.cache_bytes is None else (COMMON_PARTS + 2 * OPENED_AT_ONCE) * BLOCK_BYTES
        rest = self.samples % shape.global_batch_size
        unread = {"drop": rest, "pad": -self.samples % shape.global_batch_size, "keep": 0}[shape.remainder]
        per_shard = int(self.counts.max())
        plan = RunPlan(
            steps=self.steps,
            unread=unread,
            idle_workers=max(0, shape.num_workers - self.steps),
            shards_per_batch=len(np.unique(orders[0].find(batch)[0])),
            shards_per_host=(round(sum(map(len, needed)) / shape.epochs), len(touched)),
            opens_per_sample=round(opens, 6),
            requests_per_sample=round(requests, 6),
            requests_per_s=round(requests * shape.global_batch_size * shape.steps_per_s, 3),
            bytes_per_epoch=tuple(fetched),
            hit_rates=tuple(round(rate, 4) for rate in hits),
            cache_bytes=int(self.sizes[touched].sum()),
            worker_bytes=shape.open_shards * per_shard * INDEX_BYTES + shape.read_ahead + copied,
        )
        return RunPlan(**{**vars(plan), "warnings": tuple(self.warnings(plan))})

    def runs_of_host(self, order: LaneOrder) -> list[tuple[int, Numbers]]:
        """Return the shards that each worker of the first host reads in its successive turns."""
        every = min(-(-self.steps * self.own // MAX_SAMPLES), self.own)
        shares = [
            chain.from_iterable(
                np.split(each, range(TURN, len(each), TURN)) for each in self.share(instance).positions()
            )
            for instance in self.workers
        ]
        runs = []
        for turn in zip_longest(*shares):
            for worker, positions in enumerate(turn):
                if positions is not None:
                    shards = order.find(positions[::every])[0]
                    runs.append((worker, shards[np.diff(shards, prepend=-1) != 0]))
        return runs

    def reads(self, order: LaneOrder) -> tuple[float, float, float]:
        """Return the numbers of opened shards, of requests and of fetched bytes, each per sample of a worker."""
        done = opens = ranges = between = 0
        ahead = max(int(self.shape.read_ahead // GROUPS / self.sample_bytes), 1)
        gap = 1 + gap_of(self.sample_bytes, MAX_REQUEST_GAP_BYTES) / self.sample_bytes
        for instance in self.workers:
            opened = LeastRecentlyUsed[int, None](self.shape.open_shards)
            for positions in self.share(instance).positions():
                shards, numbers = order.find(positions)
                is_change = np.diff(shards, prepend=-1) != 0
                for shard in shards[is_change].tolist():
                    if shard in opened:
                        opened.use(shard)
                    else:
                        opens += 1
                        opened.add(shard, None)
                for start in range(0, len(shards), ahead):  # samples that are read ahead together
                    some, of = numbers[start : start + ahead], shards[start : start + ahead]
                    by_place = np.lexsort((some, of))
                    steps = np.diff(some[by_place])
                    is_next = (np.diff(of[by_place]) == 0) & (steps <= gap)
                    ranges += len(some) - int(is_next.sum())
                    between += int((steps[is_next] - 1).sum())  # samples fetched only because they lie between others
                done += len(positions)
            if done > MAX_SAMPLES:
                break
        return opens / max(done, 1), (opens + ranges) / max(done, 1), (1 + between / max(done, 1)) * self.sample_bytes

    def warnings(self, plan: RunPlan) -> Iterator[str]:
        """Yield the problems of a plan, each with the argument to change."""
        shape, total = self.shape, len(self.counts)
        fair = -(-total // shape.hosts)
        if plan.idle_workers:
            yield (
                f"there is no batch for {plan.idle_workers} of {shape.num_workers} workers, because an epoch has only "
                f"{plan.steps}: choose a smaller num_workers or global_batch_size"
            )
        if shape.hosts > 1 and plan.shards_per_host[1] > 2 * fair:
            lanes = math.lcm(shape.ranks, shape.lanes)
            divides = shape.global_batch_size % lanes == 0
            choice = f"lanes={lanes}" if divides else "lanes that the number of ranks divides"
            yield (
                f"each host reads {plan.shards_per_host[1]} of {total} shards, but needs only {fair}: choose {choice}"
            )
        if shape.lanes > 1 and shape.lanes % shape.ranks:
            yield f"{shape.ranks} ranks do not divide {shape.lanes} lanes, so some ranks read the same shards"
        if plan.opens_per_sample > MAX_OPENS:
            window = 'order="window", ' if shape.order == "global" else ""
            rate = f"{1 / plan.opens_per_sample:.3g}"
            samples = "sample" if rate == "1" else f"{rate} samples"
            yield (
                f"a worker opens a shard for every {samples}: choose {window}more lanes, "
                "a smaller window_shards, or a larger open_shards"
            )
        if plan.hit_rates and shape.epochs > 1 and min(plan.hit_rates[1:]) < 1 - MAX_OPENS:
            yield f"the cache is too small for what a host reads: choose cache_bytes={plan.cache_bytes}, or more lanes"
        if plan.unread > MAX_LOSS * self.samples:
            what = "repeats" if shape.remainder == "pad" else "drops"
            yield f"an epoch {what} {plan.unread} of {self.samples} samples: choose a smaller global_batch_size"
        if plan.shards_per_batch < min(MIN_SPREAD, shape.global_batch_size, total) // 2:
            yield (
                f"a batch has samples from only {plan.shards_per_batch} of {total} shards: choose more lanes or a "
                "larger window_shards"
            )
