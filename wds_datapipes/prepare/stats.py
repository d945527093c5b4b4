"""The statistics of a dataset: how many samples, which fields, and how large they are."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wds_datapipes.parallel.map_shards import each_shard
from wds_datapipes.prepare.shard_contents import ShardFault, outline_shard

__all__ = ["DatasetStats", "Sizes", "dataset_stats"]


class Sizes(NamedTuple):
    """How large things are, in bytes.

    Attributes:
        number: how many there are.
        total: their sum.
        smallest: the smallest.
        median: the middle one, or the mean of two.
        mean: the mean.
        largest: the largest.
    """

    number: int
    total: int
    smallest: int
    median: float
    mean: float
    largest: int

    @classmethod
    def of(cls, sizes: Sequence[int] | npt.NDArray[np.int64]) -> Sizes:
        """Sum up sizes.

        >>> Sizes.of([1, 2, 3, 10])
        Sizes(number=4, total=16, smallest=1, median=2.5, mean=4.0, largest=10)
        """
        found = np.asarray(sizes, np.int64)
        if not len(found):
            return cls(0, 0, 0, 0.0, 0.0, 0)
        return cls(
            len(found),
            int(found.sum()),
            int(found.min()),
            float(np.median(found)),
            float(found.mean()),
            int(found.max()),
        )


@dataclass
class DatasetStats:
    """What the headers of all shards tell.

    Attributes:
        shards: the sizes of the files that could be read to their end.
        samples_per_shard: how many samples these have; ``total`` is that of all.
        samples: the sizes of samples, which are those of their fields together.
        fields: the sizes of each field, by its name, beginning with the one that most samples have.
        histogram: how many samples have sizes from a power of two up to the next, by that power; 0 is for those of
            no bytes.
        faults: what is wrong with shards.
    """

    shards: Sizes
    samples_per_shard: Sizes
    samples: Sizes
    fields: dict[str, Sizes]
    histogram: dict[int, int]
    faults: list[ShardFault] = field(default_factory=list)


class _Part(NamedTuple):
    """What one shard adds: sizes are packed as arrays of 8 bytes."""

    size: int | None
    samples: array[int]
    fields: dict[str, array[int]]
    faults: list[ShardFault]


def dataset_stats(
    urls: Sequence[str],
    *,
    executor: Executor | None = None,
    max_workers: int | None = None,
    on_shard: Callable[[int, int], object] | None = None,
    **options: Any,
) -> DatasetStats:
    """Read the headers of shards, in parallel, and sum up sizes.

    Args:
        urls: the shards.
        executor: who works; by default processes of this host.
        max_workers: how many.
        on_shard: called with the number of samples and the size of each shard as it is done.
        **options: for `outline_shard`.

    Raises:
        UnknownSchemeError, MissingDependencyError: shards of this kind cannot be read at all.
        WorkerDiedError: a process has ended without a result.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "txt": "one"}, {"__key__": "y", "txt": "three", "cls": "1"}])
        >>> stats = dataset_stats([url])
        >>> stats.samples.number, stats.fields["txt"].largest, stats.histogram
        (2, 5, {2: 1, 4: 1})
    """
    parts: dict[int, _Part] = {}
    for number, task in each_shard(_part, urls, (options,), executor=executor, max_workers=max_workers):
        part = parts[number] = task.result()
        if on_shard is not None:
            on_shard(len(part.samples), part.size or 0)
    ordered = [parts[number] for number in range(len(urls))]
    samples = _concatenate([part.samples for part in ordered])
    names = dict.fromkeys(name for part in ordered for name in part.fields)
    fields = {name: Sizes.of(_concatenate([p.fields[name] for p in ordered if name in p.fields])) for name in names}
    powers, counts = np.unique(np.frexp(samples.astype(np.float64))[1], return_counts=True)
    return DatasetStats(
        Sizes.of([part.size for part in ordered if part.size is not None]),
        Sizes.of([len(part.samples) for part in ordered]),
        Sizes.of(samples),
        dict(sorted(fields.items(), key=lambda item: -item[1].number)),
        {(1 << power >> 1): count for power, count in zip(powers.tolist(), counts.tolist(), strict=True)},
        [fault for part in ordered for fault in part.faults],
    )


def _part(url: str, options: dict[str, Any]) -> _Part:
    outline = outline_shard(url, **options)
    fields: dict[str, array[int]] = {}
    for sample in outline.samples:
        for name, size in sample.fields.items():
            fields.setdefault(name, array("q")).append(size)
    return _Part(outline.bytes, array("q", [sample.bytes for sample in outline.samples]), fields, outline.faults)


def _concatenate(parts: Sequence[array[int]]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *(np.frombuffer(part, np.int64) for part in parts)])
