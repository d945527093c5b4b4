"""What this process reads, and what it has passed over, for whoever looks in from outside."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["LEDGER", "Ledger", "Skipped"]

#: How many of the latest errors are kept whole.
LATEST = 20


@dataclass(frozen=True)
class Skipped:
    """What was passed over.

    Attributes:
        counts: how many items, by stage and kind of error, such as ``{"group_samples: DuplicateField": 3}``.
        latest: the last few errors, oldest first.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    latest: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """How many items were passed over."""
        return sum(self.counts.values())


class Ledger:
    """The book that stages write into: the shard that was opened last, and every item that was passed over.

    Attributes:
        shard: the shard that was opened last, without credentials, or "".
        entries: how many entries there are, which tells whether any are new.
        on_shard: called with each shard that is opened.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin an empty book, as a new process does."""
        self.shard = ""
        self.entries = 0
        self.on_shard: Callable[[str], object] | None = None
        self._counts: Counter[str] = Counter()
        self._latest: deque[str] = deque(maxlen=LATEST)

    def opened(self, shard: str) -> None:
        """Note that a shard was opened."""
        self.shard = shard
        if self.on_shard is not None:
            self.on_shard(shard)

    def passed_over(self, stage: str, error: Exception) -> None:
        """Note that a stage passed over an item."""
        self.entries += 1
        self._counts[f"{stage}: {type(error).__name__}"] += 1
        self._latest.append(f"{stage}: {type(error).__name__}: {error}")

    def skipped(self) -> Skipped:
        """Return what was passed over so far."""
        return Skipped(dict(self._counts), tuple(self._latest))


#: The book of this process.
LEDGER = Ledger()
