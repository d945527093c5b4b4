"""Samples from the records of shards: one sample for each record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from wds_datapipes.samples.grouping import shard_metadata
from wds_datapipes.shards.loading import ShardMembers
from wds_datapipes.shards.position import Progress
from wds_datapipes.types import Sample


class RecordGrouping:
    """How records become samples: the counterpart of `SampleGrouping`, whose interface it has."""

    #: Errors of records are handled while shards are read.
    has_ended = False

    def finish(self) -> None:
        """Do nothing, since no sample is skipped here."""

    @staticmethod
    def key_rule(name: str) -> tuple[str, str]:
        """Return the key of a record: its whole name."""
        return name, ""

    def group(self, shards: Iterable[ShardMembers], progress: Progress) -> Iterator[Sample]:
        """Yield the samples of shards, one shard after the other.

        Each is yielded after the next record was read, so that the state has the key of that record.

        Args:
            shards: the shards with their records.
            progress: updated with the position of each sample, and of the next one, before the sample is yielded.
        """
        for shard, records in shards:
            metadata = shard_metadata(shard)
            key, fields, start = "", None, 0
            record: Any  # a dictionary, where tar shards have bytes
            for _, next_key, record, offset in records:
                if fields is not None:
                    progress.last = shard.number, start, offset
                    progress.next = shard.number, offset, next_key
                    yield _make_sample(metadata, key, fields)
                key, fields, start = next_key, record, offset
            continues_in_shard = shard.is_complete and shard.end >= 0
            progress.next = (shard.number, shard.end, "") if continues_in_shard else (shard.number + 1, 0, "")
            if fields is not None:
                progress.last = shard.number, start, shard.end
                yield _make_sample(metadata, key, fields)


def _make_sample(metadata: Sample, key: str, fields: Sample) -> Sample:
    """Return a sample; metadata in the record was written by another program, to identify the source of the sample."""
    sample = metadata | fields | metadata
    sample["__key__"] = key
    return sample
