"""A buffer of the samples that a stage combines, with their positions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from wds_datapipes.samples.position_buffer import PositionBuffer
from wds_datapipes.shards.position import SamplePosition, missing_samples_error

T = TypeVar("T")

_END = object()


class SampleBuffer:
    """The positions of the samples that a stage has read but not yielded, in the order of reading.

    It suits stages that get the same buffer when they read only these samples again in this order. Such a stage needs
    no code to resume: `read` yields the buffered samples in order, and then new ones.

    Args:
        again: the positions in a loaded state.
        cut: the number of tokens in that state.

    Attributes:
        waiting: the positions of the buffered samples.
        at: the position of the last item that the stage has yielded: that of its first sample.
        again: the number of buffered samples to read again after the current one; -1 if the current sample is new.
        cut: the number of tokens already yielded of the last buffered sample, while others have no row yet.
        is_ambiguous: whether two successive samples have the same position, which then does not identify a sample.
    """

    def __init__(self, again: Iterable[SamplePosition] = (), cut: int = 0) -> None:
        self.waiting = PositionBuffer(again)
        self.cut = cut
        self.at = SamplePosition(-1, 0, 0)
        self.again = -1
        self.is_ambiguous = False
        self._numbers: list[int] = []
        self._next = 0
        self._position: Callable[[], SamplePosition] | None = None
        self._at: SamplePosition | None = None

    def read(self, source: Iterable[T], position: Callable[[], SamplePosition] | None) -> Iterator[T]:
        """Yield the samples of a source.

        Args:
            source: the samples, preceded by the buffered ones, in any order.
            position: returns the position of the last sample of ``source``, if known.

        Raises:
            ChangedShardError: a buffered sample is not found at its position.
        """
        items = iter(source)
        self._position = position
        again, self.waiting = self.waiting.positions[::-1], PositionBuffer()  # they are added again
        samples = self._find(items, again)
        while samples:
            self._at, self.again = again.pop(), len(samples) - 1
            yield samples.pop()
        self.again = -1
        yield from map(self._locate, items)

    def add(self) -> int:
        """Buffer the last sample read, and return its number, counted from 0."""
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

    def _find(self, items: Iterator[T], positions: list[SamplePosition]) -> list[T]:
        """Return the samples at some positions, which are the next ones, in any order."""
        missing = {position.identity: slot for slot, position in enumerate(positions)}
        found: list[Any] = [None] * len(positions)
        while missing:
            item: Any = next(items, _END)
            slot = None if item is _END or self._position is None else missing.pop(self._position().identity, None)
            if slot is None:
                raise missing_samples_error(len(missing))
            found[slot] = item
        return found

    def _locate(self, item: T) -> T:
        if self._position is not None:
            before, self._at = self._at, self._position()
            self.is_ambiguous |= before == self._at
        return item
