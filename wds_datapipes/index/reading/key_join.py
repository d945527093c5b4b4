"""Key join: the samples of another indexed dataset that have the same keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import tee
from typing import TYPE_CHECKING

import numpy as np

from wds_datapipes.errors import DuplicateKeyError, MisalignedShardsError
from wds_datapipes.index.key_table import KeyTable
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.reading.dataset_reader import Chunk, DatasetReader, Item
from wds_datapipes.io.openers import redact
from wds_datapipes.samples.fields import describe_sample

if TYPE_CHECKING:
    from typing_extensions import Self


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

    def find(self, numbers: Numbers) -> Chunk:
        """Return the shards of samples of the other dataset, and their numbers in these shards; -1 for no sample."""
        shards = np.searchsorted(self._ends, numbers, "right")
        return np.where(numbers < 0, -1, shards), numbers - (self._ends - self._sizes)[shards]


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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stream(self, chunks: Iterable[Chunk]) -> Iterator[Item]:
        """Yield samples with the fields of all datasets, and an error in the place of each that cannot be read.

        A sample that another dataset lacks has no fields of it. An error may also be a `DuplicateKeyError`, if two
        datasets have the same field.

        Args:
            chunks: the shards of some samples, and their numbers in them.
        """
        own, *copies = tee(chunks, len(self._joins) + 1)
        others = [
            reader.stream(self._counterparts(some, join))
            for some, (join, reader) in zip(copies, self._joins, strict=True)
        ]
        for sample, *counterparts in zip(self._reader.stream(own), *others, strict=True):
            yield join_fields(sample, counterparts)

    def _counterparts(self, chunks: Iterable[Chunk], join: KeyJoin) -> Iterator[Chunk]:
        for shards, numbers in chunks:
            yield join.find(join.numbers[self._starts[shards] + numbers])

    def close(self) -> None:
        """Close all shards."""
        self._reader.close()
        for _, reader in self._joins:
            reader.close()


def join_fields(sample: Item, counterparts: Sequence[Item]) -> Item:
    """Return a sample with the fields of those with the same key in other datasets, or the first error."""
    if not isinstance(sample, dict):
        return sample
    for other in counterparts:
        if other is None:
            continue
        if not isinstance(other, dict):
            return other
        if other["__key__"] != sample["__key__"]:
            return MisalignedShardsError(
                f"{describe_sample(sample)} was joined with {describe_sample(other)}, which has another key. An index "
                "was replaced after the dataset was opened: open it again"
            )
        added = {name: value for name, value in other.items() if name[:2] != "__"}
        if repeated := added.keys() & sample.keys():
            return FieldConflictError(
                f"join got {min(repeated)!r} from {redact(str(other['__url__']))} for {describe_sample(sample)}, which "
                "already has this field. Choose other fields with fields="
            )
        sample |= added
    return sample


def missing_keys_error(keys: Sequence[str], count: int, join: KeyJoin) -> MisalignedShardsError:
    """Return the error for samples that have no counterpart; it names the first few keys."""
    named = ", ".join(map(repr, keys[:NAMED])) + (", ..." if count > NAMED else "")
    others = f" and {len(join.urls) - 1} other shards" if len(join.urls) > 1 else ""
    return MisalignedShardsError(
        f"{count} samples have no sample with their key in {redact(join.urls[0])}{others}: "
        f'{named}. Pass missing="skip" to leave them out, or missing="keep" to read them without its fields'
    )
