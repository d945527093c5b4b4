"""Resume state for samples joined from parallel shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from wds_datapipes.samples.derived_position import pack_positions, unpack_positions
from wds_datapipes.shards.position import NOTHING_LEFT, Resume, SamplePosition, samples_gone_error

__all__ = ["JoinedPosition", "source_of"]

#: Where a sample begins in a shard, and where the next one does; -1 is the shard's end.
Span = tuple[int, int]

#: The number of a shard, and of the source and the pass that it comes from, if there are several.
Reading = tuple[int, ...]


class JoinedPosition:
    """Resume state of joined shards: the last sample, and its positions in all of them.

    To resume, that sample is read again in all shards, which are then positioned after it. So are those that later
    stages wait for, each at its own positions.

    Args:
        state: the state to resume from.
        again: samples that wait in later stages. In front of the way of each are its places in the shards beside.
    """

    def __init__(self, state: Mapping[str, Any] | None = None, again: Iterable[SamplePosition] = ()) -> None:
        state = state or {}
        self._at: SamplePosition | None = None
        self._at_places: Sequence[Span] = ()
        self._last: SamplePosition | None = next(iter(unpack_positions(state.get("waiting", ()))), None)
        self._places: Sequence[Span] = [(start, end) for start, end in state.get("columns", ())]
        self._reading: Reading | None = None
        wanted = {source_of(address): address.way[0] for address in again}
        self._wanted = {address.place for address in wanted}
        # Of each reading of a shard, the places of the samples, each in all shards beside.
        self._spans = defaultdict[Reading, list[Sequence[Span]]](list)
        for address, places in wanted.items():
            self._spans[_reading_of(address)].append([*zip(places[::2], places[1::2], strict=True)])
        if self._last is not None and self._last.place not in self._wanted:
            self._spans[_reading_of(self._last)].append(self._places)
        self._left = self._wanted | ({self._last.place} if self._last is not None else set())

    def address(self) -> SamplePosition:
        """Return the position of the latest sample, for later stages."""
        shard, start, end, way = self._at or SamplePosition(-1, 0, 0)
        return SamplePosition(shard, start, end, (tuple(chain.from_iterable(self._at_places)), *way))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the last sample, in its own shard and in the parallel ones."""
        return {
            "waiting": pack_positions([] if self._last is None else [self._last]),
            "columns": [[start, end] for start, end in self._places],
        }

    def is_again(self, at: SamplePosition) -> bool:
        """Return whether a sample has been read before.

        Raises:
            ChangedShardError: it has not, and others that have are still to come.
        """
        if not self._left:
            return False
        if at.place not in self._left:
            raise samples_gone_error(len(self._left))
        self._left.remove(at.place)
        return True

    def is_wanted(self, at: SamplePosition) -> bool:
        """Return whether a later stage waits for a sample that has been read before."""
        return at.place in self._wanted

    def turn_to(self, at: SamplePosition) -> bool:
        """Return whether a sample is from another reading of a shard than the previous one."""
        before, self._reading = self._reading, _reading_of(at)
        return before != self._reading

    def resumes(self, at: SamplePosition) -> list[Resume]:
        """Return the rest to read of the parallel shards, for a sample that has been read before."""
        found = []
        goes_on = self._last is not None and _reading_of(at) == _reading_of(self._last)
        for column, spans in enumerate(zip(*self._spans[_reading_of(at)], strict=True)):
            end = self._places[column][1] if goes_on else -1
            found.append(Resume(NOTHING_LEFT if end < 0 else (0, end), {0: spans}))
        return found

    def note(self, at: SamplePosition, places: Sequence[Span], *, is_new: bool) -> None:
        """Record a sample before it is yielded.

        Args:
            at: where it is.
            places: where it is in the shards beside.
            is_new: whether it comes for the first time.
        """
        self._at, self._at_places = at, places
        if is_new:
            self._last, self._places = at, places


def source_of(address: SamplePosition) -> SamplePosition:
    """Return the position of a sample in its own shard."""
    return address._replace(way=address.way[1:])


def _reading_of(address: SamplePosition) -> Reading:
    if not address.way:
        return (address.shard,)
    return (address.shard, *(each for each in address.way if isinstance(each, int)))
