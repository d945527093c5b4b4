"""The positions of a pipeline after each of its items, and the number of items that the loop has received."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.pipes.state.recording import TEXT, WAITING, Extra, Form, Part, unpack_records
from wds_datapipes.samples.shuffling import list_waiting

__all__ = ["ItemPositions"]


class ItemPositions:
    """Keeps the records of one worker's epoch, from the start of the run that contains the loop's last item.

    Attributes:
        delivered: the number of items that the loop has received.
    """

    def __init__(self) -> None:
        self.begin(WorkerState(None))

    def begin(self, base: WorkerState) -> None:
        """Begin an epoch.

        Args:
            base: the position at which the pipeline starts.
        """
        self.delivered = 0
        self._base = base
        self._recorded = 0
        self._runs: deque[_Run] = deque()

    @property
    def has_records(self) -> bool:
        """Whether there are records."""
        return bool(self._runs)

    def add(self, records: bytes, count: int) -> None:
        """Add the records of the next items.

        Args:
            records: the result of `pack_records` on one record for each item.
            count: the number of items; if 0, the one record is the first of a run, and contains the position of the
                pipeline after the previous items.
        """
        part = unpack_records(records)
        if part.extra is not None and (part.extra.form is not None or part.extra.refusal):
            self._runs.append(_Run(part.extra, part.width, self._recorded + min(count, 1)))
        self._runs[-1].add(part)
        self._recorded += count

    def deliver(self) -> None:
        """Record that the loop has received the next item."""
        self.delivered += 1
        while len(self._runs) > 1 and self._runs[1].first <= self.delivered:
            self._runs.popleft()

    def state(self) -> WorkerState:
        """Return the position of the pipeline after the last item that the loop has received.

        Raises:
            StateError: the pipeline has no state.
        """
        runs = [run for run in [*self._runs] if run.first <= self.delivered]  # another thread may add some
        if not runs:
            return self._base
        run = runs[-1]
        if run.refusal:
            raise StateError(run.refusal)
        return WorkerState(run.state(self.delivered - run.first))


class _Run:
    """Records of the same form.

    Args:
        extra: the extra data of the first record.
        width: the number of columns.
        first: the number of items of the epoch before the first record.
    """

    def __init__(self, extra: Extra, width: int, first: int) -> None:
        self.first = first
        self.refusal = extra.refusal
        self._form = extra.form
        self._width = width
        self._rows = array("q")
        self._texts: dict[int, list[tuple[int, str]]] = {}
        self._shuffles: list[_Shuffle] = []

    def add(self, part: Part) -> None:
        """Add the next records."""
        ways: Mapping[int, Any] = {}
        if part.extra is not None:
            ways = part.extra.ways
            for number, place, text in part.extra.texts:
                self._texts.setdefault(place, []).append((number, text))
        for number, moves in enumerate(part.moves):
            if number == len(self._shuffles):
                self._shuffles.append(_Shuffle())
            self._shuffles[number].add(*moves, ways.get(number, ()))
        self._rows += part.rows

    def state(self, number: int) -> Any:
        """Return the state after a record."""
        row = self._rows[self._width * number : self._width * (number + 1)]
        return self._resolved(self._form, number, row)

    def _resolved(self, form: Form, number: int, row: Sequence[int]) -> Any:
        if isinstance(form, tuple):
            place, *kind = form
            if kind[:1] == [WAITING]:
                return self._shuffles[kind[1]].waiting(row[place]) if row[place] else []
            if kind != [TEXT]:
                return row[place]
            texts = self._texts[place]
            _, text = texts[bisect_right(texts, number, key=itemgetter(0)) - 1]
            return json.loads(text)
        if isinstance(form, dict):
            return {key: self._resolved(each, number, row) for key, each in form.items()}
        if isinstance(form, list) and form and isinstance(form[0], dict | list | tuple | None):
            return [self._resolved(each, number, row) for each in form]
        return form


class _Shuffle:
    """The changes of a shuffle buffer."""

    def __init__(self) -> None:
        self._slots = array("q")
        self._came = array("q")
        self._ways: dict[int, tuple[int, ...]] = {}

    def add(self, slots: array[int], came: array[int], ways: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        self._came += came
        self._ways.update(ways)
        self._slots += slots

    def waiting(self, count: int) -> list[list[int]]:
        """Return the positions of the waiting samples after a number of moves, as `pack_positions` does."""
        numbers = list_waiting(self._slots[:count])
        # A view of the array itself would prevent another thread from adding to it.
        rows: list[list[int]] = np.frombuffer(self._came.tobytes(), np.int64).reshape(-1, 3)[numbers].tolist()
        if not self._ways:
            return rows
        return [[*row, *self._ways.get(number, ())] for row, number in zip(rows, numbers, strict=True)]
