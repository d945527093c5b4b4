"""How far a reading of shards has got, and where another one goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Address", "Passed", "Progress", "Resume", "runs_of"]


class Address(NamedTuple):
    """Where a sample is.

    Attributes:
        shard: the number of its shard among those that were opened, from 0.
        start: where its first header begins in the archive, in bytes.
        end: where the next sample begins; -1 if it is the last one of the shard.
    """

    shard: int
    start: int
    end: int


class Progress:
    """Where the samples are that a reading has yielded.

    Attributes:
        at: the one that it yielded last.
        next: the shard, and the place in it, where the next one begins.
        floor: the place before which there is only what is read again.
    """

    __slots__ = ("at", "floor", "next")

    def __init__(self) -> None:
        self.at = Address(-1, 0, 0)
        self.next: tuple[int, int] = (0, 0)
        self.floor: tuple[int, int] = (0, 0)


class Passed:
    """How many items have passed a stage, each once.

    Those that later stages wait for are read again when a state is loaded, and pass the stages before once more.

    Args:
        count: how many have passed.
        again: where those are that will pass once more, which does not count.
    """

    __slots__ = ("_again", "count")

    def __init__(self, count: int = 0, again: Iterable[Address] = ()) -> None:
        self.count = count
        self._again = {address[:2] for address in again}

    @property
    def awaits(self) -> bool:
        """Whether items are still to pass once more."""
        return bool(self._again)

    def once_more(self, address: Callable[[], Address] | None) -> bool:
        """Tell whether an item passes once more, and count it if not.

        Args:
            address: tells where it is, if that is known.
        """
        if self._again and address is not None and (place := address()[:2]) in self._again:
            self._again.remove(place)
            return True
        self.count += 1
        return False


@dataclass(frozen=True)
class Resume:
    """What of a list of shards is left to read.

    Attributes:
        starts: the numbers of shards that were begun, and where to go on in each.
        rest: this shard and all behind it were not begun.
        again: the places of samples to read again first, by the number of their shard.
    """

    starts: Mapping[int, int] = field(default_factory=dict)
    rest: int = 0
    again: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)

    @property
    def begin(self) -> tuple[int, int]:
        """Where that begins which was never read."""
        return min([*self.starts.items(), (self.rest, 0)])

    def spans(self, shard: int) -> list[tuple[int, int]]:
        """Return the parts of a shard to read, in order, each from one place to another; -1 is its end."""
        spans = runs_of(self.again.get(shard, ()))
        if shard in self.starts or shard >= self.rest:
            spans.append((self.starts.get(shard, 0), -1))
        return spans


def runs_of(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join places that touch.

    >>> runs_of([(512, 1024), (4096, -1), (1024, 2048)])
    [(512, 2048), (4096, -1)]
    """
    runs: list[tuple[int, int]] = []
    for start, end in sorted(places):
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((start, end))
    return runs
