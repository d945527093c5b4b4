"""`LoadingReport`: statistics of the workers, which show whether the loop or the workers are the bottleneck."""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wds_datapipes.counters import Skipped, sum_skipped
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.errors import plural
from wds_datapipes.parallel.progress import human_bytes
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import graph_of

LOGGER = logging.getLogger("wds_datapipes")

#: The shortest wait that counts, in seconds.
SHORTEST_S = 1e-5
#: The number of buckets per doubling of the wait, which makes percentiles accurate to a tenth.
PER_OCTAVE = 4

#: A straggler is this many times slower than the median,
SLOWER = 3
#: the loop has waited for it during this share of the time,
WAITED_SHARE = 0.05
#: and at least this time is compared, in seconds.
COMPARED_S = 10.0

#: The attributes of a worker that grow with its items.
_SUMS = "items", "received", "bytes", "making_s", "waiting_s", "waited_s", "figures", "waits"


@dataclass(frozen=True)
class WorkerReport:
    """Statistics of one worker since it started, or of all workers of a rank.

    Attributes:
        name: ``"Worker 0"``, or ``"The main process"`` if there are no workers; ``"Rank 0"`` for all workers of a rank.
        pid: the ID of its process; 0 for a rank.
        items: the number of items produced, including those that the loop has not received yet.
        bytes: the size of the items sent, in bytes; 0 in the main process.
        making_s: the time the pipeline took to produce them, in seconds, including waiting for data.
        waiting_s: the time the worker waited for the loop, in seconds.
        waited_s: the time the loop waited for this worker, in seconds.
        shard: the last shard that it opened, or ""; for a rank, that of its slowest worker.
        skipped: the items that its stages have skipped.
        received: the number of its items that the loop has received.
        ahead: the number of its items that the loop has not received yet.
        figures: further sums by name: the bytes, seconds, retries and opened connections of each store, such as
            ``"fetched_bytes/s3://bucket"`` and ``"connections/s3://bucket"``; ``"cache_hits"``, the number of shards
            read from the cache; ``"cache_misses"``, the number of shards that were downloaded or did not fit; and their
            sizes, ``"cache_hits_bytes"`` and ``"cache_misses_bytes"``; the time that a stage took to decode, in
            seconds, such as ``"decoding_s/wds_decode"``.
        waits: the number of waits of the loop, by `wait_bucket`.
        rank: the number of its rank.
        host: the name of its host.
        slowest: for a rank, the name of its slowest worker.
    """

    name: str
    pid: int
    items: int
    bytes: int
    making_s: float
    waiting_s: float
    waited_s: float
    shard: str
    skipped: Skipped
    received: int = 0
    ahead: int = 0
    figures: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    rank: int = 0
    host: str = ""
    slowest: str = ""

    @property
    def fetched_bytes(self) -> int:
        """The number of bytes received from stores."""
        return int(self._sum("fetched_bytes/"))

    @property
    def fetching_s(self) -> float:
        """The time spent waiting for stores, in seconds, summed over concurrent reads.

        It includes prefetching, which does not necessarily delay the loop.
        """
        return self._sum("fetching_s/")

    @property
    def retries(self) -> int:
        """The number of repeated requests to stores."""
        return int(self._sum("retries/"))

    @property
    def cache_hit_rate(self) -> float:
        """The share of the shards opened through a cache that it already held; 0.0 without a cache."""
        hits, misses = self.figures["cache_hits"], self.figures["cache_misses"]
        return hits / max(hits + misses, 1)

    def _sum(self, prefix: str) -> float:
        return sum((amount for name, amount in self.figures.items() if name.startswith(prefix)), 0.0)

    def wait_s(self, percent: float) -> float:
        """Return the time within which the loop received a percentage of the items, in seconds, accurate to a tenth."""
        longer = (1 - percent / 100) * max(self.received, sum(self.waits.values()))
        for seconds, count in sorted(((float(bucket), count) for bucket, count in self.waits.items()), reverse=True):
            longer -= count
            if longer < 0:
                return seconds
        return 0.0

    def item_s(self, elapsed_s: float) -> float:
        """Return the time per item, in seconds: the elapsed time if none was produced and none waits for the loop."""
        return self.making_s / self.items if self.items else elapsed_s * (self.ahead <= 0)

    def since(self, earlier: WorkerReport) -> WorkerReport:
        """Return the statistics since an earlier report of the same worker."""
        changes = {name: getattr(self, name) - getattr(earlier, name) for name in _SUMS}
        skipped = Counter(self.skipped.counts) - Counter(earlier.skipped.counts)
        return replace(self, skipped=Skipped(skipped, self.skipped.latest), **changes)

    def to_json(self) -> str:
        """Return the report as JSON, without the messages of skipped items."""
        return json.dumps({**vars(self), "skipped": self.skipped.counts})

    @classmethod
    def from_json(cls, text: str) -> WorkerReport:
        """Return the report that `to_json` wrote."""
        found = json.loads(text, object_hook=Counter)
        return cls(**{**found, "skipped": Skipped(found["skipped"])})


