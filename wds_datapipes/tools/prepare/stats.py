"""Statistics of a dataset: the numbers and sizes of its shards, samples and fields."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wds_datapipes.arguments import checks_calls
from wds_datapipes.parallel.map_shards import Shards, collect_shards, resolve_shards
from wds_datapipes.signatures import spelled
from wds_datapipes.tools.prepare.read_options import DEFAULT_READING, ReadOptions, read_samples
from wds_datapipes.tools.prepare.shard_contents import ShardFault, read_contents


class Sizes(NamedTuple):
    """A summary of sizes, in bytes.

    Attributes:
        number: the number of values.
        total: the sum.
        smallest: the minimum.
        median: the median.
        mean: the mean.
        largest: the maximum.
    """

    number: int
    total: int
    smallest: int
    median: float
    mean: float
    largest: int

    @classmethod
    def of(cls, sizes: Sequence[int] | npt.NDArray[np.int64]) -> Sizes:
        """Summarize sizes.

        >>> Sizes.of([1, 2, 3, 10])
        Sizes(number=4, total=16, smallest=1, median=2.5, mean=4.0, largest=10)
        """
        found = np.asarray(sizes, np.int64)
        if not len(found):
            return cls(0, 0, 0, 0.0, 0.0, 0)
        total, least, most = (int(each) for each in (found.sum(), found.min(), found.max()))
        return cls(len(found), total, least, float(np.median(found)), float(found.mean()), most)


@dataclass
class DatasetStats:
    """Statistics from the headers of all shards.

    Attributes:
        shards: the sizes of the shards that could be read to the end.
        samples_per_shard: the number of samples of each shard.
        samples: the sizes of the samples; the size of a sample is the sum of its fields.
        fields: maps each field to its sizes; the most frequent field comes first.
        faults: the faults of the shards.
        classes: maps each class to its number of samples, the most frequent one first; None without ``label``.
    """

    shards: Sizes
    samples_per_shard: Sizes
    samples: Sizes
    fields: dict[str, Sizes]
    faults: list[ShardFault] = field(default_factory=list)
    classes: dict[str, int] | None = None


class _ShardStats(NamedTuple):
    """The counts of a shard; under None in ``sizes`` are the sizes of samples."""

    bytes: int | None
    sizes: dict[str | None, array[int]]
    faults: list[ShardFault]
    classes: Counter[str]


@checks_calls
def dataset_stats(
    shards: Shards,
    *,
    label: str | None = None,
    num_workers: int | None = None,
    progress: bool = True,
    options: ReadOptions = DEFAULT_READING,
) -> DatasetStats:
    """Read the headers of shards in parallel and summarize the sizes.

    Args:
        shards: a pattern as in `ShardList`, but without variables, or an iterable of URLs, such as a `ShardList`.
        label: the field with the class of a sample as text, such as ``"cls"``. It is read from each sample; without it,
            only headers are read.
        num_workers: the number of worker processes, by default one per CPU; 0 works in this process.
        progress: show a progress bar if standard error is a terminal and rich is installed.
        options: how shards are read.

    Raises:
        UnknownSchemeError, MissingDependencyError: shards of this kind are not supported.
        WorkerDiedError: a process exited without returning a result.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "txt": "one"}, {"__key__": "y", "txt": "three", "cls": "1"}])
        >>> stats = dataset_stats([url])
        >>> stats.samples.number, stats.fields["txt"].largest
        (2, 5)
        >>> dataset_stats([url], label="cls").classes
        {'1': 1}
    """
    ordered = collect_shards(
        partial(_read_stats, label=label, options=options),
        resolve_shards(shards),
        label="Counting",
        measure=lambda part: (len(part.sizes[None]), part.bytes),
        num_workers=num_workers,
        progress=progress,
    )
    sizes: dict[str | None, list[npt.NDArray[np.int64]]] = {None: [np.empty(0, np.int64)]}
    for part in ordered:
        for name, values in part.sizes.items():
            sizes.setdefault(name, []).append(np.frombuffer(values, np.int64))
    fields = {name: Sizes.of(np.concatenate(values)) for name, values in sizes.items()}
    classes = sum((part.classes for part in ordered), Counter[str]())
    return DatasetStats(
        Sizes.of([part.bytes for part in ordered if part.bytes is not None]),
        Sizes.of([len(part.sizes[None]) for part in ordered]),
        fields.pop(None),
        {str(name): each for name, each in sorted(fields.items(), key=lambda item: -item[1].number)},
        [fault for part in ordered for fault in part.faults],
        None if label is None else dict(classes.most_common()),
    )


def _read_stats(url: str, label: str | None, options: ReadOptions) -> _ShardStats:
    """Return what a shard contains."""
    contents = read_contents(url, options)
    sizes: dict[str | None, array[int]] = {None: array("q", [sample.bytes for sample in contents.samples])}
    for sample in contents.samples:
        for name, size in sample.fields.items():
            sizes.setdefault(name, array("q")).append(size)
    classes: Counter[str] = Counter()
    if label is not None and label in sizes:
        # Faults are in the contents already.
        for fields in read_samples([url], options, on_error="skip", fields=[label]):
            if label in fields:
                classes[bytes(fields[label]).decode(errors="replace").strip()] += 1
    faults = [each._replace(message=spelled(dataset_stats, each.message)) for each in contents.faults]
    return _ShardStats(contents.bytes, sizes, faults, classes)
