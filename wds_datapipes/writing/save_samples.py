"""From samples to shards, as a generator."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from wds_datapipes.errors import EncodeError, UnwritableSampleError
from wds_datapipes.on_error.policy import ErrorPolicy, OnError, check_on_error
from wds_datapipes.types import Sample, ShardInfo
from wds_datapipes.writing.shard_writer import ShardWriter

__all__ = ["write_wds_shards"]


def write_wds_shards(
    source: Iterable[Sample], pattern: str | os.PathLike[str], *, on_error: OnError = "raise", **options: Any
) -> Iterator[ShardInfo]:
    """Write all samples, and yield each shard when it is finished; the options are those of `ShardWriter`."""
    check_on_error(on_error)
    policy = ErrorPolicy(on_error, "write_wds_shards")
    told = 0
    with ShardWriter(pattern, **options) as writer:
        for sample in policy.counted(source):
            try:
                writer.write(sample)
            except (EncodeError, UnwritableSampleError) as error:
                if policy.goes_on(error, sample):
                    continue
                break
            while told < len(writer.shards):
                yield writer.shards[told]
                told += 1
    yield from writer.shards[told:]
    policy.finish()
