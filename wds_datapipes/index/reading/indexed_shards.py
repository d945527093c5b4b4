"""Shards of an indexed dataset: their numbers of samples, and access to samples by number."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import chain, tee
from typing import Any, TypeAlias

import numpy as np

from wds_datapipes.errors import EmptySourceError
from wds_datapipes.fingerprint import fingerprint
from wds_datapipes.index.file_format import index_url
from wds_datapipes.index.key_table import KeyTable
from wds_datapipes.index.order.length_order import Lengths, check_lengths
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.reading.dataset_reader import DatasetReader
from wds_datapipes.index.reading.key_join import NAMED, JoinedReader, KeyJoin, missing_keys_error
from wds_datapipes.index.selection import Select, Selection
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.io.openers import redact
from wds_datapipes.samples.select import Lacking
from wds_datapipes.types import Sample

__all__ = ["IndexedShards", "Reader"]

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
        folder: the directory of the indexes; by default, that of the shards.
        options: those of `DatasetReader`.

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
        folder: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        self._options = {"folder": folder, **options}
        self.parts: dict[str, slice] = {}
        every = list[tuple[str, int]]()
        for name, shards in datasets.items():
            self.parts[name] = slice(len(every), len(every) + len(shards))
            every += shards
        self.urls = [url for url, _ in every]
        self._all_sizes = self.sizes = np.array([size for _, size in every], np.int64)
        self._starts = np.cumsum(self._all_sizes) - self._all_sizes
        self._reader: tuple[int, Reader] | None = None
        if not self._all_sizes.any():
            raise EmptySourceError(f"There are no samples in {len(every)} shards. Check the pattern of the shards")
        check_index_names([self.urls, *(other.urls for other in join)], folder)
        self._others = join
        self._joins: list[KeyJoin] = []
        self._selections: list[tuple[slice, Selection]] = []
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
        """Restrict each dataset to the samples that are selected, and that have counterparts if they must."""
        among = None
        if self._joins and missing == "skip":
            among = np.logical_and.reduce([join.numbers >= 0 for join in self._joins])
        for name, chosen in _select_by_dataset(select, self.parts, is_restricted=among is not None).items():
            part = self.parts[name]
            sizes = self._all_sizes[part]
            start = int(self._starts[part][0]) if len(sizes) else 0

            def index_of(shard: int, first: int = part.start) -> ShardIndex:
                return reader.index_of(first + shard)

            own = None if among is None else among[start : start + int(sizes.sum())]
            self._selections.append((part, Selection(chosen, sizes, read_index=index_of, among=own)))
        self.sizes = self._all_sizes.copy()
        for part, selection in self._selections:
            self.sizes[part] = selection.sizes
        if not self.sizes.any():
            what = "select chooses none" if among is None else "select and join leave none"
            raise EmptySourceError(f"{what} of the {self._all_sizes.sum()} samples")

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
        return DatasetReader(self.urls, self._all_sizes, **self._options)

    def read(self, reader: Reader, shards: Numbers, places: Numbers) -> list[Sample]:
        """Return samples, as `stream` yields them, without effect on a stream of the reader."""
        samples = reader.read(*self._find((shards, places)))
        if "" not in self.parts:
            for sample, name in zip(samples, self._names_of(shards), strict=True):
                sample["__dataset__"] = name
        return samples

    def stream(self, reader: Reader, chunks: Iterable[tuple[Numbers, Numbers]]) -> Iterator[Sample]:
        """Yield samples, with the field ``__dataset__`` if there are several datasets.

        Args:
            reader: the result of `open`.
            chunks: the shards of some samples, and their places among the selected samples of the shards.
        """
        if "" in self.parts:
            return reader.stream(map(self._find, chunks))
        return self._named(reader, chunks)

    def _named(self, reader: Reader, chunks: Iterable[tuple[Numbers, Numbers]]) -> Iterator[Sample]:
        """Yield samples with the names of their datasets."""
        own, copies = tee(chunks)
        names = chain.from_iterable(self._names_of(shards) for shards, _ in copies)
        for sample, name in zip(reader.stream(map(self._find, own)), names, strict=True):
            sample["__dataset__"] = name
            yield sample

    def _names_of(self, shards: Numbers) -> list[str]:
        """Return the names of the datasets of shards."""
        names, ends = list(self.parts), [part.stop for part in self.parts.values()]
        return [names[number] for number in np.searchsorted(ends, shards, "right").tolist()]

    def _find(self, chunk: tuple[Numbers, Numbers]) -> tuple[Numbers, Numbers]:
        """Return the shards of samples, and their numbers in them."""
        shards, places = chunk
        return shards, self._numbers_in_shard(shards, places) if self._selections else places

    def _numbers_in_shard(self, shards: Numbers, places: Numbers) -> Numbers:
        """Return the numbers of samples in their shards, from their places among the selected ones."""
        numbers: Numbers = places.copy()
        for part, selection in self._selections:
            own = (shards >= part.start) & (shards < part.stop)
            numbers[own] = selection.find(shards[own] - part.start, places[own])
        return numbers

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
        places = wanted - self.starts[shards]
        return self.read(self._reader[1], shards, places)

    def fingerprint(self) -> str:
        """Return the number of shards and samples, the first and last URL, and a digest of all."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        text = f"{len(self)} samples in {len(self.urls)} shards from {redact(self.urls[0])} to {redact(self.urls[-1])}"
        details = [selection.fingerprint() for _, selection in self._selections]
        details += [
            *(other.fingerprint() for other in self._others),
            *(repr(part) for part in self.parts.items() if part[0]),
            *([] if self.lengths is None else [fingerprint(self.lengths.tobytes())]),
        ]
        return f"{text} #{fingerprint([self.urls, self.sizes.tolist(), *details])[:12]}"


def check_index_names(datasets: Sequence[Sequence[str]], folder: str | os.PathLike[str] | None) -> None:
    """Raise if shards of several datasets have the same index, as shards with the same name in a directory have.

    Raises:
        ValueError: they have.
    """
    known: dict[str, str] = {}
    for url in {*chain(*datasets)} if folder is not None else ():
        if (other := known.setdefault(index := index_url(url, folder), url)) != url:
            raise ValueError(
                f"{redact(url)} and {redact(other)} would both have the index {index}. Keep their indexes next to the "
                "shards, or open the datasets with separate folders for indexes"
            )


def _select_by_dataset(
    select: Select | Mapping[str, Select] | None, parts: Mapping[str, slice], *, is_restricted: bool
) -> dict[str, Select]:
    """Return what is selected of each dataset, except where nothing restricts it."""
    if isinstance(select, Mapping):
        if unknown := [name for name in select if name not in parts]:
            raise ValueError(f"select is for the dataset {unknown[0]!r}, and the datasets are {sorted(parts)}")
        chosen = dict(select)
    elif select is None or callable(select) or len(parts) == 1:
        chosen = {} if select is None else dict.fromkeys(parts, select)
    else:
        raise TypeError(f"With several datasets, select is a function or a mapping by name, not {select!r:.100}")
    return {**(dict.fromkeys(parts, slice(None)) if is_restricted else {}), **chosen}
