"""Several shards that are open at the same time, from the beginning of an epoch or from a state."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import Any, cast

from wds_datapipes.errors import ChangedShardError
from wds_datapipes.shards.loading import ShardMembers, ShardReader, StreamOptions
from wds_datapipes.shards.position import Resume, merge_spans
from wds_datapipes.shards.seeking import WHOLE, read_spans
from wds_datapipes.types import Shard


class OpenShards:
    """One pass over a list of shards, several of them open at a time; the caller decides which to read next.

    First, `reread` is iterated to its end. Then `read` reads the shards of ``resume.open``, and those that `take` takes
    from the source.

    Args:
        source: yields the paths or URLs of shards.
        options: how to read them.
        resume: the part of the shards that remains to be read.
    """

    def __init__(self, source: Iterable[Any], options: StreamOptions, resume: Resume) -> None:
        def is_whole(number: int) -> bool:
            return number <= resume.last and resume.spans(number) == [WHOLE]

        remaining = source if resume.last == sys.maxsize else islice(source, resume.last + 1)  # may be infinite
        self._resume = resume
        self._reader = ShardReader(remaining, options, is_whole)
        self._shards = cast(Generator[Shard, None, None], iter(self._reader))
        self._taken: dict[int, Shard] = {}  # those that were not read yet

    @property
    def has_ended(self) -> bool:
        """Whether the error policy has ended reading."""
        return self._reader.has_ended

    def reread(self) -> Iterator[ShardMembers]:
        """Read buffered samples again, in the order of the shards."""
        for shard in islice(self._shards, self._resume.next[0]):
            yield from read_spans(self._reader, shard, merge_spans(self._resume.again.get(shard.number, ())))
            if any(shard.number == number for number, _, _ in self._resume.open):
                self._taken[shard.number] = shard

    def take(self) -> int | None:
        """Take the next shard that has something to read; return its number, or None if there is none."""
        for shard in self._shards:
            if self._resume.unread(shard.number):
                self._taken[shard.number] = shard
                return shard.number
        return None

    def read(self, number: int) -> Iterator[ShardMembers]:
        """Read the unread part of a shard, which is opened when its first member is requested."""
        if number not in self._taken:
            raise ChangedShardError(
                f"The state was saved while shard {number} of the list was open, counted from 0, but the list has "
                "fewer shards now. A state can only be loaded with the same shards that it was saved with"
            )
        yield from read_spans(self._reader, self._taken.pop(number), self._resume.unread(number))

    def finish(self) -> None:
        """Warn about the skipped shards, if there are more than already reported."""
        self._reader.finish()

    def close(self) -> None:
        """End the iteration of the source, and stop prefetching."""
        self._shards.close()
        self._reader.close()
