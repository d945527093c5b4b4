"""Random samples of a dataset, drawn by the headers of its shards."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from wds_datapipes.errors import ShardError
from wds_datapipes.index.reading.sample_reader import SampleReader, has_random_access
from wds_datapipes.io.openers import redact
from wds_datapipes.parallel.map_shards import map_shards
from wds_datapipes.prepare.shard_contents import ShardContents, ShardFault, read_contents
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.shards.loading import ReadOptions, read_shards
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
    """

    samples: list[Sample]
    sizes: npt.NDArray[np.int64]
    shards: int
    bytes: int
    faults: list[ShardFault]


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
    work = partial(read_contents, key_rule=key_rule, end_marker=end_marker, storage_options=storage_options)
    contents: dict[int, ShardContents] = {}
    for number, task in map_shards(work, urls, (), executor=executor, max_workers=max_workers):
        shard = contents[number] = task.result()
        if on_shard is not None:
            on_shard(len(shard.index), shard.bytes or 0)
    shards = [contents[number] for number in range(len(urls))]
    ends = list(accumulate(len(shard.index) for shard in shards))
    total = ends[-1] if ends else 0
    selected: dict[int, list[int]] = {}
    for position in sorted(Random(seed).sample(range(total), min(count, total))):
        number = bisect_right(ends, position)
        selected.setdefault(number, []).append(position - ends[number] + len(shards[number].index))
    faults = [fault for shard in shards for fault in shard.faults]
    samples: list[Sample] = []
    for number, positions in selected.items():
        shard = shards[number]
        try:
            samples += _read_samples(shard, positions, key_rule, storage_options)
        except ShardError as error:
            if not shard.faults:
                faults.append(ShardFault(redact(shard.url), type(error).__name__, "", "", str(error)))
    sizes = np.concatenate([np.empty(0, np.int64), *(shard.index.sample_sizes for shard in shards)])
    return RandomSamples(samples, sizes, len(urls), sum(shard.bytes or 0 for shard in shards), faults)


def _read_samples(
    shard: ShardContents, positions: Sequence[int], key_rule: KeyRule, storage_options: Mapping[str, Any] | None
) -> Iterator[Sample]:
    """Read samples of a shard by their offsets, or sequentially if that is not possible."""
    if has_random_access(shard.url, storage_options=storage_options):
        with closing(
            SampleReader(shard.url, shard.index, key_rule=key_rule, storage_options=storage_options)
        ) as reader:
            yield from map(reader.read, positions)
        return
    members = read_shards([shard.url], ReadOptions(end_marker="optional", storage_options=storage_options))
    samples = group_samples(members, key_rule=key_rule, on_duplicate="first", on_repeated_key="ignore")
    with closing(members), closing(samples):  # type: ignore[type-var]  # generators, as they are now
        for number, sample in enumerate(islice(samples, positions[-1] + 1)):
            if number in positions:
                yield sample
