"""Positions in a list of shards: progress of a reader, and what is left to read after a resume."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

from wds_datapipes.errors import ChangedShardError

__all__ = [
    "NOTHING_LEFT",
    "Origin",
    "Progress",
    "Resume",
    "SamplePosition",
    "ShardShare",
    "SkippedCount",
    "check_of",
    "runs_of",
    "samples_gone_error",
]

#: The position after all shards.
NOTHING_LEFT = (sys.maxsize, 0)


class SamplePosition(NamedTuple):
    """The position of a sample in its shard.

    Attributes:
        shard: the number of its shard among those that were opened, from 0.
        start: where its first header begins in the archive, in bytes.
        end: where the next sample begins; -1 if it is the last one of the shard.
        way: which way it came, where there are several: for each stage that reads several sources, or one again and
            again, the number of the source, if there are several, and that of the pass over it; for each that makes
            several items of one, the number of the item among these, and the `Origin` of that one; for each that reads
            other shards in step, where the sample is in these, as a tuple; the last stage first.
    """

    shard: int
    start: int
    end: int
    way: tuple[Any, ...] = ()

    @property
    def place(self) -> tuple[int, ...]:
        """A tuple that identifies the sample."""
        return (self.shard, self.start, *_numbers(self.way)) if self.way else (self.shard, self.start)

    @classmethod
    def from_values(cls, values: Sequence[int]) -> SamplePosition:
        """Make a position from the list of numbers in a state."""
        shard, start, end, *way = values
        return cls(shard, start, end, tuple(way))


class Origin(NamedTuple):
    """The source of an item, of a stage that makes several items of one.

    Attributes:
        is_last: whether the source has ended after these.
        addresses: where the items are that it was made of, such as the samples of a batch, in their order.
    """

    is_last: bool
    addresses: tuple[SamplePosition, ...]


class Progress:
    """The position of a reader: its last sample, and the next one.

    Args:
        floor: the place before which there is only what is read again: a shard, and where in it.
        check: `check_of` the key there.

    Attributes:
        last: the shard of the one that it yielded last, where that begins there, and where the next one does, or -1.
        next: the shard, and the place in it, where the next one begins, and its key, or "" if that is not known.
        floor: a bound just after the given ``floor``; later positions are greater.
    """

    __slots__ = ("_check", "floor", "last", "next")

    def __init__(self, floor: tuple[int, int] = (0, 0), check: int = 0) -> None:
        shard, offset = floor
        self.last = (-1, 0, 0)
        self.next = (shard, offset, "")
        self.floor = (shard, offset + 1)
        self._check = check

    @property
    def at(self) -> SamplePosition:
        """The position of the sample yielded last."""
        return SamplePosition(*self.last)

    def place(self) -> tuple[int, int, int | str]:
        """Return the position at which to resume, and the key there or `check_of` it."""
        if self.floor < self.next:
            return self.next
        shard, offset = self.floor
        return shard, offset - 1, self._check


class SkippedCount:
    """Counts the items that have passed a stage, each once.

    Those that later stages wait for are read again when a state is loaded, and pass the stages before once more.

    Args:
        count: how many have passed.
        again: where those are that will pass once more, which does not count.
    """

    __slots__ = ("_again", "count")

    def __init__(self, count: int = 0, again: Iterable[SamplePosition] = ()) -> None:
        self.count = count
        self._again = {address.place for address in again}

    @property
    def awaits(self) -> bool:
        """Whether some items are still to come again."""
        return bool(self._again)

    def once_more(self, address: Callable[[], SamplePosition] | None) -> bool:
        """Return whether an item comes again; otherwise count it.

        Args:
            address: tells where it is, if that is known.

        Raises:
            ChangedShardError: it is a new one, and others were to pass before.
        """
        if self._again and address is not None:
            if (place := address().place) not in self._again:
                raise samples_gone_error(len(self._again))
            self._again.remove(place)
            return True
        self.count += 1
        return False


@dataclass(frozen=True)
class ShardShare:
    """The share of one pipeline instance in shards that all instances read.

    Shards are numbered before the list of the epoch is split. When an epoch begins, all of them are assigned in turn.
    When the rest of it is resharded, so are the shards that no instance can have begun; of the others, each instance
    gets pieces.

    Attributes:
        every: among how many instances the shards are dealt.
        turn: which of them this one gets: those whose numbers, divided by ``every``, leave this.
        since: the first shard that is dealt in this way.
        pieces: the parts to read of shards before it, in order, each from one place to another; -1 is the shard's end.
    """

    every: int = 1
    turn: int = 0
    since: int = 0
    pieces: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)

    def spans(self, shard: int) -> Sequence[tuple[int, int]]:
        """Return the spans of a shard to read, in order, as pairs of offsets; -1 is its end."""
        if shard < self.since:
            return self.pieces.get(shard, ())
        return [(0, -1)] if shard % self.every == self.turn else ()

    def shards(self, end: int) -> Iterator[int]:
        """Yield the numbers of the shards before ``end`` that have something to read, in no order."""
        yield from self.pieces
        yield from range(self.since + (self.turn - self.since) % self.every, end, self.every)

    def state_dict(self, after: tuple[int, int] = (0, 0)) -> dict[str, Any]:
        """Return the share as plain values, without most of what is before a position."""
        shard, reached = after
        pieces = [
            [number, start, end]
            for number, spans in self.pieces.items()
            for start, end in spans
            if number > shard or (number == shard and (end < 0 or end > reached))
        ]
        return {"every": self.every, "turn": self.turn, "since": self.since, "pieces": pieces}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ShardShare:
        """Make a share from the result of `state_dict`."""
        pieces = defaultdict[int, list[tuple[int, int]]](list)
        for shard, start, end in state["pieces"]:
            pieces[shard].append((start, end))
        every, turn, since = state["every"], state["turn"], state["since"]
        numbers = [every - 1, turn, since, *(each for piece in state["pieces"] for each in piece[:2])]
        are_numbers = all(type(number) is int and number >= 0 for number in numbers)
        if not are_numbers or any(-1 < end < start for _, start, end in state["pieces"]):
            raise ValueError(f"shards are dealt by {numbers!r:.200}")
        return cls(every, turn, since, pieces)


#: All shards of a list that is an instance's own.
ALL = ShardShare()


@dataclass(frozen=True)
class Resume:
    """The part of a list of shards that is left to read.

    Attributes:
        next: the shard, and the place in it, where that begins which was never read.
        again: the places of samples before it to read again first, by the number of their shard.
        deal: what of the list, before it is split, this instance has to read; None if the list is its own.
        check: `check_of` the key of the sample at ``next``.
    """

    next: tuple[int, int] = (0, 0)
    again: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    deal: ShardShare | None = None
    check: int = 0

    @property
    def last(self) -> int:
        """The number of the last shard that may have something to read."""
        return max(self.again, default=-1) if self.next == NOTHING_LEFT else NOTHING_LEFT[0]

    def spans(self, shard: int) -> list[tuple[int, int]]:
        """Return the spans of a shard to read, in order, as pairs of offsets; -1 is its end."""
        spans = runs_of(self.again.get(shard, ()))
        first, place = self.next
        if shard >= first:
            reached = place if shard == first else 0
            own = (self.deal or ALL).spans(shard)
            spans += [(max(start, reached), end) for start, end in own if end < 0 or end > reached]
        return spans


def _numbers(way: Iterable[Any]) -> Iterator[int]:
    """Yield what tells one way from all others: no item is in two origins, so the last of one stands for it."""
    for each in way:
        if isinstance(each, Origin):
            yield from _numbers(each.addresses[-1].way)
        elif isinstance(each, int):
            yield each


def samples_gone_error(count: int) -> ChangedShardError:
    """Return the error for buffered samples that are not found again."""
    return ChangedShardError(
        f"{count} samples that waited in a shuffle buffer are no longer where they were. A state can be loaded only "
        "with the very shards that it was saved with"
    )


def check_of(key: str) -> int:
    """Return a checksum of a key; 0 stands for an unknown key.

    >>> check_of("000123"), check_of("")
    (2478529769, 0)
    """
    return crc32(key.encode("utf-8", "surrogateescape")) if key else 0


def runs_of(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent spans.

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
