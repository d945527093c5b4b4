"""Random samples of a dataset, found by the headers of its shards and read by their offsets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from wds_datapipes.errors import ShardError
from wds_datapipes.index.reading.sample_reader import SampleReader, has_random_access
from wds_datapipes.io.openers import redact
from wds_datapipes.parallel.map_shards import collect_shards
from wds_datapipes.prepare.shard_contents import ScanKeywords, ScanOptions, ShardContents, ShardFault, read_contents
from wds_datapipes.types import Sample

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass
class RandomSamples:
    """Random samples, and facts about their dataset.

    Attributes:
        samples: the samples drawn, in the order of the dataset.
        sizes: the sizes of all samples, in bytes.
        bytes: the total size of the shards that could be read to the end.
        faults: the faults of shards.
        unread_shards: the number of shards that could not be read to the end.
    """

    samples: list[Sample]
    sizes: npt.NDArray[np.int64]
    bytes: int
    faults: list[ShardFault]
    unread_shards: int


def draw_samples(
    urls: Sequence[str], count: int, *, seed: int = 0, num_workers: int | None = None, **scan: Unpack[ScanKeywords]
) -> RandomSamples:
    """Draw samples uniformly, without replacement; all of them if there are fewer.

    Reads all headers, but only the data of drawn samples if shards support range requests. A truncated shard takes
    part with its complete samples.

    Args:
        urls: the shards.
        count: the number of samples.
        seed: determines which samples are drawn.
        num_workers: the number of worker processes, by default one per CPU.
        scan: the arguments of `ScanOptions`: ``key_rule``, ``end_marker``, ``storage_options`` and ``limits``.

    Raises:
        UnknownSchemeError, MissingDependencyError: shards of this kind are not supported.
        WorkerDiedError: a process ended without a result.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": f"{n}", "cls": f"{n}"} for n in range(100)])
        >>> [sample["__key__"] for sample in draw_samples([url], 3).samples]
        ['49', '53', '97']
    """
    options = ScanOptions(**scan)
    shards = collect_shards(
        partial(read_contents, options=options),
        urls,
        label="Reading headers",
        measure=lambda shard: (len(shard.index), shard.bytes),
        num_workers=num_workers,
    )
    ends = list(accumulate(len(shard.index) for shard in shards))
    total = ends[-1] if ends else 0
    by_shard: dict[int, list[int]] = {}
    for position in sorted(Random(seed).sample(range(total), min(count, total))):
        number = bisect_right(ends, position)
        by_shard.setdefault(number, []).append(position - ends[number] + len(shards[number].index))
    samples: list[Sample] = []
    faults = [fault for shard in shards for fault in shard.faults]
    for number, places in by_shard.items():
        shard = shards[number]
        try:
            samples += _read_samples(shard, places, options)
        except ShardError as error:
            if not shard.faults:
                faults.append(ShardFault(redact(shard.url), type(error).__name__, "", "", str(error)))
    sizes = [shard.bytes for shard in shards if shard.bytes is not None]
    all_sizes = np.concatenate([np.empty(0, np.int64), *(shard.index.sample_sizes for shard in shards)])
    return RandomSamples(samples, all_sizes, sum(sizes), faults, len(shards) - len(sizes))


def _read_samples(shard: ShardContents, places: Sequence[int], options: ScanOptions) -> Iterator[Sample]:
    """Read samples of a shard by their offsets, or sequentially if that is not possible."""
    storage_options = options.storage_options
    if has_random_access(shard.url, storage_options=storage_options):
        with closing(SampleReader(shard.url, shard.index, storage_options=storage_options)) as reader:
            yield from map(reader.read, places)
        return
    for number, sample in enumerate(islice(options.read_leniently(shard.url), places[-1] + 1)):
        if number in places:
            yield sample
