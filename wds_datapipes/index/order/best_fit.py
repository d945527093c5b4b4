"""Best-fit decreasing: pack samples into rows of bounded length, with as little space left as possible."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from wds_datapipes.index.order.permutation import Numbers

#: The bits of an entry of the list of open rows that have the number of the row; the others have its space.
ROW_BITS = 24
#: The number of open rows tried for a sample if a second bound may exclude some.
TRIED = 64


def pack_rows_of(lengths: Numbers, row: int, seconds: Numbers | None = None, most: int = 0) -> Numbers:
    """Return the row of each sample: samples go, from the longest on, to the row in which they leave the least space.

    Of rows with the same space, the first is chosen, and of samples with the same length, the first comes first. With a
    second bound, samples go from the one that fills the largest part of either bound on.

    Args:
        lengths: the length of each sample, up to ``row``.
        row: the maximum sum of lengths in a row.
        seconds: the value of each sample that is also bounded, up to ``most``.
        most: the maximum sum of these values in a row.

    Examples:
        >>> pack_rows_of(np.array([3, 4, 2, 1]), row=5).tolist()
        [1, 0, 1, 0]
    """
    needed = np.maximum(lengths, 1).astype(np.int64)  # an empty sample takes space, too, to bound their number
    size = needed if seconds is None else np.maximum(needed * most, seconds.astype(np.int64) * row)
    order = np.argsort(-size, kind="stable")
    decreasing = needed[order].tolist()
    found = _fit(decreasing, row) if seconds is None else _fit_both(decreasing, row, seconds[order].tolist(), most)
    rows = np.empty(len(order), np.int64)
    rows[order] = found
    return rows


def _fit(lengths: Sequence[int], row: int) -> list[int]:
    found, count = list[int](), 0
    open_rows: list[int] = []  # the space and the number of each row, sorted
    mask, one = (1 << ROW_BITS) - 1, 1 << ROW_BITS
    for length in lengths:
        at = bisect_left(open_rows, length << ROW_BITS)
        if at < len(open_rows):
            entry = open_rows.pop(at) - (length << ROW_BITS)
        else:
            entry = (row - length) << ROW_BITS | count
            count += 1
        found.append(entry & mask)
        if entry >= one:
            insort(open_rows, entry)
    return found


def _fit_both(lengths: Sequence[int], row: int, seconds: Sequence[int], most: int) -> list[int]:
    found, left = list[int](), list[int]()
    open_rows: list[int] = []
    mask, one = (1 << ROW_BITS) - 1, 1 << ROW_BITS
    for length, second in zip(lengths, seconds, strict=True):
        at = bisect_left(open_rows, length << ROW_BITS)
        tried = range(at, min(at + TRIED, len(open_rows)))
        chosen = next((each for each in tried if left[open_rows[each] & mask] >= second), None)
        if chosen is None:
            entry = (row - length) << ROW_BITS | len(left)
            left.append(most)
        else:
            entry = open_rows.pop(chosen) - (length << ROW_BITS)
        number = entry & mask
        found.append(number)
        left[number] -= second
        if entry >= one:
            insort(open_rows, entry)
    return found
