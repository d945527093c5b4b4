"""Interleave the samples of several shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from itertools import islice
from typing import cast

from wds_datapipes.errors import ChangedShardError
from wds_datapipes.samples.grouping import RecordGrouping, SampleGrouping
from wds_datapipes.shards.loading import ShardMembers, ShardReader
from wds_datapipes.shards.position import NextPosition, Progress, Resume, merge_spans
from wds_datapipes.types import Sample, Shard


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
                    "list has fewer shards now. A state can only be loaded with the same shards that it was saved with"
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
        for _, _, samples in turns:
            samples.close()
        shards.close()
        reader.close()
