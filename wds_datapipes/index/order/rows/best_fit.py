"""Best-fit decreasing: pack samples into rows of bounded length, with as little space left as possible."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wds_datapipes.index.order.permutation import Numbers

#: The bits of an entry of the list of open rows that have the number of the row; the others have its space.
ROW_BITS = 24
#: The number of open rows tried for a sample if a second bound may exclude some.
TRIED = 64
#: At least MANY windows with up to about FEW_ROWS rows are packed together: each step compares a sample of each window
#: with all of its rows, whose numbers have FEW_BITS bits, and whose spaces are below MAX_ROW.
MANY, FEW_ROWS, FEW_BITS = 32, 256, 12
MAX_ROW = 1 << 31 - FEW_BITS


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


def pack_windows_of(
    lengths: Numbers, sizes: Numbers, row: int, seconds: Numbers | None = None, most: int = 0
) -> Numbers:
    """Return the row of each sample in its window, as `pack_rows_of` does for each window.

    Args:
        lengths: the length of each sample, up to ``row``, window by window.
        sizes: the number of samples in each window, at least 1.
        row: the maximum sum of lengths in a row.
        seconds: the value of each sample that is also bounded, up to ``most``.
        most: the maximum sum of these values in a row.

    Examples:
        >>> pack_windows_of(np.array([3, 4, 2, 1, 5]), np.array([4, 1]), row=5).tolist()
        [1, 0, 1, 0, 0]
    """
    starts = np.cumsum(sizes) - sizes
    if seconds is None and len(sizes) >= MANY and row < MAX_ROW:
        needed = np.maximum(lengths, 1)
        if (rows := int(np.add.reduceat(needed, starts).max()) // row) < FEW_ROWS:
            return _fit_together(needed, sizes, row, rows + rows // 8 + 4)
    windows = [slice(start, start + size) for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
    return np.concatenate(
        [pack_rows_of(lengths[own], row, None if seconds is None else seconds[own], most) for own in windows]
    )


def _fit_together(lengths: Numbers, sizes: Numbers, row: int, expected: int) -> Numbers:
    """Pack windows in lockstep, given how many rows are expected: each step places a sample of each window."""
    windows, most = np.arange(len(sizes)), int(sizes.max())
    own, place = np.repeat(windows, sizes), np.arange(len(lengths)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    keys = row << 32 | np.arange(most) + np.zeros_like(sizes)[:, None]  # no sample, after all of the window
    keys[own, place] -= lengths << 32
    keys.sort(axis=1)
    steps = (row - (keys.T >> 32) << FEW_BITS).astype(np.uint32, order="C")
    mask, full = np.uint32((1 << FEW_BITS) - 1), np.uint32(row + 1 << FEW_BITS)
    rows = np.empty(steps.shape, np.uint32)
    spaces = _empty_rows(0, expected, row, len(sizes))
    left, best = np.empty_like(spaces), np.empty(len(sizes), np.uint32)
    for step, taken in enumerate(steps):
        np.subtract(spaces, taken, out=left)  # below 0, it is larger than any space
        np.minimum.reduce(left, axis=0, out=best)
        while best.max() >= full:  # a window has no row left for its sample
            more = _empty_rows(len(spaces), len(spaces) + expected, row, len(sizes))
            spaces = np.concatenate([spaces, more])
            left = spaces - taken
            np.minimum.reduce(left, axis=0, out=best)
        rows[step] = best & mask
        spaces[rows[step], windows] = best
    found = np.empty_like(keys)
    np.put_along_axis(found, keys & (1 << 32) - 1, rows.T.astype(np.int64), axis=1)
    return found[own, place]


def _empty_rows(first: int, end: int, row: int, windows: int) -> npt.NDArray[np.uint32]:
    """Return the space and the number of rows of windows."""
    numbers = np.arange(first, end, dtype=np.uint32)[:, None]
    return np.repeat(numbers + np.uint32(row << FEW_BITS), windows, axis=1)


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
