"""Shards of an indexed dataset: their numbers of samples, and access to samples by number."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from wds_datapipes.errors import EmptySourceError
from wds_datapipes.fingerprint import fingerprint
from wds_datapipes.index.file_format import index_url
from wds_datapipes.index.key_table import KeyTable
from wds_datapipes.index.options import AccessOptions
from wds_datapipes.index.order.length_order import Lengths, check_lengths
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.reading.dataset_reader import Chunk, DatasetReader, Item
from wds_datapipes.index.reading.key_join import NAMED, JoinedReader, KeyJoin, missing_keys_error
from wds_datapipes.index.selection import Select, Selection
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.io.openers import redact
from wds_datapipes.samples.fields import Lacking
from wds_datapipes.types import Sample

#: The number of fields that a message names.
MAX_NAMED = 50

Reader: TypeAlias = DatasetReader | JoinedReader


class IndexedShards:
    """The shards of a dataset, or of several, and their numbers of samples; each process has its own readers of them.

    Args:
        datasets: for each dataset, the URL of each shard, and its number of samples. A single one has the name ``""``.
        select: which samples; by default all. With several datasets, a function, or a mapping from names of datasets.
        join: other datasets, whose fields are added to the samples with the same keys.
        missing: what to do with samples without a counterpart in a joined dataset.
        lengths: the length of each selected sample, or a function that returns those of all samples of a shard.
        fields: the fields to read; by default all.
        access: where the indexes are, and how shards are opened.

    Attributes:
        urls: the URL of each shard.
        sizes: the number of selected samples in each shard.
        parts: the shards of each dataset.
        lengths: the length of each selected sample, in the order of the shards; None if unknown.

    Raises:
        EmptySourceError: there are no samples, or none is selected.
        MisalignedShardsError: a sample has no counterpart, and ``missing`` is ``"raise"``.
        DuplicateKeyError: a joined dataset has two samples with the same key.
        ValueError: two shards have the same index.
    """

    def __init__(
        self,
        datasets: Mapping[str, list[tuple[str, int]]],
        *,
        select: Select | Mapping[str, Select] | None = None,
        join: Sequence[IndexedShards] = (),
        missing: Lacking = "raise",
        lengths: Lengths | None = None,
        fields: Collection[str] | None = None,
        access: AccessOptions = AccessOptions(),  # noqa: B008  immutable
    ) -> None:
        self._access, self._fields = access, fields
        self.parts: dict[str, slice] = {}
        every = list[tuple[str, int]]()
        for name, shards in datasets.items():
            self.parts[name] = slice(len(every), len(every) + len(shards))
            every += shards
        self.urls = [url for url, _ in every]
        self._names = None if "" in datasets else [name for name, shards in datasets.items() for _ in shards]
        self._all_sizes = self.sizes = np.array([size for _, size in every], np.int64)
        self._starts = np.cumsum(self._all_sizes) - self._all_sizes
        self._reader: tuple[int, Reader] | None = None
        if not self._all_sizes.any():
            raise EmptySourceError(f"There are no samples in {len(every)} shards. Check the pattern of the shards")
        check_index_names([self.urls, *(other.urls for other in join)], access.index_dir)
        self._others = join
        self._selection: Selection | None = None
        with self._open() as reader:
            self._joins = [self._join(reader, other) for other in join]
            self._select(reader, select, missing)
            self._ends = np.cumsum(self.sizes)
            if missing == "raise":
                self._check_joins(reader)
            self.lengths = None if lengths is None else self._measure(reader, lengths)

    def check_fields(self, fields: Collection[str]) -> None:
        """Check that each field is in some shard of this dataset, or of those that are joined to it.

        It looks into the first shards, and into further ones only for fields that these lack.

        Raises:
            ValueError: a field is in none of them.
        """
        absent, known = set(fields), set[str]()
        with ExitStack() as stack:
            opened = [(each, stack.enter_context(each._open())) for each in (self, *self._others)]
            for shard in range(max(len(each.urls) for each, _ in opened)):
                for each, reader in opened:
                    if not absent:
                        return
                    if shard < len(each.urls):
                        index = reader.index_of(shard)
                        known.update(index.fields)
                        absent -= {
                            name for name in absent if (name.lower() if index.facts.lowercase else name) in index.fields
                        }
        if absent:
            raise ValueError(
                f"No sample has a field {' or '.join(map(repr, sorted(absent)))}, which fields= names. The fields are "
                f"{', '.join(map(repr, sorted(known)[:MAX_NAMED]))}"
            )

    def _join(self, reader: DatasetReader, other: IndexedShards) -> KeyJoin:
        """Find the samples of another dataset that have the same keys."""
        with other._open() as others:
            keys = (reader.index_of(shard).keys for shard in range(len(self.urls)))
            table = KeyTable.from_indexes(map(others.index_of, range(len(other.urls))))
            return KeyJoin(keys, table, other.urls, other.sizes)

    def _check_joins(self, reader: DatasetReader) -> None:
        """Raise if a selected sample has no counterpart."""
        for join in self._joins:
            shards, numbers = self._selected()
            is_absent = join.numbers[self._starts[shards] + numbers] < 0
            if count := int(is_absent.sum()):
                some = zip(shards[is_absent][:NAMED].tolist(), numbers[is_absent][:NAMED].tolist(), strict=True)
                raise missing_keys_error([reader.index_of(shard).keys[number] for shard, number in some], count, join)

    def _select(self, reader: DatasetReader, select: Select | Mapping[str, Select] | None, missing: Lacking) -> None:
        """Restrict the datasets to the samples that are selected, and that have counterparts if they must."""
        among = None
        if self._joins and missing == "skip":
            among = np.logical_and.reduce([join.numbers >= 0 for join in self._joins])
        if isinstance(select, Mapping):
            select = self._select_by_name(reader, select)
        elif len(self.parts) > 1 and select is not None and not callable(select):
            raise TypeError(f"With several datasets, select is a function or a mapping by name, not {select!r:.100}")
        if select is None and among is None:
            return
        chosen = slice(None) if select is None else select
        self._selection = Selection(chosen, self._all_sizes, read_index=reader.index_of, among=among)
        self.sizes = self._selection.sizes
        if not self.sizes.any():
            what = "select chooses none" if among is None else "select and join leave none"
            raise EmptySourceError(f"{what} of the {self._all_sizes.sum()} samples")

    def _select_by_name(self, reader: DatasetReader, select: Mapping[str, Select]) -> Numbers:
        """Return the numbers of the samples that are selected from each dataset; by default all."""
        if unknown := [name for name in select if name not in self.parts]:
            raise ValueError(f"select is for the dataset {unknown[0]!r}, and the datasets are {sorted(self.parts)}")
        numbers = [np.empty(0, np.int64)]
        for name, part in self.parts.items():
            sizes, read_index = self._all_sizes[part], partial(_index_from, reader, part.start)
            own = Selection(select.get(name, slice(None)), sizes, read_index=read_index)
            numbers.append(own.numbers + int(self._all_sizes[: part.start].sum()))
        return np.concatenate(numbers)

    def _measure(self, reader: DatasetReader, lengths: Lengths) -> Numbers:
        """Return the length of each selected sample."""
        if not callable(lengths):
            return check_lengths(lengths, len(self), "the dataset")
        parts = [
            check_lengths(lengths(reader.index_of(shard)), size, redact(self.urls[shard]))
            for shard, size in enumerate(self._all_sizes.tolist())
        ]
        shards, numbers = self._selected()
        found: Numbers = np.concatenate(parts)[self._starts[shards] + numbers]
        return found

    def _selected(self) -> tuple[Numbers, Numbers]:
        """Return the shards of all selected samples, and their numbers in them."""
        shards = np.repeat(np.arange(len(self.sizes)), self.sizes)
        return self._find((shards, np.arange(len(self)) - self.starts[shards]))

    @property
    def starts(self) -> Numbers:
        """The number of the first selected sample of each shard."""
        return self._ends - self.sizes

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._ends[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reader": None}

    def open(self) -> Reader:
        """Return a reader of all shards, and of those that are joined."""
        reader = self._open()
        if not self._joins:
            return reader
        others = [other._open() for other in self._others]
        return JoinedReader(reader, self._starts, list(zip(self._joins, others, strict=True)))

    def _open(self) -> DatasetReader:
        return DatasetReader(self.urls, self._all_sizes, self._access, fields=self._fields, names=self._names)

    def stream(self, reader: Reader, chunks: Iterable[Chunk]) -> Iterator[Item]:
        """Yield samples, with the field ``__dataset__`` if there are several datasets, and errors in their places.

        Args:
            reader: the result of `open`.
            chunks: the shards of some samples, and their places among the selected samples of the shards.
        """
        return reader.stream(map(self._find, chunks))

    def _find(self, chunk: Chunk) -> Chunk:
        """Return the shards of samples, and their numbers in them."""
        shards, places = chunk
        return shards, places if self._selection is None else self._selection.find(shards, places)

    def sample(self, number: int) -> Sample:
        """Return a sample by its number in the order of the shards."""
        return self.samples([number])[0]

    def samples(self, numbers: list[int]) -> list[Sample]:
        """Return samples by their numbers in the order of the shards."""
        count = len(self)
        for number in numbers:
            if not -count <= number < count:
                raise IndexError(f"The dataset has {count} samples, so there is no sample {number}")
        wanted = np.array([number % count for number in numbers])
        shards = np.searchsorted(self._ends, wanted, "right")
        if self._reader is None or self._reader[0] != os.getpid():  # a forked process needs its own connections
            self._reader = os.getpid(), self.open()
        samples = []
        for item in self.stream(self._reader[1], [(shards, wanted - self.starts[shards])]):
            if isinstance(item, Exception):
                raise item
            samples.append(item)
        return [sample for sample in samples if sample is not None]

    def fingerprint(self) -> str:
        """Return the number of shards and samples, the first and last URL, and a digest of all."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        text = f"{len(self)} samples in {len(self.urls)} shards from {redact(self.urls[0])} to {redact(self.urls[-1])}"
        details = [] if self._selection is None else [self._selection.fingerprint()]
        details += [
            *(other.fingerprint() for other in self._others),
            *(repr(part) for part in self.parts.items() if part[0]),
            *([] if self.lengths is None else [fingerprint(self.lengths.tobytes())]),
        ]
        return f"{text} #{fingerprint([self.urls, self.sizes.tolist(), *details])[:12]}"


def _index_from(reader: DatasetReader, first: int, shard: int) -> ShardIndex:
    return reader.index_of(first + shard)


def check_index_names(datasets: Sequence[Sequence[str]], index_dir: str | os.PathLike[str] | None) -> None:
    """Raise if shards of several datasets have the same index, as shards with the same name in a directory have.

    Raises:
        ValueError: they have.
    """
    known: dict[str, str] = {}
    for url in {*chain(*datasets)} if index_dir is not None else ():
        if (other := known.setdefault(index := index_url(url, index_dir), url)) != url:
            raise ValueError(
                f"{redact(url)} and {redact(other)} would both have the index {index}. Keep their indexes next to the "
                "shards, or open the datasets with separate folders for indexes"
            )
