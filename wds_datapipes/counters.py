"""Counters of a pipeline: the shards it opens, the bytes it fetches and the items it skips."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

#: The number of recent errors that are kept in full.
LATEST = 20


class SkippedItem(NamedTuple):
    """An item that a stage skipped.

    Attributes:
        stage: the stage, such as ``"wds_decode"``.
        error: the kind of error, such as ``"DecodeError"``.
        url: the shard, without credentials, or "".
        key: the sample, or "".
        field: the field, or "".
        reason: the error's message.
    """

    stage: str
    error: str
    url: str
    key: str
    field: str
    reason: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.error}: {self.reason}"


@dataclass(frozen=True)
class Skipped:
    """The items that were skipped.

    Attributes:
        counts: the number of items, by stage and kind of error, such as ``{"group_samples: DuplicateKeyError": 3}``.
        latest: the most recent of them, oldest first.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    latest: tuple[SkippedItem, ...] = ()

    @property
    def total(self) -> int:
        """The number of skipped items."""
        return sum(self.counts.values())


class Counters:
    """Counters of a pipeline, updated by its stages: the shard opened last, the items skipped, and the bytes fetched.

    The stages of a loader share one; without a loader, each stage has its own. A copy, such as the one that is sent
    to a worker, starts at zero.

    Attributes:
        shard: the shard opened last, without credentials, or "".
        entries: the number of skipped items.
        on_shard: called with each shard that is opened.
    """

    def __init__(self) -> None:
        self.shard = ""
        self.entries = 0
        self.on_shard: Callable[[str], object] | None = None
        self._counts: Counter[str] = Counter()
        self._latest: deque[SkippedItem] = deque(maxlen=LATEST)
        #: Bytes and seconds by thread. Each thread writes to its own entry, so a fork finds no lock held.
        self._fetched: dict[int, tuple[int, float]] = {}

    def __reduce__(self) -> tuple[type[Counters], tuple[()]]:
        return Counters, ()

    def record_shard(self, shard: str) -> None:
        """Record the shard that is opened."""
        self.shard = shard
        if self.on_shard is not None:
            self.on_shard(shard)

    def count_fetched(self, count: int, waited_s: float) -> None:
        """Count bytes received from a store; this is thread-safe."""
        thread = threading.get_ident()
        before, before_s = self._fetched.get(thread, (0, 0.0))
        self._fetched[thread] = before + count, before_s + waited_s

    def fetched(self) -> tuple[int, float]:
        """Return the bytes that came from stores, and the seconds that threads waited for them, summed."""
        entries = [*self._fetched.values()]
        return sum(count for count, _ in entries), sum(seconds for _, seconds in entries)

    def count_skipped(self, item: SkippedItem) -> None:
        """Count a skipped item."""
        self.entries += 1
        self._counts[f"{item.stage}: {item.error}"] += 1
        self._latest.append(item)

    def add_skipped(self, skipped: Skipped) -> None:
        """Add the items that another process has skipped."""
        self.entries += skipped.total
        self._counts.update(skipped.counts)
        self._latest += skipped.latest

    def skipped(self) -> Skipped:
        """Return the items skipped so far."""
        return Skipped(dict(self._counts), tuple(self._latest))


def sum_skipped(parts: Iterable[Skipped]) -> Skipped:
    """Return the sum of the items skipped by several processes or stages."""
    counts: Counter[str] = Counter()
    latest: list[SkippedItem] = []
    for part in parts:
        counts.update(part.counts)
        latest += part.latest
    return Skipped(dict(counts), tuple(latest))
