"""Samples of a dataset: a table of their keys, sizes and columns, from its indexes, and a selection of some of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from wds_datapipes.arguments import checks_calls
from wds_datapipes.errors import plural
from wds_datapipes.index.format.index_copies import DatasetIndexes
from wds_datapipes.index.format.index_lookup import shard_sizes
from wds_datapipes.index.format.manifest import Manifest
from wds_datapipes.index.format.options import AccessOptions
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.index.order.join import NAMED, KeyTable
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.io.openers import redact
from wds_datapipes.parallel.map_shards import Shards

#: Integers and floating-point numbers count as the same kind.
NUMBER_KINDS = {ord("i"): "f"}


@checks_calls
class SampleTable:
    """The keys, sizes and columns of all samples of a dataset, in the order of its shards.

    A sample's place in these arrays is its number for ``select`` of `IndexedSamples`, and for ``dataset[number]``.

    Args:
        urls: the shards.
        indexes: their indexes.

    Attributes:
        urls: the shards.
        shards: the number of the shard of each sample.
        sizes: the size of all fields of each sample, in bytes.
        columns: the columns that `build_indexes` computed by its argument ``columns``, by name.

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
        sizes, counts = [np.empty(0, np.int64)], list[int]()
        columns: dict[str, list[npt.NDArray[Any]]] = {}

        def gather() -> Iterator[ShardIndex]:
            """Yield the indexes; only a few are open at a time."""
            first = ""
            for url, index in zip(self.urls, indexes, strict=True):
                sizes.append(index.sample_sizes)
                counts.append(len(index))
                if len(index) and first and columns.keys() != set(index.user_columns):
                    raise ValueError(
                        f"The index of {redact(url)} has the columns {sorted(index.user_columns)}, and that of "
                        f"{redact(first)} has {sorted(columns)}. Build all of them with the same function"
                    )
                if len(index):
                    first = first or url
                    for name in index.user_columns:
                        columns.setdefault(name, []).append(np.array(index.columns[name]))
                yield index

        self._keys = KeyTable(self.urls, gather())
        self.shards: Numbers = np.repeat(np.arange(len(counts)), counts)
        self.sizes: Numbers = np.concatenate(sizes)
        self.columns: dict[str, npt.NDArray[Any]] = {}
        for name, parts in columns.items():
            if len({part.dtype.kind.translate(NUMBER_KINDS) for part in parts}) > 1:
                kinds = ", ".join(sorted({str(part.dtype) for part in parts}))
                raise ValueError(f"The column {name!r} has different types in different shards: {kinds}")
            self.columns[name] = np.concatenate(parts)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<SampleTable of {plural(len(self), 'sample')} in {plural(len(self.urls), 'shard')}, {[*self.columns]}>"

    def find(self, keys: Iterable[str]) -> Numbers:
        """Return the numbers of the samples with some keys, in the order of the keys.

        Raises:
            KeyError: no sample has one of the keys.
            DuplicateKeyError: two samples have one of the keys.
        """
        wanted = list(keys)
        found = self._keys.find(wanted)
        if len(absent := np.flatnonzero(found < 0)):
            named = ", ".join(repr(wanted[at]) for at in absent[:NAMED]) + (", ..." if len(absent) > NAMED else "")
            raise KeyError(f"The dataset lacks {len(absent):,} of {plural(len(wanted), 'key')}: {named}")
        return found

    @cached_property
    def keys(self) -> list[str]:
        """The key of each sample."""
        return list(self._keys)


@checks_calls
def read_table(shards: Manifest | Shards, access: AccessOptions = AccessOptions()) -> SampleTable:  # noqa: B008
    """Read the indexes of a dataset into one table, with its keys, sizes and columns.

    Args:
        shards: a `Manifest`, a pattern, or an iterable of URLs.
        access: where the indexes are, and whether missing and stale ones are built.

    Raises:
        SidecarError: an index is missing, stale or damaged, or its shard is compressed.
        ShardError: a shard cannot be indexed.
        ValueError: the shards have different columns.
    """
    sizes = shard_sizes(shards, access)
    urls = [url for url, _ in sizes]
    indexes = DatasetIndexes(urls, [size for _, size in sizes], access)
    return SampleTable(urls, map(indexes.read, range(len(urls))))
