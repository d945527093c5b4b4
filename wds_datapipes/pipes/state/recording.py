"""Recording where a pipeline is behind each of its items.

A state holds the addresses of all samples that wait in a shuffle. A record holds what has changed since the record
before it: a few numbers, and the addresses of the samples that came in. So there is one for every item, and a run that
resumes begins at the very item: it repeats no work of the pipeline, and nothing depends on repeating it alike.

Records are made for each item, and few of them are ever needed. So a record is a row of numbers, and one of many in a
run. What the numbers mean, and all that seldom changes, is told once for the run.
"""

from __future__ import annotations

import json
import pickle
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from wds_datapipes.errors import StateError
from wds_datapipes.samples.shuffling import ShuffleMoves, ShuffleState
from wds_datapipes.shards.position import check_of

__all__ = [
    "CHECK",
    "TEXT",
    "VALUE",
    "WAITING",
    "Form",
    "Part",
    "Record",
    "Recorder",
    "pack_records",
    "unpack_records",
]

_COUNTS = struct.Struct("qqq")

#: A run has so many records and moves together, and four more for each sample that waits when it begins.
LONGEST = 1000

Form: TypeAlias = Any
"""A state, which is dicts, lists, numbers and texts, with tuples in place of what changes within a run:

``(n,)``: the number in column n of the row.
``(n, CHECK)``: the same; it is `check_of` the key in this column, until the record is sent.
``(n, VALUE)``, ``(n, TEXT)``: the value that was kept last in place n, or what the JSON there is of.
``(n, WAITING, shuffle)``: what waits in a shuffle, behind as many moves as column n tells.
"""

CHECK, VALUE, TEXT, WAITING = "check", "value", "text", "waiting"


class Extra(NamedTuple):
    """What a packed part of a run has beside numbers.

    Attributes:
        form: the form of the state, if this is the first part.
        refusal: why there is no state in this run, or "" if there is one.
        values: those that were kept: from which record of the run on, in which place, and the value.
        ways: those of each shuffle, by its number.
    """

    form: Form = None
    refusal: str = ""
    values: Sequence[tuple[int, int, Any]] = ()
    ways: Mapping[int, Sequence[tuple[int, tuple[Any, ...]]]] = {}


class Part(NamedTuple):
    """Records in a row of one run.

    Attributes:
        width: how many numbers a row has.
        rows: the rows, one behind another.
        moves: of each shuffle the slots, and where the items are that came, as in `ShuffleMoves`.
        extra: whatever is no number; None if there is nothing.
    """

    width: int
    rows: array[int]
    moves: Sequence[tuple[array[int], array[int]]]
    extra: Extra | None


class Run:
    """What many records in a row have in common.

    Attributes:
        form: the form of the state.
        checks: the columns with keys.
        count: how many records there are.
        moves: how many moves were packed.
        values: those that were kept, as in `Extra`.
        shuffles: those of the stages, which note their moves from here on.
    """

    def __init__(self, refusal: str = "") -> None:
        self.form: Form = None
        self.checks: Sequence[int] = ()
        self.count = self.moves = 0
        self.values: list[tuple[int, int, Any]] = []
        self.shuffles: list[ShuffleMoves] = []
        self._refusal = refusal
        self._is_packed = False
        self._values_packed = 0
        self._packed: list[tuple[int, int, int]] = []  # of each shuffle, how many slots, places and ways

    def pack(self, rows: Sequence[Sequence[Any]]) -> bytes:
        """Return the records that come next, and what has changed since those before. More may be made meanwhile.

        It is arrays of numbers: how many rows there are, how many numbers in a row, how many shuffles, and for each of
        these how many moves, and items that came, there are; the rows; and the moves, and where the items are that
        came, for each shuffle. Behind that is the pickle of an `Extra`, if there is one.
        """
        numbers = [*chain.from_iterable(rows)]
        width = len(rows[0])
        for column in self.checks:
            numbers[column::width] = [key if type(key) is int else check_of(key) for key in numbers[column::width]]
        counts = [len(rows), width, len(self.shuffles)]
        arrays = [array("q", numbers)]
        ways = {}
        for number, moves in enumerate(self.shuffles):
            if number == len(self._packed):
                self._packed.append((0, 0, 0))
            first_slot, first_place, first_way = self._packed[number]
            came = moves.came[first_place:]  # before the moves, which are noted behind that
            slots = moves.slots[first_slot:]
            if new := moves.ways[first_way:]:
                ways[number] = new
            self._packed[number] = first_slot + len(slots), first_place + len(came), first_way + len(new)
            self.moves += len(slots)
            counts += (len(slots), len(came))
            arrays += (slots, came)
        values = self.values[self._values_packed :]
        self._values_packed += len(values)
        data = b"".join([array("q", counts).tobytes(), *arrays])
        if self._is_packed and not values and not ways:
            return data
        form, self._is_packed = None if self._is_packed else self.form, True
        return data + pickle.dumps((form, self._refusal, values, ways), pickle.HIGHEST_PROTOCOL)


Record: TypeAlias = tuple[Sequence[Any], Run]
"""Where a pipeline is: its row in a run. A tuple of its own kind would take several times as long to create."""


