"""Counters of a process: the shards it opens, the bytes it fetches and the items it skips."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["COUNTERS", "Counters", "Skipped", "SkippedItem"]

#: How many of the latest errors are kept whole.
LATEST = 20


class SkippedItem(NamedTuple):
    """An item that a stage has skipped.

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
        counts: how many items, by stage and kind of error, such as ``{"group_samples: DuplicateFieldError": 3}``.
        latest: the last few of them, oldest first.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    latest: tuple[SkippedItem, ...] = ()

    @property
    def total(self) -> int:
        """The number of skipped items."""
        return sum(self.counts.values())


class Counters:
    """Counters that stages update: the shard opened last, the items skipped, and the bytes fetched.

    Attributes:
        shard: the shard that was opened last, without credentials, or "".
        entries: how many entries there are, which tells whether any are new.
        on_shard: called with each shard that is opened.
        fetched_bytes: how much has come from stores.
        fetching_s: how long stores were waited for, in seconds, by all who read at a time together.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Reset all counters, as in a new process."""
        self.renew()
        self.shard = ""
        self.entries = 0
        self.on_shard: Callable[[str], object] | None = None
        self.fetched_bytes, self.fetching_s = 0, 0.0
        self._counts: Counter[str] = Counter()
        self._latest: deque[SkippedItem] = deque(maxlen=LATEST)

    def renew(self) -> None:
        """Forget that a thread of a parent process may have been writing when this one was forked."""
        self._lock = threading.Lock()

    def opened(self, shard: str) -> None:
        """Record the shard that is opened."""
        self.shard = shard
        if self.on_shard is not None:
            self.on_shard(shard)

    def fetched(self, count: int, waited_s: float) -> None:
        """Count bytes that came from a store; several threads may do so."""
        with self._lock:
            self.fetched_bytes += count
            self.fetching_s += waited_s

    def passed_over(self, item: SkippedItem) -> None:
        """Count an item that a stage skips."""
        self.entries += 1
        self._counts[f"{item.stage}: {item.error}"] += 1
        self._latest.append(item)

    def skipped(self) -> Skipped:
        """Return the items that were skipped so far."""
        return Skipped(dict(self._counts), tuple(self._latest))


#: The book of this process.
COUNTERS = Counters()
os.register_at_fork(after_in_child=COUNTERS.renew)
