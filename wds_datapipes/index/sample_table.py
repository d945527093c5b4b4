"""Sample table: the keys, sizes and columns of all samples of a dataset, from its indexes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from wds_datapipes.errors import DuplicateKeyError
from wds_datapipes.index.dataset_reader import DatasetReader
from wds_datapipes.index.indexed_shards import shard_sizes
from wds_datapipes.index.manifest import Manifest
from wds_datapipes.index.permutation import Numbers
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.io.openers import redact

__all__ = ["SampleTable", "balance", "read_table"]

#: The number of keys that a message names.
NAMED = 3
#: Integers and floating-point numbers are of one kind.
NUMBER_KINDS = {ord("i"): "f"}


class SampleTable:
    """The keys, sizes and columns of all samples of a dataset, in the order of its shards.

    A sample's place in these arrays is its number for ``select`` of `IndexedSamples`, and for ``dataset[number]``.

    Args:
        urls: the shards.
        indexes: their indexes.

    Attributes:
        urls: the shards.
        shards: the number of the shard of each sample.
        keys: the key of each sample.
        sizes: the size of all fields of each sample, in bytes.
        columns: the columns of `build_indexes`'s ``columns``, by name.

    Raises:
        ValueError: the shards have different columns, or columns of different types.

    Examples:
        >>> from wds_datapipes import IndexedSamples
        >>> from wds_datapipes.index import build_indexes
        >>> from wds_datapipes.testing import build_shard
        >>> for name in "ab":
        ...     _ = build_shard(f"{name}.tar", [{"__key__": f"{name}{n}", "cls": f"{n % 2}"} for n in range(3)])
        >>> _ = build_indexes("{a,b}.tar", columns=lambda sample: {"label": int(sample["cls"])})
        >>> table = read_table("{a,b}.tar")
        >>> table.keys, table.columns["label"].tolist()
        (['a0', 'a1', 'a2', 'b0', 'b1', 'b2'], [0, 1, 0, 0, 1, 0])
        >>> chosen = IndexedSamples("{a,b}.tar", select=table.find(["b2", "a0"]), order="sequential")
        >>> [sample["__key__"] for sample in chosen]
        ['a0', 'b2']
    """

    def __init__(self, urls: Sequence[str], indexes: Iterable[ShardIndex]) -> None:
        self.urls = list(urls)
        self.keys = list[str]()
        sizes, counts = [np.empty(0, np.int64)], list[int]()
        columns: dict[str, list[npt.NDArray[Any]]] = {}
        first = ""
        for url, index in zip(self.urls, indexes, strict=True):
            self.keys += index.keys
            sizes.append(index.sample_sizes)
            counts.append(len(index))
            if not len(index):
                continue
            first = first or url
            if counts[-1] < len(self.keys) and columns.keys() != set(index.user_columns):
                raise ValueError(
                    f"The index of {redact(url)} has the columns {sorted(index.user_columns)}, and that of "
                    f"{redact(first)} has {sorted(columns)}. Build all of them with the same function"
                )
            for name in index.user_columns:
                columns.setdefault(name, []).append(index.columns[name])
        self.shards: Numbers = np.repeat(np.arange(len(counts)), counts)
        self.sizes: Numbers = np.concatenate(sizes)
        self.columns: dict[str, npt.NDArray[Any]] = {}
        for name, parts in columns.items():
            if len({part.dtype.kind.translate(NUMBER_KINDS) for part in parts}) > 1:
                kinds = ", ".join(sorted({str(part.dtype) for part in parts}))
                raise ValueError(f"The column {name!r} has different types in different shards: {kinds}")
            self.columns[name] = np.concatenate(parts)
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.keys)

    def __repr__(self) -> str:
        return f"<SampleTable of {len(self)} samples in {len(self.urls)} shards, columns {list(self.columns)}>"

    def find(self, keys: Iterable[str]) -> Numbers:
        """Return the numbers of the samples with some keys, in the order of these.

        Raises:
            KeyError: there are no samples with some of the keys.
            DuplicateKeyError: there are two samples with one of them.
        """
        wanted = list(keys)
        if not self._numbers:
            self._numbers = {key: number for number, key in reversed([*enumerate(self.keys)])}
        if absent := [key for key in wanted if key not in self._numbers]:
            named = ", ".join(map(repr, absent[:NAMED])) + (", ..." if len(absent) > NAMED else "")
            raise KeyError(f"{len(absent)} of {len(wanted)} keys are not in the dataset: {named}")
        if len(self._numbers) < len(self.keys):
            self._check_unique(set(wanted))
        return np.array([self._numbers[key] for key in wanted], np.int64)

    def _check_unique(self, wanted: set[str]) -> None:
        for number, key in enumerate(self.keys):
            if key in wanted and self._numbers[key] != number:
                urls = [redact(self.urls[self.shards[each]]) for each in (self._numbers[key], number)]
                raise DuplicateKeyError(
                    f"The key {key!r} is not unique: it is that of sample {self._numbers[key]} (in {urls[0]}) and of "
                    f"sample {number} (in {urls[1]}). Select them by their numbers"
                )


def read_table(
    shards: Manifest | str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    indexes: Literal["build", "require"] = "build",
    index_folder: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> SampleTable:
    """Read the indexes of a dataset into one table, with its keys, sizes and columns.

    Args:
        shards: a `Manifest`, a pattern, or an iterable of URLs.
        indexes: ``"build"`` missing and stale indexes, or ``"require"`` valid ones.
        index_folder: the directory of the indexes; by default, they are next to the shards.
        storage_options: options for fsspec, such as credentials.

    Raises:
        SidecarError: an index is missing, stale or damaged, or its shard is compressed.
        ShardError: a shard cannot be indexed.
        ValueError: the shards have different columns.
    """
    sizes = shard_sizes(shards, indexes=indexes, folder=index_folder, storage_options=storage_options)
    urls = [url for url, _ in sizes]
    options: dict[str, Any] = {"folder": index_folder, "storage_options": storage_options}
    with DatasetReader(urls, [size for _, size in sizes], **options) as reader:
        return SampleTable(urls, map(reader.index_of, range(len(urls))))


def balance(labels: npt.ArrayLike, *, seed: int = 0) -> Numbers:
    """Return numbers of samples of which every label has equally many, for ``select`` of `IndexedSamples`.

    The samples of the most frequent label come once. Those of the others repeat, some of them, which the seed chooses,
    once more than the rest.

    Args:
        labels: the label of each sample, such as ``table.columns["label"]``.
        seed: chooses the samples that repeat once more.

    Examples:
        >>> balance([5, 5, 5, 9]).tolist()
        [0, 1, 2, 3, 3, 3]
    """
    values, inverse, counts = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    if not len(values):
        return np.empty(0, np.int64)
    most = int(counts.max())
    generator = np.random.default_rng(seed)
    by_label = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
    found = [np.tile(generator.permutation(numbers), -(-most // len(numbers)))[:most] for numbers in by_label]
    return np.sort(np.concatenate(found)).astype(np.int64)