@dataclass(frozen=True)
class LoadingReport:
    """Statistics of the workers of a loader, or of all ranks, over all epochs so far.

    ``print(report)`` prints one line.

    Attributes:
        epoch: the number of the latest epoch, from 1; 0 before the first.
        workers: one report for each worker, or for each rank.
        elapsed_s: the time since the workers were started, in seconds.
        dispatcher: the report of the process that dispatches items to the workers, if there is one.
    """

    epoch: int
    workers: Sequence[WorkerReport]
    elapsed_s: float = field(default=0.0, compare=False)
    dispatcher: WorkerReport | None = None

    @property
    def items(self) -> int:
        """The number of items produced."""
        return sum(worker.items for worker in self.workers)

    @property
    def skipped(self) -> Skipped:
        """The items that all processes have skipped."""
        return sum_skipped(process.skipped for process in self._processes)

    @property
    def _processes(self) -> list[WorkerReport]:
        return [*self.workers, *([] if self.dispatcher is None else [self.dispatcher])]

    @property
    def total(self) -> WorkerReport:
        """The sum of all workers, under the name of their rank, with the figures of all processes."""
        slowest = max(self.workers, key=lambda each: (each.waited_s > 0, each.item_s(self.elapsed_s)), default=_NONE)
        sums = {
            name: sum((getattr(each, name) for each in self.workers), getattr(_NONE, name))
            for name in (*_SUMS, "ahead")
        }
        sums["figures"] = sum((each.figures for each in self._processes), Counter[str]())
        name, worker = f"Rank {slowest.rank}", slowest.slowest or slowest.name
        return replace(slowest, name=name, pid=0, skipped=self.skipped, slowest=worker, **sums)

    def since(self, earlier: LoadingReport) -> LoadingReport:
        """Return the statistics since an earlier report of the same loader."""
        known = {(each.name, each.pid): each for each in earlier._processes}
        recent = [each.since(known.get((each.name, each.pid), _NONE)) for each in self._processes]
        dispatcher = None if self.dispatcher is None else recent.pop()
        return LoadingReport(self.epoch, recent, self.elapsed_s - earlier.elapsed_s, dispatcher)

    def as_dict(self) -> dict[str, int | float | str]:
        """Return the statistics as a flat dictionary, for tools that plot or store them.

        Names end in their unit, which the store may follow: ``"fetched_bytes_per_s/s3://bucket"``. Besides the sums of
        `WorkerReport`, there are ``"waited_share"``, the share of the time that the loop has waited, and percentiles
        such as ``"wait_p99_s"``, the time within which it received 99% of the items.
        """
        total, per_s = self.total, 1 / self.elapsed_s if self.elapsed_s else 0.0
        sums = (*_SUMS[:-2], "fetched_bytes", "fetching_s", "retries", "cache_hit_rate")
        stores = [name for name in total.figures if name.startswith("fetched_bytes/")]
        return {
            "epoch": self.epoch,
            "elapsed_s": self.elapsed_s,
            **{name: getattr(total, name) for name in sums},
            "received_per_s": total.received * per_s,
            "waited_share": total.waited_s * per_s / max(len({worker.rank for worker in self.workers}), 1),
            **{f"wait_p{percent}_s": total.wait_s(percent) for percent in (50, 95, 99)},
            "skipped": total.skipped.total,
            **{f"skipped/{what}": count for what, count in total.skipped.counts.items()},
            **total.figures,
            **{name.replace("/", "_per_s/", 1): total.figures[name] * per_s for name in stores},
            "slowest_rank": total.rank,
            "slowest_host": total.host,
            "slowest_worker": total.slowest,
            "slowest_shard": total.shard,
        }

    def __str__(self) -> str:
        total = self.total
        skipped = ", ".join(f"{count} x {what}" for what, count in sorted(total.skipped.counts.items()))
        makers = f"{len(self.workers)} {'ranks' if self.workers and self.workers[0].slowest else 'workers'}"
        if len(self.workers) == 1:
            name = self.workers[0].name
            makers = name[:1].lower() + name[1:]
        fetched, fetching_s = total.fetched_bytes, total.fetching_s
        stores = f"; {human_bytes(fetched)} came from stores, in {fetching_s:.1f} s" if fetched or fetching_s else ""
        hits, misses = int(total.figures["cache_hits"]), int(total.figures["cache_misses"])
        stores += f"; {hits:,} of {plural(hits + misses, 'shard')} came from the cache" if hits + misses else ""
        return (
            f"{plural(self.epoch, 'epoch')}: {plural(self.items, 'item')}, {human_bytes(total.bytes)}, from {makers}; "
            f"the loop waited {total.waited_s:.1f} s for them, and they waited {total.waiting_s:.1f} s for the loop"
            f"{stores}; skipped: {skipped or 0}"
        )


