"""Recording where a pipeline is behind each of its items.

A state holds the addresses of all samples that wait in a shuffle. A record holds what has changed since the record
before it: a few numbers, and the addresses of the samples that came in. So there is one for every item, and a run that
resumes begins at the very item: it repeats no work of the pipeline, and nothing depends on repeating it alike.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from wds_datapipes.core.origins import values_of
from wds_datapipes.core.progress import Address
from wds_datapipes.core.shuffling import Move, ShuffleState, apply_moves
from wds_datapipes.errors import StateError

__all__ = [
    "Copied",
    "Kept",
    "Record",
    "Recorded",
    "Recorder",
    "copied_state",
    "pack_records",
    "state_behind",
    "unpack_records",
]

#: A record that stands for itself costs as much as so many changes, and two for each sample that waits.
WHOLE_COSTS = 1000

# States are dicts, lists, numbers and texts. In a record, a tuple stands for something else: there is a record for each
# item, and other objects would take several times as long to create and to send.
Kept: TypeAlias = tuple[int]
"""Stands in a record for a large value: the number of its log."""
Copied: TypeAlias = tuple[str]
"""The state of a user's stage as JSON, since the stage may change the values that it has returned."""
Log: TypeAlias = tuple[int, Any, Sequence[Move]]
"""What a record says of a large value: its number; the value, or None if it is that of the record before; and how that
has changed, if it is the list of what waits in a shuffle."""


class Record(NamedTuple):
    """Where a pipeline is.

    Attributes:
        stages: the states of its stages, with `Kept` in place of large values.
        logs: these values, or what has changed in them since the record before.
        is_whole: whether it stands for itself, and needs no record before it.
        refusal: why there is no state, or "" if there is one.
    """

    stages: Any
    logs: Sequence[Log] = ()
    is_whole: bool = True
    refusal: str = ""


@runtime_checkable
class Recorded(Protocol):
    """A stage whose state has large values, or the states of other stages."""

    def recorded_state(self, recorder: Recorder) -> dict[str, Any]:
        """Return what ``state_dict()`` returns, with `Kept` in place of large values."""


class Recorder:
    """Keeps what the records of one pipeline have in common.

    Attributes:
        chains: what returns the state of each stage that has one, by the identity of the last stage of the pipeline.
        is_whole: whether the present record is to stand for itself.
        logs: those of the present record.
        refusal: why there are no records, or "" if there are.
    """

    def __init__(self) -> None:
        self.chains: dict[int, list[Callable[[], Any]]] = {}
        self.is_whole = True
        self.logs: list[Log] = []
        self.refusal = ""
        self._numbers: dict[int, int] = {}
        self._kept: dict[int, object] = {}
        self._shuffles: dict[int, ShuffleState] = {}
        self._changes = 0  # since the last record that stands for itself
        self._bound = 0

    def begin(self) -> None:
        """Begin a record."""
        self.logs = []
        self.is_whole = self._changes >= self._bound
        if self.is_whole:
            self._changes, self._bound = 0, WHOLE_COSTS
        self._changes += 1

    def refuse(self, reason: str) -> None:
        """Record nothing any more."""
        self.refusal = reason
        for state in self._shuffles.values():
            state.moves = None

    def keep(self, owner: object, source: object, value: Callable[[], Any]) -> Kept:
        """Return what stands for a value that stays the same as long as it comes from the same source.

        Args:
            owner: the stage whose state has it.
            source: what it comes from.
            value: returns it.
        """
        number = self._number(owner)
        if self.is_whole or self._kept.get(number) is not source:
            self._kept[number] = source
            self.logs.append((number, value(), ()))
        return (number,)

    def follow(self, owner: object, state: ShuffleState) -> Kept:
        """Return what stands for the addresses of the samples that wait in a shuffle.

        Args:
            owner: the stage whose state has them.
            state: of its shuffle.
        """
        number, moves = self._number(owner), state.moves
        if moves is None or self.is_whole:
            self._shuffles[number] = state
            waiting: list[Move] = []
            for address in state.waiting:
                waiting += (address,) if address.way else address[:3]
            self.logs.append((number, [], waiting))
            self._bound += 2 * len(state.waiting)
            state.moves = []
        elif moves:
            self.logs.append((number, None, moves))
            self._changes += len(moves) >> 1  # four numbers for a sample that has come and gone
            state.moves = []
        return (number,)

    def _number(self, owner: object) -> int:
        number = self._numbers.get(id(owner))
        if number is None:
            number = self._numbers[id(owner)] = len(self._numbers)
        return number


def copied_state(stage: Any) -> Copied:
    """Return the state of a user's stage.

    Raises:
        StateError: JSON does not have one of its values.
    """
    state = stage.state_dict()
    try:
        return (json.dumps(state),)
    except (TypeError, ValueError) as error:
        raise StateError(
            f"The state of {type(stage).__name__} has to consist of values that JSON has, such as numbers, strings, "
            f"lists, and dicts with strings as keys: {error}"
        ) from error


def state_behind(records: Sequence[Record]) -> Any:
    """Return the state of a pipeline behind the last of some records.

    Args:
        records: in a row; the first one stands for itself.
    """
    values: dict[int, Any] = {}
    for record in records:
        for number, value, moves in record.logs:
            if value is not None:
                values[number] = [*value] if isinstance(value, list) else value
            if moves:
                apply_moves(values[number], moves)
    return _resolved(records[-1].stages, values)


def pack_records(records: Sequence[Record]) -> bytes:
    """Return records as bytes, for another process."""
    return pickle.dumps([*map(tuple, records)], pickle.HIGHEST_PROTOCOL)


def unpack_records(data: bytes) -> list[Record]:
    """Return the records that `pack_records` was called with."""
    records: list[Any] = pickle.loads(data)  # noqa: S301 - the other process is a part of this program
    return [Record(*each) for each in records]


def _resolved(value: Any, values: dict[int, Any]) -> Any:
    """Return a state with the large values in it."""
    if isinstance(value, tuple):
        (within,) = value
        if isinstance(within, str):
            return json.loads(within)
        found = values[within]
        if isinstance(found, list) and not all(type(each) is list for each in found):
            return values_of([each if isinstance(each, Address) else Address(*each) for each in found])
        return found
    if isinstance(value, dict):
        return {key: _resolved(each, values) for key, each in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict | tuple | None):
        return [_resolved(each, values) for each in value]
    return value
