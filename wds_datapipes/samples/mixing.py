"""Mix several sources into one stream, or the samples of several shards."""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, MutableSequence, Sequence
from itertools import accumulate, islice
from numbers import Real
from random import Random
from typing import Literal, TypeVar, cast

from wds_datapipes.errors import ChangedShardError, EmptySourceError
from wds_datapipes.samples.epochs import EMPTY_PASSES
from wds_datapipes.samples.grouping import RecordGrouping, SampleGrouping
from wds_datapipes.shards.loading import ShardMembers, ShardReader
from wds_datapipes.shards.position import NextPosition, Progress, Resume, merge_spans
from wds_datapipes.types import Sample, Shard

T = TypeVar("T")

Stop = Literal["first", "all", "never"]
_END = object()


def check_weights(weights: Mapping[str, float]) -> None:
    """Check the weights of a mixture, given by the names of its sources for messages.

    Raises:
        TypeError: a weight is not a number.
        ValueError: a weight is negative or not finite, or all are 0.
    """
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, Real):
            raise TypeError(f"the weight of {name} must be a number, not {weight!r}")
        if not 0 <= weight < math.inf:
            raise ValueError(f"the weight of {name} must be finite and not negative, not {weight!r}")
    if not any(weights.values()):
        raise ValueError(f"at least one of the weights must be above 0, not {[*weights.values()]}")


class MixState:
    """Resume state of a mixture.

    Args:
        left: the sources that are not exhausted.
        turn: the index in ``left`` of the next source, without weights.
        draws: the number of random numbers drawn.

    Attributes:
        at: the source of the last item.
    """

    def __init__(self, left: list[int], turn: int = 0, draws: int = 0) -> None:
        self.left = left
        self.turn = turn
        self.draws = draws
        self.at = 0


def mix_samples(
    passes: MutableSequence[Iterator[T]],
    restart: Callable[[int], Iterator[T]],
    *,
    weights: Sequence[float] | None,
    stop: Stop,
    rng: Random,
    has_no_shards: Callable[[int], bool],
    rotation_period: Callable[[int], int],
    state: MixState,
) -> Iterator[T]:
    """Yield items of several sources, taken in turn or drawn by weight.

    Args:
        passes: an iterator over each source.
        restart: returns a new iterator over a source.
        weights: the weight of each source, or None to take the sources in turn.
        stop: when to stop.
        rng: the random generator.
        has_no_shards: returns whether this instance never gets a shard of a source.
        rotation_period: returns the number of passes in which this instance reads all of a source.
        state: the state to resume from; updated in place.

    Raises:
        EmptySourceError: a source that must be restarted yields no items.
    """
    left = state.left
    bounds = _bounds(left, weights)
    for _ in range(state.draws):
        rng.random()
    while left:
        if weights is None:
            turn = state.turn % len(left)
        else:
            turn = bisect(bounds, rng.random() * bounds[-1], 0, len(left) - 1)
            state.draws += 1
        source = left[turn]
        item = next(passes[source], _END)
        empty = 0
        while item is _END and stop == "never":
            passes[source] = restart(source)
            item = next(passes[source], _END)
            if item is _END:
                if has_no_shards(source):
                    break
                empty += 1
                if empty >= EMPTY_PASSES * rotation_period(source):
                    raise EmptySourceError(
                        f'mix_samples(stop="never") has restarted source {source} (of 0 to {len(passes) - 1}) '
                        f"{empty} times in a row, but it yielded no items. Check its shards, or remove it"
                    )
        if item is not _END:
            state.turn, state.at = turn + 1, source
            yield item  # type: ignore[misc]  # mypy does not narrow by _END
        elif stop == "first":
            left.clear()
        else:
            del left[turn]
            state.turn = turn
            bounds = _bounds(left, weights)


def _bounds(left: list[int], weights: Sequence[float] | None) -> list[float]:
    """Return, for each source, the upper bound of the random numbers that select it."""
    return [] if weights is None else list(accumulate(weights[source] for source in left))


def interleave_samples(
    reader: ShardReader, grouping: SampleGrouping | RecordGrouping, *, progress: Progress, resume: Resume
) -> Iterator[Sample]:
    """Yield one sample from each open shard in turn; the next shard replaces one that has ended.

    Args:
        reader: the shards.
        grouping: turns their members or records into samples.
        progress: updated with the positions of each sample and of the next ones before the sample is yielded.
        resume: the part of the shards that is still to be read.
    """
    shards = reader.shards()
    was_open: dict[int, Shard | None] = {number: None for number, _, _ in resume.open}
    progress.open = deque(resume.open)
    turns = deque[tuple[int, Progress, Generator[Sample, None, None]]]()

    def reread() -> Iterator[ShardMembers]:
        """Read buffered samples again, in the order of the shards."""
        for shard in islice(shards, resume.next[0]):
            yield from reader.read(shard, merge_spans(resume.again.get(shard.number, ())))
            if shard.number in was_open:
                was_open[shard.number] = shard

    def give_turn(shard: Shard, following: NextPosition) -> None:
        """Add a shard to those read in turn; it is opened at its first turn."""
        own = Progress(following)
        samples = grouping.group(reader.read(shard, resume.unread(shard.number)), own)
        turns.append((shard.number, own, cast(Generator[Sample, None, None], samples)))

    again = Progress()
    try:
        for sample in grouping.group(reread(), again):
            progress.last = again.last
            yield sample
        for following in resume.open:
            shard = was_open[following[0]]
            if shard is None:
                raise ChangedShardError(
                    f"The state was saved while shard {following[0]} of the list was open, counted from 0, but the "
                    "list has fewer shards now. A state can only be loaded with the shards it was saved with"
                )
            give_turn(shard, following)
        unread = (shard for shard in shards if resume.unread(shard.number))
        while not (reader.has_ended or grouping.has_ended):
            while len(turns) < reader.options.open_shards and (next_shard := next(unread, None)) is not None:
                progress.open.append((next_shard.number, 0, ""))
                give_turn(next_shard, progress.open[-1])
                progress.next = (next_shard.number + 1, 0, "")
            if not turns:
                break
            number, own, samples = turns[0]
            sample_or_end = next(samples, None)
            # Not earlier, so that the state after an error still contains this turn.
            turns.popleft()
            progress.open.popleft()
            if sample_or_end is None:
                continue
            following = own.resume_position()
            if following[0] == number:
                turns.append((number, own, samples))
                progress.open.append(following)
            progress.last = own.last
            yield sample_or_end
        reader.finish()
        grouping.finish()
    finally:
        reader.stop()  # all shards, before one waits for its threads
        for _, _, samples in turns:
            samples.close()
        shards.close()
        reader.close()
