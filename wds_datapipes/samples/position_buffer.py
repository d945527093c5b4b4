"""The positions of the samples that a stage holds back, now and at any earlier moment."""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from wds_datapipes.shards.held_samples import NONE_AWAITED, Awaited, ItemCounter
from wds_datapipes.shards.packed_rows import pack_rows
from wds_datapipes.shards.position import SamplePosition, pack_positions, rows_of

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

    def contents(self, count: int) -> list[Sequence[int]]:
        """Return the positions after a number of changes, in the form that `rows_of` returns."""
        return [self.appended[number] for number in list_buffered(self.changes[:count])]


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


T = TypeVar("T")

_END = object()


class HeldSamples:
    """The samples that a stage holds back between two items: where they are, and how it finds them again to resume.

    Args:
        waiting: the positions in a loaded state, in the order of the buffer.

    Attributes:
        waiting: the positions of the buffered samples.
        awaited: the samples that later stages have buffered; when these are read again, they bypass the buffer.
        at: the position of the (first) sample of the last item that the stage has yielded.
        is_ambiguous: whether two successive samples have the same position, which then does not identify a sample.
    """

    def __init__(self, waiting: Iterable[SamplePosition] = ()) -> None:
        self.waiting = PositionBuffer(waiting)
        self.awaited: Awaited = NONE_AWAITED
        self.at = SamplePosition(-1, 0, 0)
        self.is_ambiguous = False

    def contents(self) -> BufferContents | list[list[int]] | str:
        """Return the current positions of the buffered samples, for a state."""
        return self.waiting.contents()

    def find(
        self, items: Iterator[T], position: Callable[[], SamplePosition] | None
    ) -> Generator[T, None, list[tuple[SamplePosition, bool, T]]]:
        """Read the buffered samples, which are the next ones in any order; yield those that later stages have buffered.

        The error policies of earlier stages may skip some, and a new one is then read to find that out.

        Returns:
            list: the position of each sample, whether it is new, and the sample, in the order of the buffer.
        """
        if position is None:
            return []
        missing = {at.identity: slot for slot, at in enumerate(self.waiting)}
        pending = ItemCounter(again=self.awaited)
        found: list[Any] = [None] * len(missing)
        item: Any
        while (missing or pending.has_pending) and (item := next(items, _END)) is not _END:
            at = position()
            slot = missing.pop(at.identity, -1)
            if slot >= 0:
                found[slot] = at, False, item
            elif pending.is_repeat(position):
                self.at = at
                yield item
            else:
                found.append((at, True, item))
                break
            del item
        return [each for each in found if each is not None]


class SampleBuffer(HeldSamples):
    """The positions of the samples that a stage has read but not yielded, in the order of reading.

    It suits stages whose buffer is the same again after they read only these samples in this order. Such a stage needs
    no code to resume: `read` yields the buffered samples in order, followed by new ones.

    Args:
        again: the positions in a loaded state.
        cut: the number of tokens in that state.

    Attributes:
        again: the number of buffered samples to read again after the current one; -1 if the current sample is new.
        unread: the positions of samples of the source that `read` has not yielded yet.
        cut: the number of tokens already yielded of the last buffered sample, while others have no row yet.
    """

    def __init__(self, again: Iterable[SamplePosition] = (), cut: int = 0) -> None:
        super().__init__(again)
        self.cut = cut
        self.again = -1
        self.unread: list[SamplePosition] = []
        self._numbers: list[int] = []
        self._next = 0
        self._position: Callable[[], SamplePosition] | None = None
        self._at: SamplePosition | None = None

    def read(self, source: Iterable[T], position: Callable[[], SamplePosition] | None) -> Iterator[T]:
        """Yield the samples of a source.

        Args:
            source: the samples, preceded by the buffered ones, in any order.
            position: returns the position of the last sample of ``source``, if known.
        """
        items = iter(source)
        self._position = position
        found = (yield from self.find(items, position))[::-1]
        if self.cut and self.waiting.positions[-1].identity not in {at.identity for at, _, _ in found}:
            self.cut = 0  # the sample that was cut was skipped
        # They are added again. Some are new if the error policies of earlier stages have skipped others.
        self.unread, self.waiting = [at for at, _, _ in found], PositionBuffer()
        new = sum(is_new for _, is_new, _ in found)
        while found:
            self._at, is_new, sample = found.pop()
            self.unread.pop()
            self.again = -1 if is_new else len(found) - new
            yield sample
            del sample
        self.again = -1
        yield from map(self._locate, items)

    def contents(self) -> BufferContents | list[list[int]] | str:
        """Return the current positions of the buffered samples, for a state."""
        if not self.unread:
            return self.waiting.contents()
        # What was cut is the last one.
        count = len(self.waiting) - bool(self.cut)
        return pack_positions([*self.waiting.positions[:count], *self.unread[::-1], *self.waiting.positions[count:]])

    def add(self) -> int:
        """Buffer the last sample read and return its number, counted from 0."""
        if self._at is not None:
            self.waiting.append(self._at)
        self._numbers.append(self._next)
        self._next += 1
        return self._numbers[-1]

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove the samples of the next item by their numbers."""
        if self._at is not None:
            self.at = self.waiting.positions[bisect_left(self._numbers, numbers[0])]
        for number in numbers:
            slot = bisect_left(self._numbers, number)
            del self._numbers[slot]
            if self._at is not None:
                self.waiting.remove(slot)

    def cut_part(self, start: int, end: int) -> None:
        """Record that the next item consists of tokens of the last buffered sample.

        Args:
            start: the number of the first token.
            end: the number of the token after the last one; 0 if no tokens are left.
        """
        self.cut = end
        if not end:
            self.remove(self._numbers[-1:])
        if self._at is not None:
            self.at = self._at._replace(route=(*self._at.route, start))

    def _locate(self, item: T) -> T:
        if self._position is not None:
            before, self._at = self._at, self._position()
            self.is_ambiguous |= before == self._at
        return item
