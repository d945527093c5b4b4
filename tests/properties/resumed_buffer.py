"""The law of stages with a `SampleBuffer`: after reading the buffered samples again, they yield the same rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from wds_datapipes.samples.position_buffer import SampleBuffer, plain_state
from wds_datapipes.shards.position import SamplePosition

__all__ = ["check_buffer_resumes"]

Run = Callable[[Iterator[Any], SampleBuffer, Callable[[], SamplePosition]], Iterator[Any]]


class _Source:
    """Items at positions, which count from 0."""

    def __init__(self, items: list[Any], again: list[int], start: int) -> None:
        self._items = items
        self._order = [*again, *range(start, len(items))]
        self.read = start
        self._number = -1

    def __iter__(self) -> Iterator[Any]:
        for number in self._order:
            self._number = number
            self.read = max(self.read, number + 1)
            yield self._items[number]

    def position(self) -> SamplePosition:
        return SamplePosition(0, self._number, self._number + 1)


def check_buffer_resumes(run: Run, items: list[Any], *, most: int | None = None) -> list[Any]:
    """Interrupt a stage after each of its items, resume it, and return the items.

    Args:
        run: applies the stage to a source, with a buffer, and a function that returns the current position.
        items: what the source yields.
        most: the maximum number of samples that the stage may buffer.
    """
    results: list[Any] = []
    states: list[tuple[list[int], int, int]] = [([], 0, 0)]
    source, buffer = _Source(items, [], 0), SampleBuffer()
    for result in run(iter(source), buffer, source.position):
        results.append(result)
        starts = [position.start for position in buffer.waiting]
        assert [start for _, start, _ in plain_state(buffer.waiting.contents())] == starts
        assert most is None or len(starts) <= most
        states.append((starts, buffer.cut, source.read))
    for done, (starts, cut, read) in enumerate(states):
        again = Random(done).sample(starts, len(starts))  # in any order
        source = _Source(items, again, read)
        buffer = SampleBuffer([SamplePosition(0, start, start + 1) for start in starts], cut)
        assert [*run(iter(source), buffer, source.position)] == results[done:], f"after {done} items"
    return results
