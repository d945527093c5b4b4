"""A phase of a run: the datasets that it reads from a step on, with their weights and batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Phase:
    """A part of a run with the same datasets, schedule and batches.

    Attributes:
        count: the number of samples in an epoch.
        batch: the number of samples in a global batch.
        datasets: for each dataset, the numbers of its shards and samples, and their digest.
        points: the schedule of weights, by step; None if an epoch has each sample once.
        epoch: the epoch in which the phase begins.
        start: the position in this epoch at which it begins.
        step: the step at which it begins.
    """

    count: int
    batch: int
    datasets: Mapping[str, Sequence[Any]]
    points: Sequence[Sequence[Any]] | None = None
    epoch: int = 0
    start: int = 0
    step: int = 0

    def drawn_datasets(self, name: str) -> dict[str, int]:
        """Return the number of shards of each dataset that has a weight; ``""`` means all datasets together."""
        return {each: shards for each, (shards, *_) in self.datasets.items() if name in ("", each)}
