"""The contents of a dataset, by the headers of its shards: to find samples, and to read them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
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


#: The most bytes of a field that are read as the name of a class.
CLASS_BYTES = 100


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


class DatasetContents:
    """The samples of a dataset, in order, known by the headers of its shards.

    Reads all headers, but only the data of requested samples if shards support range requests. A truncated shard takes
    part with its complete samples.

    Args:
        urls: the shards.
        label: a field with the class, which is read from each sample; without it, only headers are read.
        title: the label of the progress bar.
        num_workers: the number of worker processes, by default one per CPU.
        scan: the arguments of `ScanOptions`: ``key_rule``, ``end_marker``, ``storage_options`` and ``limits``.

    Attributes:
        sizes: the sizes of all samples, in bytes.
        classes: the class of each sample, or "" if it has none.
        shards: the number of shards.
        bytes: the total size of the shards that could be read to the end.
        unread_shards: the number of the others.
        faults: the faults of shards.

    Raises:
        UnknownSchemeError, MissingDependencyError: shards of this kind are not supported.
        WorkerDiedError: a process ended without a result.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": f"{n}", "cls": f"{n % 2}"} for n in range(100)])
        >>> table = DatasetContents([url], label="cls")
        >>> found = table.find(key="9", label="1")
        >>> [sample["__key__"] for sample in table.read(found)[0]]
        ['9', '19', '29', '39', '49', '59', '69', '79', '89', '91', '93', '95', '97', '99']
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        label: str = "",
        title: str = "Reading headers",
        num_workers: int | None = None,
        **scan: Unpack[ScanKeywords],
    ) -> None:
        self._options = ScanOptions(**scan)
        parts = collect_shards(
            partial(_read_shard, options=self._options, label=label),
            urls,
            label=title,
            measure=lambda part: (len(part[0].index), part[0].bytes),
            num_workers=num_workers,
        )
        self._contents = [shard for shard, _ in parts]
        self._ends = list(accumulate(len(shard.index) for shard in self._contents))
        self.classes = [name for _, classes in parts for name in classes]
        self.sizes = np.concatenate([np.empty(0, np.int64), *(shard.index.sample_sizes for shard in self._contents)])
        sizes = [shard.bytes for shard in self._contents if shard.bytes is not None]
        self.shards, self.bytes, self.unread_shards = len(urls), sum(sizes), len(urls) - len(sizes)
        self.faults = [fault for shard in self._contents for fault in shard.faults]

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.sizes)

    def find(
        self, *, key: str = "", label: str = "", smallest: float = 0, largest: float = np.inf
    ) -> npt.NDArray[np.int64]:
        """Return the positions of samples, in order.

        Args:
            key: a part of the key.
            label: the class.
            smallest: the minimum size, in bytes.
            largest: the maximum size, in bytes.
        """
        found = (self.sizes >= smallest) & (self.sizes <= largest)
        if label:
            found &= np.fromiter((each == label for each in self.classes), bool, len(self.classes))
        if key:
            keys = (each for shard in self._contents for each in shard.index.keys)
            found &= np.fromiter((key in each for each in keys), bool, len(self))
        return np.flatnonzero(found)

    def draw(self, count: int, *, seed: int = 0) -> RandomSamples:
        """Draw samples uniformly, without replacement; all of them if there are fewer.

        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": f"{n}", "cls": f"{n}"} for n in range(100)])
        >>> [sample["__key__"] for sample in DatasetContents([url]).draw(3).samples]
        ['49', '53', '97']
        """
        samples, faults = self.read(Random(seed).sample(range(len(self)), min(count, len(self))))
        faults = [*self.faults, *faults]
        return RandomSamples(samples, self.sizes, self.shards, self.bytes, faults, self.unread_shards)

    def read(self, positions: Iterable[int]) -> tuple[list[Sample], list[ShardFault]]:
        """Read the samples at some positions, in ascending order, and return also the faults of shards now."""
        by_shard: dict[int, list[int]] = {}
        for position in sorted(positions):
            number = bisect_right(self._ends, position)
            by_shard.setdefault(number, []).append(position - self._ends[number] + len(self._contents[number].index))
        samples: list[Sample] = []
        faults = []
        for number, places in by_shard.items():
            shard = self._contents[number]
            try:
                samples += self._read_samples(shard, places)
            except ShardError as error:
                if not shard.faults:
                    faults.append(ShardFault(redact(shard.url), type(error).__name__, "", "", str(error)))
        return samples, faults

    def _read_samples(self, shard: ShardContents, places: Sequence[int]) -> Iterator[Sample]:
        """Read samples of a shard by their offsets, or sequentially if that is not possible."""
        storage_options = self._options.storage_options
        if has_random_access(shard.url, storage_options=storage_options):
            with closing(SampleReader(shard.url, shard.index, storage_options=storage_options)) as reader:
                yield from map(reader.read, places)
            return
        for number, sample in enumerate(islice(_read_leniently(shard, self._options), places[-1] + 1)):
            if number in places:
                yield sample


def _read_leniently(
    shard: ShardContents, options: ScanOptions, fields: Sequence[str] | None = None
) -> Iterator[Sample]:
    """Yield the samples of a shard as they were found by its headers."""
    lenient = replace(options, end_marker="optional")
    return lenient.read_samples([shard.url], fields=fields, on_duplicate="first", on_repeated_key="ignore")


def read_classes(shard: ShardContents, label: str, options: ScanOptions) -> list[str]:
    """Return the class of each sample of a shard, or "" for those without the field ``label``."""
    classes = [""] * len(shard.index)
    try:
        for number, sample in enumerate(islice(_read_leniently(shard, options, [label]), len(classes))):
            classes[number] = bytes(sample.get(label, b"")[:CLASS_BYTES]).decode(errors="replace").strip()
    except ShardError:
        if not shard.faults:
            raise
    return classes


def _read_shard(url: str, options: ScanOptions, label: str) -> tuple[ShardContents, list[str]]:
    """Read the headers of a shard, and the class of each sample, if requested."""
    shard = read_contents(url, options)
    return shard, read_classes(shard, label, options) if label else []
