"""Packed windows: the samples of some windows of an epoch, and the row of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wds_datapipes.index.format.options import Pack
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.rows.best_fit import pack_windows_of
from wds_datapipes.index.order.rows.row_columns import RowColumns
from wds_datapipes.index.order.sample_order import SampleOrder


class PackedWindow(NamedTuple):
    """The rows of a window.

    Attributes:
        positions: the position of each sample in the epoch, row by row.
        starts: the first token of each, which is not 0 in a part of a long sample.
        tokens: the number of tokens of each.
        are_ends: whether each ends with its sample.
        ends: the number of samples up to the end of each row.
        costs: the cost of each row.
    """

    positions: Numbers
    starts: Numbers
    tokens: Numbers
    are_ends: npt.NDArray[np.bool_]
    ends: Numbers
    costs: Numbers


class PackedWindows(NamedTuple):
    """The samples of some windows in the order of the epoch, in parts if they are longer than a row.

    Attributes:
        positions: the position of each sample in the epoch.
        starts: the first token of each.
        tokens: the number of tokens of each.
        are_ends: whether each ends with its sample.
        costs: the cost of each.
        rows: the number of the row of each in its window.
        ends: the number of samples up to the end of each window.
    """

    positions: Numbers
    starts: Numbers
    tokens: Numbers
    are_ends: npt.NDArray[np.bool_]
    costs: Numbers
    rows: Numbers
    ends: Numbers

    def count_rows(self) -> list[int]:
        """Return the number of rows in each window."""
        counts: list[int] = (np.maximum.reduceat(self.rows, self.ends[:-1]) + 1).tolist()
        return counts

    def window(self, number: int) -> PackedWindow:
        """Return the rows of a window."""
        own = slice(int(self.ends[number]), int(self.ends[number + 1]))
        rows, costs = self.rows[own], self.costs[own]
        order = np.argsort(rows, kind="stable")
        ends = np.cumsum(np.bincount(rows))
        sums = np.concatenate([[0], np.cumsum(costs[order])])[np.concatenate([[0], ends])]
        columns = (self.positions[own], self.starts[own], self.tokens[own])
        positions, starts, tokens = (column[order] for column in columns)
        return PackedWindow(positions, starts, tokens, self.are_ends[own][order], ends, np.diff(sums))


def pack_windows(
    windows: Sequence[range], order: SampleOrder, firsts: Numbers, columns: RowColumns, pack: Pack
) -> PackedWindows:
    """Pack windows, each on its own.

    Args:
        windows: the positions of the samples of each window in the epoch; none is empty.
        order: the order of the epoch.
        firsts: the number of the first sample of each shard.
        columns: the lengths and costs of the samples.
        pack: the options.
    """
    positions = np.concatenate([np.arange(each.start, each.stop) for each in windows])
    sizes = np.array([*map(len, windows)], np.int64)
    shards, numbers = order.find(positions)
    numbers = firsts[shards] + numbers
    row = pack.row
    lengths = columns.lengths[numbers].astype(np.int64)
    costs = columns.costs_of(numbers)
    seconds = None if columns.seconds is None else columns.seconds[numbers].astype(np.int64)
    starts, tokens, are_ends = np.zeros_like(lengths), lengths, np.ones(len(lengths), bool)
    if pack.long_samples != "raise" and (lengths > row).any():
        parts = np.ones_like(lengths) if pack.long_samples == "truncate" else np.maximum(-(-lengths // row), 1)
        of = np.repeat(np.arange(len(lengths)), parts)
        starts = (np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)) * row
        stops, positions = np.minimum(starts + row, lengths[of]), positions[of]
        tokens, are_ends = stops - starts, stops == lengths[of]
        costs = _share_of_costs(costs[of], tokens, lengths[of])
        seconds = None if seconds is None else seconds[of]
        sizes = np.add.reduceat(parts, np.cumsum(sizes) - sizes)
    rows = pack_windows_of(tokens, sizes, row, seconds, 0 if pack.second is None else pack.second[1])
    return PackedWindows(positions, starts, tokens, are_ends, costs, rows, np.append(0, np.cumsum(sizes)))


def _share_of_costs(costs: Numbers, lengths: Numbers, wholes: Numbers) -> Numbers:
    """Return the costs of parts of samples, in proportion to their lengths; by division first, so none overflows."""
    wholes = np.maximum(wholes, 1)
    whole, rest = np.divmod(costs, wholes)
    shared: Numbers = np.where(lengths == wholes, costs, whole * lengths + rest * lengths // wholes)
    return shared
