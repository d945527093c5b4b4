"""Samples of a dataset: a table of their keys, sizes and columns, from its indexes, and a selection of some of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from wds_datapipes.arguments import check_integer, checks_calls
from wds_datapipes.errors import DuplicateKeyError, plural
from wds_datapipes.fingerprint import fingerprint
from wds_datapipes.index.format.dataset_builder import shard_sizes
from wds_datapipes.index.format.manifest import Manifest
from wds_datapipes.index.format.options import AccessOptions
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.read.dataset_reader import DatasetReader
from wds_datapipes.io.openers import redact
from wds_datapipes.parallel.map_shards import Shards

Select: TypeAlias = slice | npt.ArrayLike | Callable[[ShardIndex], npt.ArrayLike]
"""A slice, the numbers of samples, a mask, or a function that returns numbers or a mask for the index of a shard."""

#: The number of keys that a message names.
NAMED = 3
#: Integers and floating-point numbers count as the same kind.
NUMBER_KINDS = {ord("i"): "f"}


class KeyTable:
    """The keys of samples in the order of their shards, and the numbers of samples by key.

    Each key takes 8 bytes in addition to its text, and 16 more after the first `find`. Keys are found by hash and then
    compared.

    Args:
        urls: the shards.
        indexes: their indexes.
    """

    def __init__(self, urls: Sequence[str], indexes: Iterable[ShardIndex]) -> None:
        self._urls = urls
        texts, bounds, counts, size = list[bytes](), [np.zeros(1, np.int64)], list[int](), 0
        for index in indexes:
            texts.append(index.columns["key_text"].tobytes())
            bounds.append(index.columns["key_ends"] + size)
            size += len(texts[-1])
            counts.append(len(index))
        self._text, self._bounds = b"".join(texts), np.concatenate(bounds)
        self._ends = np.cumsum(counts)
        self._by_hash: tuple[Numbers, Numbers] | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._bounds) - 1

    def __iter__(self) -> Iterator[str]:
        """Yield the key of each sample."""
        return (raw.decode("utf-8", "surrogateescape") for raw in self._all())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_by_hash": None}  # hashes differ between processes

    def find(self, keys: Iterable[str]) -> Numbers:
        """Return the number of the sample with each key, or -1.

        Raises:
            DuplicateKeyError: two samples have one of the keys.
        """
        wanted = [key.encode("utf-8", "surrogateescape") for key in keys]
        if self._by_hash is None:
            unsorted = np.fromiter(map(hash, self._all()), np.int64, len(self))
            order = np.argsort(unsorted, kind="stable")
            self._by_hash = order, unsorted[order]
        order, hashes = self._by_hash
        own = np.fromiter(map(hash, wanted), np.int64, len(wanted))
        firsts, stops = (np.searchsorted(hashes, own, side).tolist() for side in ("left", "right"))
        found = np.full(len(wanted), -1, np.int64)
        for at, (key, first, stop) in enumerate(zip(wanted, firsts, stops, strict=True)):
            for number in order[first:stop].tolist():
                if self._text[self._bounds[number] : self._bounds[number + 1]] == key:
                    if found[at] >= 0:
                        raise self._duplicate_error(key, int(found[at]), number)
                    found[at] = number
        return found

    def _duplicate_error(self, key: bytes, *numbers: int) -> DuplicateKeyError:
        first, second = (
            f"sample {number} (in {redact(self._urls[int(np.searchsorted(self._ends, number, 'right'))])})"
            for number in numbers
        )
        return DuplicateKeyError(
            f"The key {key.decode('utf-8', 'surrogateescape')!r} is not unique: {first} and {second} have it. "
            "Select samples by their numbers, or give each its own key"
        )

    def _all(self) -> Iterator[bytes]:
        return (self._text[begin:end] for begin, end in pairwise(self._bounds.tolist()))


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
    with DatasetReader(urls, [size for _, size in sizes], access) as reader:
        return SampleTable(urls, map(reader.index_of, range(len(urls))))


@checks_calls
def resample(weights: npt.ArrayLike, *, count: int | None = None, seed: int = 0) -> Numbers:
    """Return numbers of samples, repeated in proportion to their weights, for ``select`` of `IndexedSamples`.

    A sample occurs ``count * weight / sum(weights)`` times, rounded up or down, so a sample with weight 0 never occurs.

    Args:
        weights: the weight of each sample, such as ``1 / np.sqrt(frequencies[table.columns["label"]])``.
        count: the total number of samples; by default, the number of weights.
        seed: selects the samples that are rounded up.

    Raises:
        ValueError: a weight is negative or not finite, or none is positive.

    Examples:
        >>> resample([1, 0, 3], count=8).tolist()
        [0, 0, 2, 2, 2, 2, 2, 2]
    """
    try:
        given = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"weights must be one number for each sample, not {weights!r:.200}") from None
    if given.ndim != 1 or not np.all((given >= 0) & (given < np.inf)) or (len(given) and not given.any()):
        raise ValueError("weights must be one finite number for each sample, none negative, and at least one positive")
    check_integer("seed", seed, 0)
    wanted = len(given) if count is None else operator.index(count)
    if wanted < 0:
        raise ValueError(f"count must be at least 0, not {wanted}")
    if not len(given):
        return np.empty(0, np.int64)
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(given))
    ends = np.cumsum(given[order] / given.max())  # the sum of large weights would be infinite
    # Each sample has an interval as long as its weight, into which equidistant points fall.
    points = np.minimum(np.arange(wanted) + generator.random(), np.nextafter(wanted, 0))
    found = np.searchsorted(ends / ends[-1] * wanted, points, "right")
    return np.sort(order[found]).astype(np.int64)


class Selection:
    """The selected samples of a dataset, in the order of the shards.

    A slice takes no memory per sample; numbers take 8 bytes for each.

    Args:
        select: the samples, by their numbers in the order of the shards.
        sizes: the number of samples in each shard.
        read_index: returns the index of a shard, for a function.
        among: a mask of the samples that may be selected; by default all.

    Raises:
        IndexError: there is no sample with one of the numbers.
        ValueError: a mask has a different length, or a slice runs backwards.
        TypeError: the numbers are not integers.

    Examples:
        >>> selection = Selection(slice(None, None, 2), np.array([3, 2]), read_index=None)
        >>> selection.sizes.tolist(), selection.find(np.array([0, 0, 1]), np.array([0, 1, 0])).tolist()
        ([2, 1], [0, 2, 1])
    """

    def __init__(
        self,
        select: Select,
        sizes: Numbers,
        *,
        read_index: Callable[[int], ShardIndex] | None,
        among: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        ends = np.cumsum(sizes)
        self._starts = ends - sizes
        count = int(ends[-1]) if len(ends) else 0
        self._numbers: range | Numbers
        if isinstance(select, slice):
            self._numbers = range(*select.indices(count))
            if self._numbers.step < 0:
                raise ValueError(f"select must run forwards, but {select} runs backwards. Choose the order with order=")
        elif callable(select) and read_index is not None:
            parts = [
                numbers_of(select(read_index(shard)), size, f" in shard {shard}")
                for shard, size in enumerate(sizes.tolist())
            ]
            moved = [part + start for part, start in zip(parts, self._starts.tolist(), strict=True)]
            self._numbers = np.concatenate([np.empty(0, np.int64), *moved])
        else:
            self._numbers = numbers_of(select, count)
        if among is not None:
            self._numbers = self.numbers[among[self.numbers]]
        lasts = self._count_below(ends)
        self._firsts = np.concatenate(([0], lasts[:-1])) if len(lasts) else lasts
        #: The number of selected samples in each shard.
        self.sizes: Numbers = lasts - self._firsts

    @property
    def numbers(self) -> Numbers:
        """The numbers of the selected samples in the order of the shards."""
        return np.asarray(self._numbers, np.int64)

    def find(self, shards: Numbers, places: Numbers) -> Numbers:
        """Return the numbers of samples in their shards.

        Args:
            shards: the shard of each sample.
            places: the place of each sample among the selected samples of its shard.
        """
        chosen = self._firsts[shards] + places
        if isinstance(self._numbers, range):
            return self._numbers.start + chosen * self._numbers.step - self._starts[shards]
        return self._numbers[chosen] - self._starts[shards]

    def fingerprint(self) -> str:
        """Return a digest of the selected numbers."""
        return _digest(self._numbers)

    def fingerprint_of(self, shards: slice) -> str:
        """Return a digest of the numbers selected from some shards, counted from the first of these shards."""
        first, end = (
            int(self._firsts[at]) if at < len(self._firsts) else len(self._numbers)
            for at in (shards.start, shards.stop)
        )
        own, start = self._numbers[first:end], int(self._starts[shards.start])
        return _digest(range(own.start - start, own.stop - start, own.step) if isinstance(own, range) else own - start)

    def _count_below(self, ends: Numbers) -> Numbers:
        """Return the number of selected samples below each end."""
        if isinstance(self._numbers, range):
            start, step = self._numbers.start, self._numbers.step
            return np.clip(-((start - ends) // step), 0, len(self._numbers))
        return np.searchsorted(self._numbers, ends, "left")


def _digest(numbers: range | Numbers) -> str:
    if isinstance(numbers, range):
        return fingerprint([numbers.start, numbers.stop, numbers.step])
    return fingerprint(numbers.tobytes())


def by_dataset(argument: str, given: Any, names: Collection[str]) -> Mapping[str, Any]:
    """Return the value of an argument for each dataset, by name.

    Raises:
        TypeError: there are several datasets, and the value is neither a function nor a mapping from their names.
        ValueError: there is no dataset with one of the names.
    """
    if not isinstance(given, Mapping):
        if len(names) > 1 and given is not None and not callable(given):
            raise TypeError(f"With several datasets, {argument} is a function or a mapping by name, not {given!r:.100}")
        return dict.fromkeys(names, given)
    if unknown := [name for name in given if name not in names]:
        raise ValueError(f"{argument} is for the dataset {unknown[0]!r}, but the datasets are {sorted(names)}")
    return given


def numbers_of(chosen: Any, count: int, where: str = "", *, argument: str = "select") -> Numbers:
    """Return numbers of samples in ascending order, from numbers or a mask; messages name the argument."""
    found = np.asarray(chosen)
    if found.ndim != 1:
        raise ValueError(f"{argument} must have one dimension, not the shape {found.shape}{where}")
    if found.dtype == bool:
        if len(found) != count:
            raise ValueError(f"{argument} is a mask of length {len(found)}, not {count}, the number of samples{where}")
        return np.flatnonzero(found)
    if not len(found):
        return np.empty(0, np.int64)
    if not np.issubdtype(found.dtype, np.integer):
        raise TypeError(f"{argument} must be numbers of samples or a mask, not an array of {found.dtype}{where}")
    numbers = np.sort(found)  # not converted before the check, because large unsigned numbers would become negative
    if numbers[0] < 0 or numbers[-1] >= count:
        wrong = numbers[0] if numbers[0] < 0 else numbers[-1]
        raise IndexError(f"There is no sample {wrong} to {argument}: numbers{where} are at least 0 and below {count}")
    return numbers.astype(np.int64)
