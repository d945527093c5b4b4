"""Interleaving of the samples of several shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from typing import cast

from wds_datapipes.samples.grouping import RecordGrouping, SampleGrouping, check_next_key
from wds_datapipes.shards.open_shards import OpenShards
from wds_datapipes.shards.position import NextPosition, Progress, Resume
from wds_datapipes.types import Sample


def interleave_samples(
    shards: OpenShards,
    grouping: SampleGrouping | RecordGrouping,
    open_shards: int,
    *,
    progress: Progress,
    resume: Resume,
) -> Iterator[Sample]:
    """Yield one sample of each open shard in turn; the next shard takes the place of one that has ended.

    Args:
        shards: the shards.
        grouping: makes samples of their members or records.
        open_shards: the number of open shards.
        progress: updated with the position of each sample, and of the next ones, before the sample is yielded.
        resume: the part of the shards that remains to be read.
    """
    progress.open = deque(resume.open)
    turns = deque(_OpenShard(shards, grouping, each) for each in progress.open)
    again = Progress()
    try:
        for sample in grouping.group(shards.reread(), again):
            progress.last = again.last
            yield sample
        while not (shards.has_ended or grouping.has_ended):
            while len(turns) < open_shards and (number := shards.take()) is not None:
                progress.open.append((number, 0, ""))
                turns.append(_OpenShard(shards, grouping, progress.open[-1]))
                progress.next = (number + 1, 0, "")
            if not turns:
                break
            current = turns[0]
            sample_or_end = next(current.samples, None)
            # Only now, so that the state after an error still has this turn.
            turns.popleft()
            progress.open.popleft()
            if sample_or_end is None:
                continue
            following = current.progress.resume_position()
            if following[0] == current.number:
                turns.append(current)
                progress.open.append(following)
            progress.last = current.progress.last
            yield sample_or_end
        shards.finish()
        grouping.finish()
    finally:
        for each in turns:
            each.samples.close()
        shards.close()


class _OpenShard:
    """A shard whose samples are read in turn with others, from a position on; it is opened at its first turn."""

    __slots__ = ("number", "progress", "samples")

    def __init__(self, shards: OpenShards, grouping: SampleGrouping | RecordGrouping, following: NextPosition) -> None:
        self.number = following[0]
        self.progress = Progress(following)
        members = check_next_key(shards.read(self.number), following, grouping.key_rule)
        self.samples = cast(Generator[Sample, None, None], grouping.group(members, self.progress))
