"""Row plan: which samples each row of an epoch has, window by window, the same for any ranks and workers."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from wds_datapipes.index.format.options import Pack
from wds_datapipes.index.order.lanes import Lanes
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.rows.best_fit import FEW_ROWS, MANY
from wds_datapipes.index.order.rows.packed_windows import PackedWindow, PackedWindows, pack_windows
from wds_datapipes.index.order.rows.row_balance import arrange_rows, balance_ranks
from wds_datapipes.index.order.rows.row_columns import RowColumns
from wds_datapipes.index.order.sample_order import LaneOrder, SampleOrder
from wds_datapipes.samples.row_joining import RowMark
from wds_datapipes.seeds import derived_seed

#: The steps in a window, and its maximum number of samples, by default: planning more would pause a worker.
STEPS, MAX_WINDOW = 16, 1 << 15
#: The numbers of windows and of steps that are kept for each lane.
KEPT = 4
#: The maximum number of lanes whose rows a state counts: about 1 KiB.
MAX_LANES = 128
#: The maximum number of samples that are planned at a time if their windows are small, in about 30 ms.
BATCH = 1 << 16


class RowPlan:
    """The rows of an epoch.

    Rows are numbered in the order of the steps. Each lane is packed on its own, window by window, and each step has the
    same number of rows from each lane, until the first lane ends; the rows left in the others follow. If a window does
    not end with a step, rows of the next window complete it. Which rows these are depends only on the number of earlier
    rows. The windows of all lanes are planned, even if only the rows of some are asked for: how many rows each lane has
    decides which rows follow the first lane, and is in the state.

    Args:
        order: the order of the samples, whose lanes follow one another.
        firsts: the number of the first sample of each shard.
        columns: the lengths and costs of the samples.
        pack: the options.
        lanes: the lanes.
        step: the number of rows in a step.
        window: the maximum number of samples in a window.
        seed: shuffles the steps of a window; None keeps their order.

    Attributes:
        order: finds samples by the positions that `expand` returns.
        step: the number of rows in a step.
        row: the maximum number of tokens in a row.
        is_complete: whether the rows of all windows are known.
        rows_known: the number of rows that are known, in steps with as many rows from each lane.
    """

    def __init__(
        self,
        order: SampleOrder,
        firsts: Numbers,
        columns: RowColumns,
        pack: Pack,
        *,
        lanes: Lanes,
        step: int,
        window: int,
        seed: int | None,
    ) -> None:
        self.order, self.step = LaneOrder(order, Lanes(len(order))), step
        self._samples, self._firsts, self._columns, self._options = order, firsts, columns, pack
        self._lanes, self._own, self._seed = lanes, step // len(lanes), seed
        self.row = pack.row
        #: The number of windows of each lane, and how many of each are planned at a time if they have few rows.
        self._counts: list[int] = (-(-np.diff(lanes.starts) // max(window // len(lanes), 1))).tolist()
        self._most = max(BATCH // window, 1) if BATCH // window * len(lanes) >= MANY else 1
        self._ahead = 1
        #: For each lane, the number of rows before each window that is known, from window ``_first`` on.
        self._before, self._first = [[0] for _ in self._counts], 0
        self._note_progress()
        #: The windows that have been planned last, by lane and number, with their numbers among those planned together.
        self._planned = deque[tuple[dict[tuple[int, int], int], PackedWindows]](maxlen=2)
        self._packed = OrderedDict[tuple[int, int], PackedWindow]()
        self._orders = OrderedDict[tuple[int, int], Numbers]()
        self._steps = OrderedDict[tuple[int, int], list[tuple[int, int]]]()

    def extend(self) -> None:
        """Plan the next window of each lane, or the next few of them if they have few rows."""
        begun = [self._first + len(known) - 1 for known in self._before]
        ends = [min(number + self._ahead, count) for number, count in zip(begun, self._counts, strict=True)]
        numbers = [(lane, number) for lane, end in enumerate(ends) for number in range(begun[lane], end)]
        if not numbers:
            return
        packed = self._pack(numbers)
        counts = packed.count_rows()
        for (lane, _), rows in zip(numbers, counts, strict=True):
            self._before[lane].append(self._before[lane][-1] + rows)
        self._ahead = self._most if max(counts) <= FEW_ROWS // 2 else 1
        self._planned.append(({each: at for at, each in enumerate(numbers)}, packed))
        self._note_progress()

    def _note_progress(self) -> None:
        ends = zip(self._before, self._counts, strict=True)
        self.is_complete = all(self._first + len(known) > count for known, count in ends)
        self.rows_known = min(known[-1] for known in self._before) // self._own * self.step

    def window_at(self, row: int) -> list[int]:
        """Return the window with which planning may begin to find a row, and the number of earlier rows of each lane.

        With this, a state resumes in any epoch without planning the windows before it. With very many lanes, the result
        is empty, to keep states small.

        Args:
            row: the first row of a step; the rows before it are known.
        """
        if len(self._before) > MAX_LANES:
            return []
        if self.is_complete:
            row = min(row, self.rows_known)  # the rows after these are from some lanes only
        number = row if len(self._before) == 1 else row // self.step * self._own
        window = min(bisect_right(known, number) for known in self._before) - 1
        return [self._first + window, *(known[window] for known in self._before)]

    def begin_at(self, window: int, *before: int) -> None:
        """Begin to plan with a window that `window_at` has returned.

        Raises:
            ValueError: there is no such window.
        """
        if len(before) != len(self._before) or not 0 <= window <= max(self._counts) or min(before) < 0:
            raise ValueError(f"a plan of {len(self._before)} lanes cannot begin with {[window, *before]!r:.100}")
        self._before, self._first = [[rows] for rows in before], window
        self._note_progress()

    def __len__(self) -> int:
        """Return the number of rows in the epoch, after planning the windows that are not known."""
        while not self.is_complete:
            self.extend()
        return sum(known[-1] for known in self._before)

    def expand(self, rows: Numbers) -> tuple[Numbers, list[RowMark]]:
        """Return the positions of the samples of some rows in the epoch, and the mark of each.

        A row that only pads the last step consists of a sample of its lane, without tokens.

        Args:
            rows: the numbers of rows that are known, or that only pad the last step.
        """
        positions, marks, length = [np.empty(0, np.int64)], list[RowMark](), self._options.row
        for row in rows.tolist():
            lane, number = self._locate(row)
            if number < 0:
                positions.append(self._lanes.starts[lane + 1 : lane + 2] - 1)
                marks.append(RowMark(row, 0, 1, 0, 0, True, length, is_padding=True))
                continue
            packed, place = self._row_at(lane, number)
            some = slice(int(packed.ends[place - 1]) if place else 0, int(packed.ends[place]))
            positions.append(packed.positions[some])
            columns = (column[some].tolist() for column in (packed.starts, packed.tokens, packed.are_ends))
            count = some.stop - some.start
            for at, (start, tokens, is_end) in enumerate(zip(*columns, strict=True)):
                marks.append(RowMark(row, at, count, start, tokens, is_end, length))
        return np.concatenate(positions), marks

    def measure(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """Return the numbers of tokens and the costs of some rows; those that only pad the last step have none."""
        found = np.zeros((2, len(rows)), np.int64)
        for at, row in enumerate(rows.tolist()):
            lane, number = self._locate(row)
            if number >= 0:
                packed, place = self._row_at(lane, number)
                begin = int(packed.ends[place - 1]) if place else 0
                found[:, at] = packed.tokens[begin : int(packed.ends[place])].sum(), packed.costs[place]
        return found[0], found[1]

    def _row_at(self, lane: int, number: int) -> tuple[PackedWindow, int]:
        """Return the window of a row of a lane, and the number of the row in it."""
        window, place = self._step_of(lane, number // self._own)[number % self._own]
        return self._window_of(lane, window), place

    def _locate(self, row: int) -> tuple[int, int]:
        """Return the lane of a row and its number in the lane, or -1 if it only pads the last step."""
        step, slot = divmod(row, self.step)
        lane, place = divmod(slot, self._own)
        if not self.is_complete or row < self.rows_known:
            return lane, step * self._own + place
        left, whole = row - self.rows_known, self.rows_known // len(self._before)
        for each, known in enumerate(self._before):
            if left < known[-1] - whole:
                return each, whole + left
            left -= known[-1] - whole
        return lane, -1

    def _step_of(self, lane: int, step: int) -> list[tuple[int, int]]:
        """Return the window and the number in it of each row of a lane in a step, in the order of the ranks."""
        if (found := self._steps.get((lane, step))) is not None:
            return found
        known, begin = self._before[lane], step * self._own
        if begin < known[0]:
            raise LookupError(f"step {step} is before the window with which this plan begins")
        end, windows, rows, costs = min(begin + self._own, known[-1]), list[int](), list[int](), [np.empty(0, np.int64)]
        while len(rows) < end - begin:
            at = bisect_right(known, begin + len(rows)) - 1
            window = self._first + at
            packed = self._window_of(lane, window)
            arranged = self._arranged(lane, window, packed)[begin + len(rows) - known[at] :][: end - begin - len(rows)]
            windows += [window] * len(arranged)
            rows += arranged.tolist()
            costs.append(packed.costs[arranged])
        order = balance_ranks(np.concatenate(costs)).tolist() if len(rows) > 1 else [0] * len(rows)
        found = self._steps[lane, step] = [(windows[at], rows[at]) for at in order]
        while len(self._steps) > KEPT * len(self._before):
            self._steps.popitem(last=False)
        return found

    def _arranged(self, lane: int, window: int, packed: PackedWindow) -> Numbers:
        """Return the rows of a window in the order in which steps take them; the most recent orders are kept."""
        if (found := self._orders.get((lane, window))) is None:
            seed = None if self._seed is None else derived_seed("steps of rows", self._seed, lane, window)
            first, balance = self._before[lane][window - self._first], self._options.balance
            found = arrange_rows(packed.costs, first=first, step=self._own, balance=balance, seed=seed)
            self._orders[lane, window] = found
            while len(self._orders) > KEPT * len(self._before):
                self._orders.popitem(last=False)
        return found

    def _window_of(self, lane: int, number: int) -> PackedWindow:
        """Return a window; the most recently used ones are kept."""
        if (lane, number) in self._packed:
            self._packed.move_to_end((lane, number))
            return self._packed[lane, number]
        known = (windows.window(at[lane, number]) for at, windows in self._planned if (lane, number) in at)
        packed = next(known, None) or self._pack([(lane, number)]).window(0)
        self._packed[lane, number] = packed
        while len(self._packed) > KEPT * len(self._before):
            self._packed.popitem(last=False)
        return packed

    def _pack(self, windows: Sequence[tuple[int, int]]) -> PackedWindows:
        """Pack windows, given the lane and the number of each."""
        found = list[range]()
        for lane, number in windows:
            first, end = self._lanes.starts[lane : lane + 2].tolist()
            cuts = (first + at * (end - first) // self._counts[lane] for at in (number, number + 1))
            found.append(range(*cuts))  # none is much shorter than others
        return pack_windows(found, self._samples, self._firsts, self._columns, self._options)


def window_of(pack: Pack, step: int, samples: int, tokens: int) -> int:
    """Return the number of samples in a window.

    Args:
        pack: the options.
        step: the number of rows in a step.
        samples: the number of samples of the datasets that are read.
        tokens: the number of their tokens.
    """
    if pack.window is not None:
        return pack.window
    return max(min(STEPS * step * pack.row * samples // max(tokens, 1), MAX_WINDOW), 1)
