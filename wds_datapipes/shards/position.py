"""Positions in a list of shards: the progress of a reader, the part to read on resume, and its assignment."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from wds_datapipes.shards.packed_rows import pack_rows, unpack_rows

NextPosition: TypeAlias = tuple[int, int, str]
"""The position of the next sample: the number of its shard, its offset, and its key, or "" if unknown."""

#: The position after all shards.
END_OF_SHARDS: NextPosition = (sys.maxsize, 0, "")
#: The span of a whole shard.
WHOLE = (0, -1)


class SamplePosition(NamedTuple):
    """The position of a sample in its shard.

    Attributes:
        shard: the number of its shard among those opened, from 0.
        start: the offset of its first header in the archive, in bytes.
        end: the offset of the next sample; -1 if this is the last sample of the shard.
        route: for each stage that reads several sources, or one repeatedly, the number of the source, if there are
            several, and the number of the pass; the last stage first.
    """

    shard: int
    start: int
    end: int
    route: tuple[int, ...] = ()

    @property
    def identity(self) -> tuple[int, ...]:
        """A tuple that identifies the sample."""
        return self.shard, self.start, *self.route


def rows_of(positions: Iterable[SamplePosition]) -> list[list[int]]:
    """Return positions as plain lists.

    >>> rows_of([SamplePosition(0, 512, 1024, (1, 3))])
    [[0, 512, 1024, 1, 3]]
    """
    return [[shard, start, end, *route] for shard, start, end, route in positions]


def pack_positions(positions: Iterable[SamplePosition]) -> list[list[int]] | str:
    """Return positions for a state, as plain lists, or as text if there are many."""
    return pack_rows(rows_of(positions))


def unpack_positions(packed: Iterable[Sequence[int]] | str) -> list[SamplePosition]:
    """Return the positions that `pack_positions` has packed.

    >>> unpack_positions([[0, 512, 1024, 3], [1, 0, -1]])
    [SamplePosition(shard=0, start=512, end=1024, route=(3,)), SamplePosition(shard=1, start=0, end=-1, route=())]
    """
    return [SamplePosition(shard, start, end, tuple(route)) for shard, start, end, *route in unpack_rows(packed)]


class Progress:
    """The position of a reader: its last sample and the next one.

    Args:
        floor: a position; anything before it is read only to restore samples.

    Attributes:
        last: the shard of the last sample yielded, its offset, and the offset of the next one, or -1.
        next: the position of the next sample; if several shards are open, the position of the next unopened shard.
        open: if several shards are open, the position of the next sample of each, in the order of their turns.
        floor: a bound just above the given ``floor``; later positions are greater.
    """

    __slots__ = ("_given", "floor", "last", "next", "open")

    def __init__(self, floor: NextPosition = (0, 0, "")) -> None:
        shard, offset, _ = floor
        self.last = (-1, 0, 0)
        self.next: NextPosition = (shard, offset, "")
        self.open: deque[NextPosition] = deque()
        self.floor = (shard, offset + 1)
        self._given = floor

    def resume_position(self) -> NextPosition:
        """Return the position at which to resume."""
        return self.next if self.floor < self.next else self._given


@dataclass(frozen=True)
class ShardShare:
    """The share of a pipeline instance in the shards that all instances read.

    Shards are numbered before the list of the epoch is split. At the start of an epoch, all of them are assigned
    round-robin. When the rest of an epoch is resharded, this applies to the shards that no instance has started; each
    instance gets pieces of the others.

    Attributes:
        every: the number of instances that share the shards.
        turn: the number of this instance: it reads the shards whose number modulo ``every`` is ``turn``.
        since: the first shard assigned round-robin.
        pieces: the spans of earlier shards to read, in order, as pairs of offsets; -1 means the end of the shard.
    """

    every: int = 1
    turn: int = 0
    since: int = 0
    pieces: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)

    def spans(self, shard: int) -> Sequence[tuple[int, int]]:
        """Return the spans of a shard to read, in order, as pairs of offsets; -1 is its end."""
        if shard < self.since:
            return self.pieces.get(shard, ())
        return [WHOLE] if shard % self.every == self.turn else ()

    def shards(self, end: int) -> Iterator[int]:
        """Yield the numbers of the shards before ``end`` that have anything to read, in no particular order."""
        yield from self.pieces
        yield from range(self.since + (self.turn - self.since) % self.every, end, self.every)

    def state_dict(self) -> dict[str, Any]:
        """Return the share as plain values; each call returns the same object."""
        return self._plain

    @cached_property
    def _plain(self) -> dict[str, Any]:
        pieces = [(number, start, end) for number, spans in self.pieces.items() for start, end in spans]
        return {"instances": self.every, "instance": self.turn, "since": self.since, "pieces": pack_rows(pieces)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ShardShare:
        """Create a share from the result of `state_dict`."""
        pieces = defaultdict[int, list[tuple[int, int]]](list)
        for shard, start, end in unpack_rows(state["pieces"]):
            pieces[shard].append((start, end))
        if not 0 <= state["instance"] < state["instances"]:
            raise ValueError(f"the share {state['instance']} of {state['instances']}")
        return cls(state["instances"], state["instance"], state["since"], pieces)


@dataclass(frozen=True)
class Resume:
    """The part of a list of shards that is still to be read.

    Attributes:
        next: the position from which on nothing has been read yet.
        again: the spans of earlier samples to read again first, by shard number.
        share: the share of this instance in the unsplit list; None if the list belongs to this instance alone.
        open: for each earlier shard that was open, the position from which on nothing has been read yet, in the order
            of their turns.
        key_rule: splits the name of a member into key and field.
    """

    next: NextPosition = (0, 0, "")
    again: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    share: ShardShare | None = None
    open: Sequence[NextPosition] = ()
    key_rule: Callable[[str], tuple[str, str] | None] = field(default=lambda _: None, compare=False)

    @property
    def last(self) -> int:
        """The number of the last shard that may have anything to read."""
        return max(self.again, default=-1) if self.next == END_OF_SHARDS else END_OF_SHARDS[0]

    def is_whole(self, shard: int) -> bool:
        """Whether a whole shard is to be read."""
        return shard <= self.last and self.spans(shard) == [WHOLE]

    def key_at(self, shard: int, offset: int) -> str:
        """Return the key of the next sample if this is its position, else ""."""
        return next((key for number, start, key in (self.next, *self.open) if (number, start) == (shard, offset)), "")

    def spans(self, shard: int) -> list[tuple[int, int]]:
        """Return the spans of a shard to read, in order, as pairs of offsets; -1 is its end."""
        return merge_spans(self.again.get(shard, ())) + self.unread(shard)

    def unread(self, shard: int) -> list[tuple[int, int]]:
        """Return the unread spans of a shard, in order."""
        first, offset, _ = self.next
        reached = next((reached for number, reached, _ in self.open if number == shard), None)
        if reached is None:
            if shard < first:
                return []
            reached = offset if shard == first else 0
        own = [WHOLE] if self.share is None else self.share.spans(shard)
        return [(max(start, reached), end) for start, end in own if end < 0 or end > reached]


#: All shards of a list.
ALL_SHARDS = Resume()


def within(
    positions: Iterable[SamplePosition], spans: Callable[[int], Sequence[tuple[int, int]]]
) -> list[SamplePosition]:
    """Return the positions in some spans of their shards.

    Args:
        positions: the positions.
        spans: called with the number of a shard, returns its spans.
    """
    found = dict[int, Sequence[tuple[int, int]]]()
    return [
        each
        for each in positions
        if any(
            start <= each.start and (each.start < end or end < 0)
            for start, end in found.get(each.shard) or found.setdefault(each.shard, spans(each.shard))
        )
    ]


def merge_spans(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent spans.

    >>> merge_spans([(512, 1024), (4096, -1), (1024, 2048)])
    [(512, 2048), (4096, -1)]
    """
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


