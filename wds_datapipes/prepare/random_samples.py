"""Random samples of a dataset, drawn by the headers of its shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from wds_datapipes.prepare.dataset_contents import DatasetContents
from wds_datapipes.prepare.shard_contents import ShardFault
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.types import Sample

__all__ = ["RandomSamples", "draw_samples"]


@dataclass
class RandomSamples:
    """Random samples, and facts about their dataset.

    Attributes:
        samples: the samples drawn, in the order of the dataset.
        sizes: the sizes of all samples, in bytes.
        shards: the number of shards.
        bytes: the total size of the shards that could be read to the end.
        faults: the faults of shards.
        unread_shards: the number of shards that could not be read to the end.
    """

    samples: list[Sample]
    sizes: npt.NDArray[np.int64]
    shards: int
    bytes: int
    faults: list[ShardFault]
    unread_shards: int = 0


def draw_samples(
    urls: Sequence[str],
    count: int,
    *,
    seed: int = 0,
    executor: Executor | None = None,
    max_workers: int | None = None,
    on_shard: Callable[[int, int], object] | None = None,
    key_rule: KeyRule = first_dot,
    end_marker: EndMarker = "required",
    storage_options: Mapping[str, Any] | None = None,
) -> RandomSamples:
    """Draw samples from all shards uniformly, without replacement.

    Reads all headers, but only the data of the drawn samples if shards support range requests. A truncated shard takes
    part with its complete samples.

    Args:
        urls: the shards.
        count: the number of samples to draw; all of them if there are fewer.
        seed: the seed of the random choice.
        executor: runs the tasks; by default local processes.
        max_workers: the number of parallel tasks.
        on_shard: called with the number of samples and the size of each finished shard.
        key_rule: splits member names into keys and fields.
        end_marker: ``"optional"`` accepts shards without an end marker.
        storage_options: passed to remote file systems.

    Raises:
        UnknownSchemeError, MissingDependencyError: shards of this kind are not supported.
        WorkerDiedError: a process ended without a result.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": f"{n}", "cls": f"{n}"} for n in range(100)])
        >>> random = draw_samples([url], 3)
        >>> [sample["__key__"] for sample in random.samples], len(random.sizes)
        (['49', '53', '97'], 100)
    """
    table = DatasetContents(
        urls,
        executor=executor,
        max_workers=max_workers,
        on_shard=on_shard,
        key_rule=key_rule,
        end_marker=end_marker,
        storage_options=storage_options,
    )
    samples, faults = table.read(Random(seed).sample(range(len(table)), min(count, len(table))))
    faults = [*table.faults, *faults]
    return RandomSamples(samples, table.sizes, table.shards, table.bytes, faults, table.unread_shards)
