"""Key join: the samples of another indexed dataset that have the same keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, repeat, tee
from typing import TYPE_CHECKING

import numpy as np

from wds_datapipes.errors import DuplicateKeyError, MisalignedShardsError
from wds_datapipes.index.key_table import KeyTable
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.reading.dataset_reader import DatasetReader
from wds_datapipes.io.openers import redact
from wds_datapipes.samples.fields import describe_sample
from wds_datapipes.types import Sample

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["JoinedReader", "KeyJoin"]

#: The number of keys that a message names.
NAMED = 3


class KeyJoin:
    """Finds the samples of another dataset that have the keys of given samples, in any order.

    It holds 8 bytes for each of the given samples.

    Args:
        keys: the keys of each shard of the samples.
        table: the keys of the other dataset.
        urls: the shards of the other dataset.
        sizes: the numbers of samples in them.

    Attributes:
        urls: the shards of the other dataset.
        numbers: for each of the samples, the number of the one with the same key in the other dataset, or -1.

    Raises:
        DuplicateKeyError: two samples of the other dataset have the same key.
    """

    def __init__(self, keys: Iterable[Sequence[str]], table: KeyTable, urls: Sequence[str], sizes: Numbers) -> None:
        self.urls, self._ends, self._sizes = urls, np.cumsum(sizes), sizes
        if repeated := table.repeated(np.arange(len(table))):
            shards, numbers = (each.tolist() for each in self.find(np.array(repeated)))
            raise DuplicateKeyError(
                f"join needs samples with different keys, but {redact(urls[shards[0]])} and {redact(urls[shards[1]])} "
                f"both have the key {table[repeated[0]]!r} (samples {numbers[0]} and {numbers[1]})"
            )
        self.numbers: Numbers = np.concatenate([np.empty(0, np.int64), *map(table.find, keys)])

    def find(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shards of samples of the other dataset, and their numbers in these shards."""
        shards = np.searchsorted(self._ends, numbers, "right")
        return shards, numbers - (self._ends - self._sizes)[shards]


class FieldConflictError(DuplicateKeyError):
    """Two joined datasets have the same field, which no error policy skips, since it is so in all samples."""

    concerns_all = True


class JoinedReader:
    """Reads samples of a dataset together with those of other datasets that have the same keys.

    Args:
        reader: reads the samples.
        starts: the number of the first sample of each shard.
        joins: the other datasets, and their readers.
    """

    def __init__(self, reader: DatasetReader, starts: Numbers, joins: Sequence[tuple[KeyJoin, DatasetReader]]) -> None:
        self._reader, self._starts, self._joins = reader, starts, joins

    @property
    def bytes_read(self) -> int:
        """How many bytes of shards have been read."""
        return sum(reader.bytes_read for reader in (self._reader, *(reader for _, reader in self._joins)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, shards: Numbers, numbers: Numbers) -> list[Sample]:
        """Return samples, as `stream` yields them, without effect on a stream."""
        samples = self._reader.read(shards, numbers)
        for join, reader in self._joins:
            others = join.numbers[self._starts[shards] + numbers]
            own = np.flatnonzero(others >= 0)
            for place, other in zip(own.tolist(), reader.read(*join.find(others[own])), strict=True):
                add_fields(samples[place], other)
        return samples

    def stream(self, chunks: Iterable[tuple[Numbers, Numbers]]) -> Iterator[Sample]:
        """Yield samples with the fields of all datasets; one that another dataset lacks has no fields of it.

        Args:
            chunks: the shards of some samples, and their numbers in them.

        Raises:
            DuplicateKeyError: two datasets have the same field.
            ShardError: a shard cannot be read, or has changed since it was indexed.
            SidecarError: an index is missing or damaged.
        """
        own, *copies = tee(chunks, len(self._joins) + 1)
        others = [self._counterparts(some, *join) for some, join in zip(copies, self._joins, strict=True)]
        for sample, *counterparts in zip(self._reader.stream(own), *others, strict=True):
            for other in counterparts:
                if other is not None:
                    add_fields(sample, other)
            yield sample

    def _counterparts(
        self, chunks: Iterable[tuple[Numbers, Numbers]], join: KeyJoin, reader: DatasetReader
    ) -> Iterator[Sample | None]:
        """Yield the sample of another dataset for each sample, or None if there is none.

        The stream of the other dataset ends before a chunk that has no counterparts: there may be any number of such
        chunks, and reading ahead would keep the sample numbers of all of them in memory.
        """
        every = (join.numbers[self._starts[shards] + numbers] for shards, numbers in chunks)
        for has_any, group in groupby(every, lambda some: bool((some >= 0).any())):
            if not has_any:
                for some in group:
                    yield from repeat(None, len(some))
                continue
            known, sought = tee(group)
            found = reader.stream(join.find(some[some >= 0]) for some in sought)
            for some in known:
                yield from (next(found) if is_found else None for is_found in (some >= 0).tolist())

    def close(self) -> None:
        """Close all shards."""
        self._reader.close()
        for _, reader in self._joins:
            reader.close()


def add_fields(sample: Sample, other: Sample) -> None:
    """Add the fields of another sample that must have the same key, and no field of the same name.

    Raises:
        MisalignedShardsError: it has another key.
        FieldConflictError: it has a field of the same name.
    """
    if other["__key__"] != sample["__key__"]:
        raise MisalignedShardsError(
            f"{describe_sample(sample)} was joined with {describe_sample(other)}, which has another key. An index was "
            "replaced after the dataset was opened: open it again"
        )
    for name, value in other.items():
        if name[:2] == "__":
            continue
        if name in sample:
            raise FieldConflictError(
                f"join got {name!r} from {redact(str(other['__url__']))} for {describe_sample(sample)}, which already "
                "has this field. Choose other fields with fields="
            )
        sample[name] = value


def missing_keys_error(keys: Sequence[str], count: int, join: KeyJoin) -> MisalignedShardsError:
    """Return the error for samples that have no counterpart; it names the first few keys."""
    named = ", ".join(map(repr, keys[:NAMED])) + (", ..." if count > NAMED else "")
    others = f" and {len(join.urls) - 1} other shards" if len(join.urls) > 1 else ""
    return MisalignedShardsError(
        f"{count} samples have no sample with their key in {redact(join.urls[0])}{others}: "
        f'{named}. Pass missing="skip" to leave them out, or missing="keep" to read them without its fields'
    )