@dataclass(frozen=True)
class Resharding:
    """The rest of an epoch that several instances of a stage have begun, for a different number of instances.

    Attributes:
        states: the states of all previous instances, in the order of `instance_of`; None means the beginning.
        waiting: called with the number of a previous instance, returns the positions of the samples that its later
            stages hold back.
        instances: the current number of instances.
        own: the current instances whose states are requested. Only the positions that they take over are unpacked.
    """

    states: Sequence[Any]
    waiting: Callable[[int], Iterable[SamplePosition]]
    instances: int
    own: Sequence[int]


def assign_shards(rest: Resharding) -> list[tuple[ShardShare, list[SamplePosition]]]:
    """Assign the samples that the previous instances have not yielded to the current instances.

    Each instance takes over some previous instances, or part of one. The rest of a partly read shard goes to a single
    instance, along with the samples held back from that shard. So does every other shard before the last one that was
    started. All later shards are assigned round-robin.

    Args:
        rest: the resharding, with the states of ``.group_samples()``: the positions in the shards after the delivered
            items.

    Returns:
        list: for each instance, its share, and which of its samples were held back.
    """
    states, every = [state or {} for state in rest.states], rest.instances
    count = len(states)
    heads = [_head(state, number, count) for number, state in enumerate(states)]
    since = max(reached for reached, _ in heads)
    order = sorted(range(count), key=lambda number: not heads[number][1])  # so that all get equally many begun ones
    shares = []
    for instance in rest.own:
        first, turn = instance % count, instance // count
        pieces, held = dict[int, Sequence[tuple[int, int]]](), set[SamplePosition]()
        for number in order[first::every]:
            found, held_there = _pieces(states[number], number, count, rest.waiting(number), since)
            pieces.update(found[turn :: len(range(first, every, count))])
            held |= held_there
        assigned = {shard: pieces[shard] for shard in sorted(pieces)}
        own = within(sorted(held), defaultdict[int, Sequence[tuple[int, int]]](tuple, assigned).__getitem__)
        shares.append((ShardShare(every, (instance - count + since) % every, since, assigned), own))
    return shares


