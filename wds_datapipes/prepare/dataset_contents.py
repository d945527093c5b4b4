"""The contents of a dataset, by the headers of its shards: to find samples, and to read them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from functools import partial
from itertools import accumulate, islice
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

__all__ = ["DatasetContents", "read_classes"]

#: The most bytes of a field that are read as the name of a class.
CLASS_BYTES = 100
#: A shard, and the class of each of its samples, if requested.
_Part = tuple[ShardContents, list[str]]


class DatasetContents:
    """The samples of a dataset, in order, known by the headers of its shards.

    A truncated shard takes part with its complete samples.

    Args:
        urls: the shards.
        label: a field with the class, which is read from each sample; without it, only headers are read.
        executor: runs the tasks; by default local processes.
        max_workers: the number of parallel tasks.
        on_shard: called with the number of samples and the size of each finished shard.
        key_rule: splits member names into keys and fields.
        end_marker: ``"optional"`` accepts shards without an end marker.
        storage_options: passed to remote file systems.

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
        executor: Executor | None = None,
        max_workers: int | None = None,
        on_shard: Callable[[int, int], object] | None = None,
        key_rule: KeyRule = first_dot,
        end_marker: EndMarker = "required",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._key_rule, self._storage_options = key_rule, storage_options
        reading: dict[str, Any] = {"key_rule": key_rule, "end_marker": end_marker, "storage_options": storage_options}
        work = partial(_read_shard, label=label, reading=reading)
        parts: dict[int, _Part] = {}
        for number, task in map_shards(work, urls, (), executor=executor, max_workers=max_workers):
            shard, _ = parts[number] = task.result()
            if on_shard is not None:
                on_shard(len(shard.index), shard.bytes or 0)
        self._contents = [parts[number][0] for number in range(len(urls))]
        self._ends = list(accumulate(len(shard.index) for shard in self._contents))
        self.classes = [name for number in range(len(urls)) for name in parts[number][1]]
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
        options: dict[str, Any] = {"key_rule": self._key_rule, "storage_options": self._storage_options}
        if has_random_access(shard.url, storage_options=self._storage_options):
            with closing(SampleReader(shard.url, shard.index, **options)) as reader:
                yield from map(reader.read, places)
            return
        members = read_shards([shard.url], ReadOptions(end_marker="optional", storage_options=self._storage_options))
        samples = group_samples(members, key_rule=self._key_rule, on_duplicate="first", on_repeated_key="ignore")
        with closing(members), closing(samples):  # type: ignore[type-var]  # generators, as they are now
            for number, sample in enumerate(islice(samples, places[-1] + 1)):
                if number in places:
                    yield sample


def read_classes(
    shard: ShardContents, label: str, *, key_rule: KeyRule, storage_options: Mapping[str, Any] | None
) -> list[str]:
    """Return the class of each sample of a shard, or "" for those without the field ``label``."""
    members = read_shards([shard.url], ReadOptions(end_marker="optional", storage_options=storage_options))
    samples = group_samples(members, key_rule=key_rule, fields=[label], on_duplicate="first", on_repeated_key="ignore")
    classes = [""] * len(shard.index)
    try:
        for number, sample in enumerate(islice(samples, len(classes))):
            classes[number] = bytes(sample.get(label, b"")[:CLASS_BYTES]).decode(errors="replace").strip()
    except ShardError:
        if not shard.faults:
            raise
    return classes


def _read_shard(url: str, *, label: str, reading: dict[str, Any]) -> _Part:
    """Read the headers of a shard, and the class of each sample."""
    shard = read_contents(url, **reading)
    options = {name: reading[name] for name in ("key_rule", "storage_options")}
    return shard, read_classes(shard, label, **options) if label else []
