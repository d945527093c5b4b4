"""The positions of the samples that a stage holds back, now and at any earlier moment."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from wds_datapipes.shards.packed_rows import pack_rows
from wds_datapipes.shards.position import SamplePosition, rows_of

#: Marks an appended position, among the slots of positions that were taken.
APPENDED = -1

#: A history is replaced once it has this many changes, plus four for each position with which it began.
MAX_CHANGES = 1000

_numbers = itertools.count()


class BufferHistory:
    """The changes to an initially empty buffer of positions.

    Attributes:
        number: identifies the history in its process.
        changes: the changes in order: `APPENDED`, the slot of a position that was taken and replaced by the last one,
            or ``-2 - slot`` if the positions after it moved up instead.
        appended: the appended positions, in the form that `rows_of` returns.
    """

    __slots__ = ("appended", "changes", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.changes = array("q")
        self.appended: list[Sequence[int]] = []

    def contents(self, count: int) -> list[list[int]]:
        """Return the positions after a number of changes, in the form that `rows_of` returns."""
        return [[*self.appended[number]] for number in list_buffered(self.changes[:count])]


BufferContents: TypeAlias = tuple[BufferHistory, int]
"""The contents of a buffer after a number of changes; later changes do not affect them."""


class PositionBuffer:
    """The positions of the samples that a stage holds back; changes are recorded once `contents` has been called.

    Args:
        positions: the first positions.

    Attributes:
        positions: the current positions.
    """

    __slots__ = ("_history", "_limit", "positions")

    def __init__(self, positions: Iterable[SamplePosition] = ()) -> None:
        self.positions = [*positions]
        self._history: BufferHistory | None = None
        self._limit = 0

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[SamplePosition]:
        return iter(self.positions)

    def append(self, position: SamplePosition) -> None:
        """Append a position."""
        self.positions.append(position)
        if (history := self._history) is not None:
            history.appended.append((*position[:3], *position[3]) if position[3] else position[:3])
            history.changes.append(APPENDED)

    def take(self, slot: int) -> SamplePosition:
        """Remove and return a position; the last one takes its slot."""
        positions = self.positions
        positions[slot], taken = positions[-1], positions[slot]
        positions.pop()
        if self._history is not None:
            self._history.changes.append(slot)
        return taken

    def remove(self, slot: int) -> None:
        """Remove a position; those after it move up."""
        del self.positions[slot]
        if self._history is not None:
            self._history.changes.append(-2 - slot)

    def contents(self) -> BufferContents:
        """Return the current contents."""
        history = self._history
        if history is None or len(history.changes) > self._limit:
            self._history = history = BufferHistory(next(_numbers))
            self._limit = MAX_CHANGES + 4 * len(self.positions)
            history.appended += rows_of(self.positions)
            history.changes.extend([APPENDED] * len(self.positions))
        return history, len(history.changes)


def list_buffered(changes: Iterable[int]) -> list[int]:
    """Return the numbers of the items in a buffer, initially empty, after some changes.

    Args:
        changes: the changes, as in `BufferHistory`.

    Examples:
        >>> list_buffered([APPENDED, APPENDED, APPENDED, 0, APPENDED])
        [2, 1, 3]
        >>> list_buffered([APPENDED, APPENDED, APPENDED, -2, APPENDED])
        [1, 2, 3]
    """
    buffered: list[int] = []
    number = 0
    for slot in changes:
        if slot == APPENDED:
            buffered.append(number)
            number += 1
        elif slot < 0:
            del buffered[-2 - slot]
        else:
            last = buffered.pop()
            if slot < len(buffered):
                buffered[slot] = last
    return buffered


def plain_state(value: Any, histories: Mapping[int, BufferHistory] | None = None) -> Any:
    """Return a state as JSON-compatible values, with the positions in place of `BufferContents`.

    Args:
        value: the state, or a part of it.
        histories: the histories by number, if the state comes from another process.

    Examples:
        >>> plain_state({"waiting": PositionBuffer([SamplePosition(0, 512, 1024)]).contents(), "next": (0, 0)})
        {'waiting': [[0, 512, 1024]], 'next': [0, 0]}
    """
    if isinstance(value, dict):
        return {key: plain_state(each, histories) for key, each in value.items()}
    if isinstance(value, list | tuple):
        if value and isinstance(history := value[0], BufferHistory):
            return pack_rows((history if histories is None else histories[history.number]).contents(value[1]))
        return [plain_state(each, histories) for each in value]
    return value