def _head(state: Mapping[str, Any], number: int, instances: int) -> tuple[int, bool]:
    """Return the first shard that an instance has not begun, and whether part of an earlier one is unread."""
    shard, start, _ = state.get("next", (0, 0, ""))
    is_begun, since = start > 0 or "open" in state, 0
    if "share" in state:
        since = state["share"]["since"]
        is_begun |= shard < since
    else:
        shard = shard * instances + number
    return max(since, shard + (start > 0)), is_begun


def _pieces(
    state: Mapping[str, Any], number: int, instances: int, waiting: Iterable[SamplePosition], since: int
) -> tuple[list[tuple[int, list[tuple[int, int]]]], set[SamplePosition]]:
    """Return the shards that an instance has begun, and those before ``since``, each with its unread spans.

    Shards with an open end come first, because they may have many samples; the others are sorted by size. In addition,
    return the samples that were held back.
    """
    shard, start, key = state.get("next", (0, 0, ""))
    again = defaultdict[int, list[tuple[int, int]]](list)
    if "share" in state:
        share, every, turn = ShardShare.from_state(state["share"]), 1, 0
    else:  # the instance counts the shards assigned to it at the start of the epoch
        share, every, turn = ShardShare(instances, number), instances, number
    held = {*unpack_positions(state.get("held", ()))}
    for address in waiting:
        again[address.shard * every + turn].append((address.start, address.end))
        held.add(SamplePosition(address.shard * every + turn, address.start, address.end))
    was_open = [(number * every + turn, at, key) for number, at, key in state.get("open", ())]
    resume = Resume((shard * every + turn, start, key), again, share, open=was_open)
    found = []
    for shard in {*again, *share.shards(since)}:
        if spans := resume.spans(shard):
            is_open = resume.unread(shard) != [] and spans[-1][1] < 0
            found.append((not is_open, -sum(max(0, end - start) for start, end in spans), shard, spans))
    return [(shard, spans) for _, _, shard, spans in sorted(found)], held
