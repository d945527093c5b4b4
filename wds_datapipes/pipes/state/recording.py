"""Records of a pipeline's position after each of its items.

A state holds the positions of all samples in a shuffle buffer. A record holds the changes since the previous record: a
few numbers, and the positions of the samples added. So every item can have one, and training resumes at the exact item,
without repeating work of the pipeline or relying on identical repetition.

A record is created for each item, but few of them are ever needed. So a record is just a row of numbers, which belongs
to a run of many records. The meaning of the numbers, and values that seldom change, are recorded once per run.
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
from wds_datapipes.samples.sample_buffer import SampleBuffer
from wds_datapipes.samples.shuffling import ShuffleMoves, ShuffleState
from wds_datapipes.shards.position import key_checksum, pack_positions

__all__ = [
    "CHECK",
    "TEXT",
    "WAITING",
    "Form",
    "Part",
    "PlainRecorder",
    "Record",
    "Recorder",
    "pack_records",
    "unpack_records",
]

_COUNTS = struct.Struct("qqq")

#: The maximum number of records and moves in a run; each sample that is buffered at its beginning adds four.
MAX_RUN = 1000

Form: TypeAlias = Any
"""A state of dicts, lists, numbers and strings, with tuples for values that change within a run:

``(n,)``: the number in column n of the row.
``(n, CHECK)``: the `key_checksum` in column n, which holds the key itself until the record is sent.
``(n, TEXT)``: the value of the JSON that was last kept under number n.
``(n, WAITING, shuffle)``: the contents of a shuffle buffer after the number of moves in column n.
"""

CHECK, TEXT, WAITING = "check", "text", "waiting"


class Extra(NamedTuple):
    """The values other than numbers in a packed part of a run.

    Attributes:
        form: the form of the state, if this is the first part.
        refusal: why there is no state in this run, or "" if there is one.
        texts: the kept JSON: the first record of the run that uses it, its number, and the text.
        ways: the routes of each shuffle, by its number.
    """

    form: Form = None
    refusal: str = ""
    texts: Sequence[tuple[int, int, str]] = ()
    ways: Mapping[int, Sequence[tuple[int, tuple[int, ...]]]] = {}


class Part(NamedTuple):
    """Consecutive records of one run.

    Attributes:
        width: the number of columns.
        rows: the rows, concatenated.
        moves: for each shuffle, the slots and the positions of the items added, as in `ShuffleMoves`.
        extra: the values other than numbers; None if there are none.
    """

    width: int
    rows: array[int]
    moves: Sequence[tuple[array[int], array[int]]]
    extra: Extra | None


class Run:
    """Consecutive records that share the form of their state.

    Attributes:
        form: the form of the state.
        checks: the columns with keys.
        count: the number of records.
        moves: the number of packed moves.
        texts: the kept JSON, as in `Extra`.
        shuffles: the states of the shuffles, which record their moves from the beginning of the run.
    """

    def __init__(self, refusal: str = "") -> None:
        self.form: Form = None
        self.checks: Sequence[int] = ()
        self.count = self.moves = 0
        self.texts: list[tuple[int, int, str]] = []
        self.shuffles: list[ShuffleMoves] = []
        self._refusal = refusal
        self._is_packed = False
        self._texts_packed = 0
        self._packed: list[tuple[int, int, int]] = []  # for each shuffle, the numbers of slots, positions and routes

    def pack(self, rows: Sequence[Sequence[Any]]) -> bytes:
        """Return the next records as bytes, with the changes since the previous ones. More may be added meanwhile.

        The bytes are arrays of numbers: the numbers of rows, columns and shuffles, and for each shuffle the numbers of
        moves and of items added; the rows; and for each shuffle its moves and the positions of the items added. The
        pickle of an `Extra` follows, if there is one.
        """
        numbers = [*chain.from_iterable(rows)]
        width = len(rows[0])
        for column in self.checks:
            numbers[column::width] = [key if type(key) is int else key_checksum(key) for key in numbers[column::width]]
        counts = [len(rows), width, len(self.shuffles)]
        arrays = [array("q", numbers)]
        ways = {}
        for number, moves in enumerate(self.shuffles):
            if number == len(self._packed):
                self._packed.append((0, 0, 0))
            first_slot, first_place, first_way = self._packed[number]
            came = moves.added[first_place:]  # before the moves, which are recorded after it
            slots = moves.slots[first_slot:]
            if new := moves.routes[first_way:]:
                ways[number] = new
            self._packed[number] = first_slot + len(slots), first_place + len(came), first_way + len(new)
            self.moves += len(slots)
            counts += (len(slots), len(came))
            arrays += (slots, came)
        texts = self.texts[self._texts_packed :]
        self._texts_packed += len(texts)
        data = b"".join([array("q", counts).tobytes(), *arrays])
        if self._is_packed and not texts and not ways:
            return data
        form, self._is_packed = None if self._is_packed else self.form, True
        return data + pickle.dumps((form, self._refusal, texts, ways), pickle.HIGHEST_PROTOCOL)


Record: TypeAlias = tuple[Sequence[Any], Run]
"""The position of a pipeline: its row in a run. A named tuple would take several times as long to create."""


class Recorder:
    """Creates the records of one pipeline.

    Attributes:
        chains: the functions that return the forms of stages with a state, by the id of the last stage of a pipeline.
        row: the numbers of the current record.
        token: identifies the current run, in which a stage has the same form if it begins in the same column.
        refusal: why there are no records, or "" if there are.
    """

    def __init__(self) -> None:
        self.chains: dict[int, list[Callable[[], Form]]] = {}
        self.row: list[Any] = []
        self.refusal = ""
        self.token = object()
        self._run = Run()
        self._kept: dict[tuple[int, str], tuple[str, Form]] = {}
        self._numbers: dict[int, tuple[int, ShuffleState | SampleBuffer]] = {}
        self._longest = 0  # the maximum number of records and moves in this run

    def record(self, save: Callable[[Any, Recorder], Form], pipe: Any, is_first: bool) -> Record:
        """Return a record.

        Args:
            save: returns the form of the state of a pipeline, and adds its numbers to the row.
            pipe: the pipeline.
            is_first: whether the record must be the first of a run.
        """
        run = self._run
        if run.count + run.moves < self._longest and not is_first:
            row = self.row = []
            if save(pipe, self) == run.form:
                run.count += 1
                return row, run
        run, self.token = Run(), object()
        self._run = run
        row = self.row = []
        self._kept, self._numbers = {}, {}
        self._longest = MAX_RUN
        run.form = save(pipe, self)
        run.checks = _checks_in(run.form)
        run.count = 1
        return row, run

    def refuse(self, reason: str) -> Record:
        """Stop recording, and return a record with the reason."""
        self.refusal = reason
        for _, state in self._numbers.values():
            state.moves = None
        self._run = Run(reason)
        return (), self._run

    def refused(self) -> Record:
        """Return a record after the one with the reason."""
        return (), self._run

    def number(self, value: int) -> Form:
        """Return the form of a number."""
        self.row.append(value)
        return (len(self.row) - 1,)

    def keep(self, owner: object, value: Any, name: str = "") -> Form:
        """Return the form of a value that seldom changes.

        Args:
            owner: the stage that the value belongs to.
            value: the value.
            name: the name of the value, if the stage has several.

        Raises:
            StateError: JSON cannot represent the value.
        """
        try:
            text = json.dumps(value)
        except (TypeError, ValueError) as error:
            raise StateError(
                f"The state of {type(owner).__name__} must contain only JSON values, such as numbers, strings, lists, "
                f"and dicts with string keys: {error}"
            ) from error
        key = id(owner), name
        before, form = self._kept.get(key, ("", (len(self._kept), TEXT)))
        if text != before:
            self._run.texts.append((self._run.count, form[0], text))
            self._kept[key] = text, form
        return form

    def checked(self, key: int | str) -> Form:
        """Return the form of a checksum, or of the `key_checksum` of a key, computed when the record is sent."""
        self.row.append(key)
        return (len(self.row) - 1, CHECK)

    def waiting(self, owner: object, state: ShuffleState | SampleBuffer) -> Form:
        """Return the form of a buffer of samples, and let it record its changes in this run.

        Args:
            owner: the stage.
            state: the state of its shuffle, or its buffer.
        """
        number, known = self._numbers.get(id(owner), (-1, None))
        if known is not state:
            number = len(self._run.shuffles)
            self._numbers[id(owner)] = number, state
            state.moves = ShuffleMoves(state.waiting)
            self._run.shuffles.append(state.moves)
            self._longest += 4 * len(state.waiting)
        self.row.append(0 if state.moves is None else len(state.moves.slots))
        return (len(self.row) - 1, WAITING, number)


class PlainRecorder(Recorder):
    """Returns the values themselves as their forms, for a state that is used immediately."""

    def number(self, value: int) -> int:
        """Return a number."""
        return value

    def keep(self, owner: object, value: Any, name: str = "") -> Any:  # noqa: ARG002 - Recorder.waiting needs the owner
        """Return a value."""
        return value

    def checked(self, key: int | str) -> int:
        """Return the checksum of a key."""
        return key if isinstance(key, int) else key_checksum(key)

    def waiting(self, owner: object, state: ShuffleState | SampleBuffer) -> list[list[int]]:  # noqa: ARG002 - Recorder.waiting needs the owner
        """Return the positions of the buffered items."""
        return pack_positions(state.waiting)


def pack_records(records: Sequence[Record]) -> bytes:
    """Return consecutive records of one run, which follow all those packed before, as bytes."""
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
    extra = Extra(*pickle.loads(data[8 * at :])) if 8 * at < len(data) else None  # noqa: S301 - written by this program
    return Part(width, rows, moves, extra)


def _checks_in(form: Form) -> Sequence[int]:
    """Return the columns with keys in a form."""
    if isinstance(form, tuple):
        return [form[0]] if form[1:] == (CHECK,) else []
    if isinstance(form, dict | list):
        return [column for each in (form.values() if isinstance(form, dict) else form) for column in _checks_in(each)]
    return []
