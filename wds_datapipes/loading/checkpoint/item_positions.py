"""Where a pipeline was behind each of its items, and which of them the loop has."""

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
from wds_datapipes.loading.checkpoint.encoding import encode_state
from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.pipes.state.recording import TEXT, VALUE, WAITING, Extra, Form, Part, unpack_records
from wds_datapipes.samples.derived_position import pack_positions
from wds_datapipes.samples.shuffling import waiting_behind
from wds_datapipes.shards.position import SamplePosition

__all__ = ["ItemPositions"]


class ItemPositions:
    """Keeps the records of one worker's epoch, from the beginning of the run in which the last item of the loop is.

    Attributes:
        delivered: how many items the loop has.
    """

    def __init__(self) -> None:
        self.begin(WorkerState(None))

    def begin(self, base: WorkerState) -> None:
        """Begin an epoch.

        Args:
            base: where the pipeline begins.
        """
        self.delivered = 0
        self._base = base
        self._recorded = 0
        self._runs: deque[_Run] = deque()

    @property
    def is_begun(self) -> bool:
        """Whether there are records."""
        return bool(self._runs)

    def add(self, records: bytes, count: int) -> None:
        """Add the records of the items that come next.

        Args:
            records: what `pack_records` has made of one for each item.
            count: how many items; with 0, the one record is the first of a run, and says where the pipeline is behind
                the items before.
        """
        part = unpack_records(records)
        if part.extra is not None and (part.extra.form is not None or part.extra.refusal):
            self._runs.append(_Run(part.extra, part.width, self._recorded + min(count, 1)))
        self._runs[-1].add(part)
        self._recorded += count

    def deliver(self) -> None:
        """Take note that the loop has the next item."""
        self.delivered += 1
        while len(self._runs) > 1 and self._runs[1].first <= self.delivered:
            self._runs.popleft()

    def state(self) -> WorkerState:
        """Return where the pipeline was behind the last item that the loop has.

        Raises:
            StateError: the pipeline has no state.
        """
        runs = [run for run in [*self._runs] if run.first <= self.delivered]  # another thread may add some
        if not runs:
            return self._base
        run = runs[-1]
        if run.refusal:
            raise StateError(run.refusal)
        return WorkerState(encode_state(run.state(self.delivered - run.first)))


class _Run:
    """Records that have a form in common.

    Args:
        extra: of the first of them.
        width: how many numbers a row has.
        first: behind how many items of the epoch the first is.
    """

    def __init__(self, extra: Extra, width: int, first: int) -> None:
        self.first = first
        self.refusal = extra.refusal
        self._form = extra.form
        self._width = width
        self._rows = array("q")
        self._values: dict[int, list[tuple[int, Any]]] = {}
        self._shuffles: list[_Shuffle] = []

    def add(self, part: Part) -> None:
        """Add the records that come next."""
        ways: Mapping[int, Any] = {}
        if part.extra is not None:
            ways = part.extra.ways
            for number, place, value in part.extra.values:
                self._values.setdefault(place, []).append((number, value))
        for number, moves in enumerate(part.moves):
            if number == len(self._shuffles):
                self._shuffles.append(_Shuffle())
            self._shuffles[number].add(*moves, ways.get(number, ()))
        self._rows += part.rows

    def state(self, number: int) -> Any:
        """Return the state behind a record. What waits in a shuffle may be an array with a row for each sample."""
        row = self._rows[self._width * number : self._width * (number + 1)]
        return self._resolved(self._form, number, row)

    def _resolved(self, form: Form, number: int, row: Sequence[int]) -> Any:
        if isinstance(form, tuple):
            place, *kind = form
            if kind[:1] == [WAITING]:
                return self._shuffles[kind[1]].waiting(row[place]) if row[place] else []
            if kind not in ([VALUE], [TEXT]):
                return row[place]
            values = self._values[place]
            _, value = values[bisect_right(values, number, key=itemgetter(0)) - 1]
            return json.loads(value) if kind == [TEXT] else value
        if isinstance(form, dict):
            return {key: self._resolved(each, number, row) for key, each in form.items()}
        if isinstance(form, list) and form and isinstance(form[0], dict | list | tuple | None):
            return [self._resolved(each, number, row) for each in form]
        return form


class _Shuffle:
    """What has changed in a shuffle."""

    def __init__(self) -> None:
        self._slots = array("q")
        self._came = array("q")
        self._ways: dict[int, tuple[Any, ...]] = {}

    def add(self, slots: array[int], came: array[int], ways: Sequence[tuple[int, tuple[Any, ...]]]) -> None:
        self._came += came
        self._ways.update(ways)
        self._slots += slots

    def waiting(self, count: int) -> Any:
        """Return the addresses of what waits behind so many moves, as an array or as `pack_positions` does."""
        numbers = waiting_behind(self._slots[:count])
        # A view of the array itself would keep another thread from adding to it.
        places = np.frombuffer(self._came.tobytes(), np.int64).reshape(-1, 3)[numbers]
        if not self._ways:
            return places
        ways = [self._ways.get(number, ()) for number in numbers]
        if len({*map(len, ways)}) == 1 and all(type(each) is int for way in ways for each in way):
            return np.hstack([places, np.array(ways, np.int64).reshape(len(ways), -1)])
        return pack_positions(
            [
                SamplePosition(shard, start, end, way)
                for (shard, start, end), way in zip(places.tolist(), ways, strict=True)
            ]
        )