class Recorder:
    """Makes the records of one pipeline.

    Attributes:
        chains: what returns the form of each stage that has a state, by the identity of the last stage of a pipeline.
        row: the numbers of the present record.
        is_first: whether that is the first one of a run, for which each stage has to return its form anew.
        refusal: why there are no records, or "" if there are.
    """

    def __init__(self) -> None:
        self.chains: dict[int, list[Callable[[], Form]]] = {}
        self.row: list[Any] = []
        self.is_first = True
        self.refusal = ""
        self._run = Run()
        self._kept: dict[Any, tuple[object, Form]] = {}
        self._numbers: dict[int, tuple[int, ShuffleState]] = {}
        self._longest = 0  # how many records and moves this run may have

    def record(self, save: Callable[[Any, Recorder], Form], pipe: Any, is_first: bool) -> Record:
        """Return a record.

        Args:
            save: returns the form of the state of a pipeline, and adds its numbers to the row.
            pipe: the pipeline.
            is_first: whether the record has to be the first of a run.
        """
        run = self._run
        if run.count + run.moves < self._longest and not is_first:
            row = self.row = []
            if save(pipe, self) == run.form:
                run.count += 1
                return row, run
        run = self._run = Run()
        row = self.row = []
        self._kept, self._numbers = {}, {}
        self._longest = LONGEST
        self.is_first = True
        run.form = save(pipe, self)
        self.is_first = False
        run.checks = _checks_in(run.form)
        run.count = 1
        return row, run

    def refuse(self, reason: str) -> Record:
        """Record nothing any more, and return a record that says so."""
        self.refusal = reason
        for _, state in self._numbers.values():
            state.moves = None
        self._run = Run(reason)
        return (), self._run

    def refused(self) -> Record:
        """Return a record behind that which has said why there are none."""
        return (), self._run

    def number(self, value: int) -> Form:
        """Return the form of a number."""
        self.row.append(value)
        return (len(self.row) - 1,)

    def keep(self, key: Any, source: object, value: Callable[[], Any]) -> Form:
        """Return the form of a value that stays the same as long as it comes from the same source.

        Args:
            key: what has it: a stage, and a name if it has several.
            source: what it comes from.
            value: returns it.
        """
        found = self._kept.get(key)
        if found is None or found[0] is not source:
            found = self._keep(key, found, source, value(), VALUE)
        return found[1]

    def keep_equal(self, key: Any, value: Any, kind: str = VALUE) -> Form:
        """Return the form of a value that never changes, and may be equal to the one before.

        Args:
            key: what has it.
            value: the value.
            kind: `TEXT` if it is the JSON of what is in the state.
        """
        found = self._kept.get(key)
        if found is None or found[0] != value:
            found = self._keep(key, found, value, value, kind)
        return found[1]

    def keep_values(self, owner: object, state: Mapping[str, Any]) -> Form:
        """Return the form of a state of few values, none of which its stage changes in place."""
        return {
            name: self.number(value) if type(value) is int else self.keep_equal((id(owner), name), value)
            for name, value in state.items()
        }

    def keep_json(self, owner: object, state: Mapping[str, Any]) -> Form:
        """Return the form of a state whose values its stage may change in place.

        Raises:
            StateError: JSON does not have one of the values.
        """
        try:
            text = json.dumps(state)
            if isinstance(state, dict) and state.get("lasting") is not None:  # it is looked for in the form
                each = {name: json.dumps(value) for name, value in json.loads(text).items()}
                return {name: self.keep_equal((id(owner), name), value, TEXT) for name, value in each.items()}
        except (TypeError, ValueError) as error:
            raise StateError(
                f"The state of {type(owner).__name__} has to consist of values that JSON has, such as numbers, "
                f"strings, lists, and dicts with strings as keys: {error}"
            ) from error
        return self.keep_equal(id(owner), text, TEXT)

    def follow(self, owner: object, state: ShuffleState) -> int:
        """Return the number of a shuffle, and have it note its moves in this run.

        Args:
            owner: the stage.
            state: of its shuffle.
        """
        number, known = self._numbers.get(id(owner), (-1, None))
        if known is not state:
            number = len(self._run.shuffles)
            self._numbers[id(owner)] = number, state
            state.moves = ShuffleMoves(state.waiting)
            self._run.shuffles.append(state.moves)
            self._longest += 4 * len(state.waiting)
        return number

    def _keep(self, key: Any, found: Any, source: object, value: Any, kind: str) -> tuple[object, Form]:
        form = (len(self._kept), kind) if found is None else found[1]
        self._run.values.append((self._run.count, form[0], value))
        kept = self._kept[key] = source, form
        return kept


def pack_records(records: Sequence[Record]) -> bytes:
    """Return records in a row of one run, which are behind all that were packed before, as bytes."""
    return records[0][1].pack([row for row, _ in records])


def unpack_records(data: bytes) -> Part:
    """Return the records that `pack_records` was called with."""
    count, width, shuffles = _COUNTS.unpack_from(data)
    first, rest = 3 + 2 * shuffles, len(data) % 8
    numbers = array("q")
    numbers.frombytes(data[: len(data) - rest])
    lengths = numbers[3:first]
    at = first + count * width
    rows = numbers[first:at]
    moves = []
    for slots, came in zip(lengths[::2], lengths[1::2], strict=True):
        middle, end = at + slots, at + slots + came
        moves.append((numbers[at:middle], numbers[middle:end]))
        at = end
    extra = Extra(*pickle.loads(data[8 * at :])) if 8 * at < len(data) else None  # noqa: S301 - from this very program
    return Part(width, rows, moves, extra)


def _checks_in(form: Form) -> Sequence[int]:
    """Return the columns with keys in a form."""
    if isinstance(form, tuple):
        return [form[0]] if form[1:] == (CHECK,) else []
    if isinstance(form, dict | list):
        return [column for each in (form.values() if isinstance(form, dict) else form) for column in _checks_in(each)]
    return []