#: A worker that has done nothing.
_NONE = WorkerReport("", 0, 0, 0, 0.0, 0.0, 0.0, "", Skipped())


def wait_bucket(seconds: float) -> str:
    """Return the bucket of a wait in a histogram, which is its approximate duration in seconds.

    >>> wait_bucket(0.001), wait_bucket(0.00101), wait_bucket(3600)
    ('0.000987', '0.000987', '3.48e+03')
    """
    number = int(PER_OCTAVE * math.log2(max(seconds, SHORTEST_S) / SHORTEST_S))
    return f"{SHORTEST_S * 2 ** ((number + 0.5) / PER_OCTAVE):.3g}"


def log_stragglers(recent: LoadingReport, kind: str, known: set[str]) -> None:
    """Log one line for each straggler: a worker or rank that takes three times as long per item as the median.

    Args:
        recent: the statistics of an interval, which must not be too short.
        kind: what is compared: ``"workers"`` or ``"ranks"``.
        known: the names of stragglers logged before; new ones are added.
    """
    paces_s = {each.name: each.item_s(recent.elapsed_s) for each in recent.workers}
    median_s = statistics.median_low(paces_s.values()) if paces_s else 0.0
    least_s = WAITED_SHARE * recent.elapsed_s if recent.elapsed_s >= COMPARED_S else math.inf
    for each in recent.workers:
        if paces_s[each.name] > SLOWER * median_s and each.waited_s > least_s and each.name not in known:
            known.add(each.name)
            LOGGER.warning(
                "Straggler: %s of rank %d on %s takes %.3g s for an item, and the median of the %s %.3g s. The last "
                "shard that it opened is %s",
                *(each.slowest or each.name, each.rank, each.host, paces_s[each.name], kind, median_s),
                each.shard or "unknown",
            )


def count_skipped(pipe: IterDataPipe[Any]) -> Skipped:
    """Return the items that the stages of a pipeline have skipped in this process, in all passes so far.

    With a loader, get a `LoadingReport` from its reading service instead, because it iterates over copies of the
    pipeline.

    Args:
        pipe: the last stage.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "cls": b"1"}, {"__key__": "b", "cls": b"x"}])
        >>> pipe = samples.wds_decode(on_error="skip")
        >>> len(list(pipe)), count_skipped(pipe).counts
        (1, {'wds_decode: DecodeError': 1})
    """
    counters = {id(each): each for each in (declared(stage).counters for stage in graph_of(pipe).stages)}
    return sum_skipped(each.skipped() for each in counters.values())


def log_skipped(recent: LoadingReport) -> None:
    """Log one line about the items skipped in an epoch, if any."""
    skipped = recent.skipped
    if skipped.total:
        counts = ", ".join(f"{count} x {what}" for what, count in sorted(skipped.counts.items()))
        LOGGER.warning("epoch %d: skipped %s: %s", recent.epoch, plural(skipped.total, "item"), counts)
