"""Counters of a pipeline: opened shards, transfers from stores, and skipped items."""

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
        counts: the number of items by stage and kind of error, such as ``{"group_samples: DuplicateKeyError": 3}``.
        latest: the most recent of them, oldest first.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    latest: tuple[SkippedItem, ...] = ()

    @property
    def total(self) -> int:
        """The number of skipped items."""
        return sum(self.counts.values())


class Counters:
    """Counters that the stages of a pipeline update: the last opened shard, the items skipped, and other figures.

    All stages of a loader share one object; without a loader, each stage has its own. A copy, such as one sent to a
    worker, starts at zero.

    Attributes:
        shard: the last opened shard, without credentials, or "".
        entries: the number of skipped items.
        on_shard: called with each shard that is opened.
        on_retry: called after each retry, because the next item may take a long time.
        is_tried_again: called with each failure of a stage's function, returns whether the stage will get the same item
            again, so that the item is not skipped yet; None unless a state was just loaded.
    """

    def __init__(self) -> None:
        self.shard = ""
        self.entries = 0
        self.on_shard: Callable[[str], object] | None = None
        self.on_retry: Callable[[], object] | None = None
        self.is_tried_again: Callable[[], bool] | None = None
        self._counts: Counter[str] = Counter()
        self._latest: deque[SkippedItem] = deque(maxlen=LATEST)
        #: Amounts by thread and figure. Each thread writes only to its own entries, so there is no lock that a fork
        #: could copy while it is held.
        self._amounts: dict[tuple[int, str], float] = {}

    def __reduce__(self) -> tuple[type[Counters], tuple[()]]:
        return Counters, ()

    def record_shard(self, shard: str) -> None:
        """Record the shard that is opened."""
        self.shard = shard
        if self.on_shard is not None:
            self.on_shard(shard)

    def count(self, figure: str, amount: float = 1) -> None:
        """Add to a figure, such as ``"fetched_bytes/s3://bucket"``; this is thread-safe."""
        self._amounts[threading.get_ident(), figure] = self.of_thread(figure) + amount

    def of_thread(self, figure: str) -> float:
        """Return a figure of the current thread."""
        return self._amounts.get((threading.get_ident(), figure), 0.0)

    def count_retry(self, figure: str) -> None:
        """Count a retry and publish it."""
        self.count(figure)
        if self.on_retry is not None:
            self.on_retry()

    def figures(self) -> Counter[str]:
        """Return the figures so far, summed over threads."""
        found = Counter[str]()
        for (_, figure), amount in [*self._amounts.items()]:
            found[figure] += amount  # type: ignore[assignment]  # a Counter counts seconds as well
        return found

    def count_skipped(self, item: SkippedItem) -> None:
        """Count a skipped item."""
        self.entries += 1
        self._counts[f"{item.stage}: {item.error}"] += 1
        self._latest.append(item)

    def add_skipped(self, skipped: Skipped) -> None:
        """Add the items that another process skipped."""
        self.entries += skipped.total
        self._counts.update(skipped.counts)
        self._latest += skipped.latest

    def skipped(self) -> Skipped:
        """Return the items skipped so far."""
        return Skipped(dict(self._counts), tuple(self._latest))


def sum_skipped(parts: Iterable[Skipped]) -> Skipped:
    """Return the sum of the items skipped by several processes or stages."""
    total = Counters()
    for part in parts:
        total.add_skipped(part)
    return total.skipped()
