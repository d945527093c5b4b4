"""Draws from the datasets of a mixture, and the resulting passes over each dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from wds_datapipes.index.order.draw_pattern import DrawPattern
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.phase import Phase


class Pass(NamedTuple):
    """The pass from which a dataset has certain shards.

    Attributes:
        number: the number of the pass.
        draws: the number of draws from each lane before it.
        samples: the number of samples.
        shards: the number of shards of each dataset that is read.
    """

    number: int
    draws: Numbers
    samples: int
    shards: Mapping[str, int]

    def numbers(self, lanes: Numbers, draws: Numbers, count: int) -> Numbers:
        """Return the numbers of draws, if each lane continues where the previous one ends; see `lane_starts`."""
        return draws - self.draws[lanes] + (self.number + lanes) * self.samples // count

    def passes(self, lanes: Numbers, numbers: Numbers, count: int) -> Numbers:
        """Return the pass of each draw, from these numbers."""
        return ((numbers + 1) * count - 1) // max(self.samples, 1) - lanes


class Draws(NamedTuple):
    """Draws with the same weights.

    Attributes:
        begins: the number of draws from each lane before them, from the beginning of the run.
        pattern: the order of the datasets.
        shifts: the beginning of the pattern in each lane.
        earlier: the number of earlier draws from each dataset and lane.
    """

    begins: Numbers
    pattern: DrawPattern
    shifts: Numbers
    earlier: Numbers

    def count_to(self, ends: Numbers) -> Numbers:
        """Return the number of draws from each dataset and lane among the first draws from each lane."""
        return self.earlier + self.pattern.count(ends - self.begins, self.shifts)

    def find(self, lanes: Numbers, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the dataset of each draw and the number of the draw among those from its dataset and lane."""
        datasets, draws = self.pattern.draw(numbers - self.begins[lanes], self.shifts[lanes])
        return datasets, draws + self.earlier[datasets, lanes]


def passes_drawn(passes: Sequence[Pass], count: int) -> float:
    """Return the number of passes over a dataset after ``count`` draws, including the fraction of the last one."""
    last = [each for each in passes if each.draws.sum() <= count][-1]
    return last.number + (count - int(last.draws.sum())) / max(last.samples, 1)


def add_passes(passes: list[list[Pass]], names: Sequence[str], phase: Phase, count: Numbers) -> None:
    """Record the pass from which each dataset has the shards of a phase: the first that has not begun."""
    lanes, of = np.arange(count.shape[1]), count.shape[1]
    for known, name, drawn in zip(passes, names, count, strict=True):
        shards = phase.drawn_datasets(name)
        samples = sum(phase.datasets[each][1] for each in shards)
        if not shards or (known and known[-1].shards == shards):
            continue
        number, draws = 0, np.zeros_like(drawn)
        if known:
            last = known[-1]
            begun = last.passes(lanes, last.numbers(lanes, drawn - 1, of), of)[drawn > last.draws]
            number = max([last.number, *(begun + 1).tolist()])
            draws = last.draws + (number + lanes) * last.samples // of - (last.number + lanes) * last.samples // of
        known.append(Pass(number, draws, samples, shards))
