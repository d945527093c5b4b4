"""Reordering of a dataset: permutes the index entries of all shards and reads each sample by its offset."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from wds_datapipes.errors import (
    CorruptSidecarError,
    DecodeError,
    EncodeError,
    MissingFieldError,
    MissingSidecarError,
    SampleError,
    ShardError,
    ShardOpenError,
    StaleSidecarError,
)
from wds_datapipes.hints import REKEY
from wds_datapipes.index.format.builder import index_members
from wds_datapipes.index.format.dataset_builder import same_rules
from wds_datapipes.index.format.index_file import index_url, read_index
from wds_datapipes.index.format.options import AccessOptions, IndexOptions
from wds_datapipes.index.format.origin import origin_of
from wds_datapipes.index.format.shard_index import IndexedSample, ShardIndex
from wds_datapipes.index.read.fetch import has_random_access
from wds_datapipes.index.read.sample_reader import SampleReader
from wds_datapipes.io.openers import redact
from wds_datapipes.io.remote.remote_file import file_facts
from wds_datapipes.on_error.policy import raise_error
from wds_datapipes.parallel.map_shards import collect_shards
from wds_datapipes.samples.keys import KeyRule
from wds_datapipes.tools.prepare.read_options import DEFAULT_READING, ReadOptions
from wds_datapipes.tools.prepare.repeated_keys import find_repeated_keys
from wds_datapipes.tools.prepare.shard_contents import ShardContents, ShardFault, read_contents
from wds_datapipes.tools.prepare.subset import make_key
from wds_datapipes.types import Sample, Shard
from wds_datapipes.writing.options import WriteOptions

#: The number of samples whose reads are planned at a time.
CHUNK = 4096


class FieldSortKey:
    """Extracts the sort key of a sample: its key or a field, as text or as a number.

    Text is compared by code points.

    Args:
        by: ``"key"``, or the name of a field; ``".key"`` refers to a field named ``key``.
        numeric: parse text as numbers.
        reverse: sort in descending order.

    Raises:
        ValueError: ``by`` is empty or ``"__key__"``.

    Examples:
        >>> sort_key = FieldSortKey("cls", numeric=True)
        >>> sort_key({"__key__": "a", "cls": b"12"}), FieldSortKey("key")({"__key__": "a", "cls": b"12"})
        (12, b'a')
    """

    def __init__(self, by: str, *, numeric: bool = False, reverse: bool = False) -> None:
        self.field = "__key__" if by == "key" else by.removeprefix(".").lower()
        self.numeric, self.reverse = numeric, reverse
        if not self.field or by == "__key__":
            raise ValueError(f"samples are sorted by 'key' or a field, not by {by!r}")

    def __call__(self, sample: Sample) -> bytes | float:
        """Return the sort key of a sample.

        Raises:
            MissingFieldError: the sample has no value.
            DecodeError: the value is not a number.
        """
        value = sample.get(self.field)
        name = f"sample {sample['__key__']!r} of {redact(str(sample.get('__url__')))}"
        if value is None:
            has = ", ".join(field for field in sample if field[:2] != "__")
            raise MissingFieldError(f"The {name} has no {self.field!r} to sort by. It has {has}")
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
        if not self.numeric:
            return data
        try:
            if not (data.isascii() and b"_" not in data and (number := float(data)) == number):
                raise ValueError
            return int(data) if data.strip().lstrip(b"+-").isdigit() else number
        except ValueError:
            raise DecodeError(f"The {name} cannot be sorted by {self.field!r}: {data[:60]!r} is not a number") from None


class SampleEntries:
    """Reorders the samples of a dataset by their index entries, in memory.

    Memory use grows with the number of samples, not with their size.

    Args:
        urls: the shards, which must be uncompressed and support random access.
        rekey: a pattern for new keys, as in `Subset`; ``number`` counts the samples of the input.
        on_fault: called with the error of each skipped shard or sample; by default, errors are raised.
        progress: show a progress bar if standard error is a terminal and rich is installed.
        scan: how the shards are read.

    Raises:
        ShardError: a shard cannot be read, or does not support random access.
        SampleError: a sample has a repeated field, is split into parts, or cannot be written, or two samples have the
            same key.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": f"{number}", "cls": f"{number * 3 % 7}"} for number in range(7)])
        >>> entries = SampleEntries([url])
        >>> entries.sort(FieldSortKey("cls", numeric=True))
        >>> [sample["cls"] for sample in entries.read()]
        [b'0', b'1', b'2', b'3', b'4', b'5', b'6']
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        rekey: str = "",
        on_fault: Callable[[Exception], object] = raise_error,
        progress: bool = True,
        scan: ReadOptions = DEFAULT_READING,
    ) -> None:
        self._rekey, self._on_fault, self._options = rekey, on_fault, scan
        shards = collect_shards(
            partial(_index_shard, options=self._options),
            urls,
            label="Indexing",
            measure=lambda shard: (len(shard.index), shard.bytes),
            progress=progress,
        )
        self._shards = shards
        self._ends = list(accumulate(len(shard.index) for shard in shards))
        self._order = self._check(shards, self._options.key_rule)

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._order)

    def shuffle(self, seed: int) -> None:
        """Shuffle the samples uniformly with a permutation that depends only on the seed."""
        # Across versions, NumPy guarantees the streams of its bit generators, but not its permutations.
        draws = np.random.Philox(seed).random_raw(self._ends[-1] if self._ends else 0)
        self._order.sort(key=draws.__getitem__)

    def sort(self, key: FieldSortKey) -> None:
        """Sort the samples by a key, stably.

        Raises:
            SampleError: a sample has no comparable value.
        """
        values: dict[int, Any] = {}
        for number, sample in self._read_in_order([key.field]):
            try:
                values[number] = key(sample)
            except SampleError as error:  # noqa: PERF203  each sample may fail
                self._on_fault(error)
        self._order = sorted(values, key=values.__getitem__, reverse=key.reverse)

    def read(self) -> Iterator[Sample]:
        """Yield the samples in order.

        Raises:
            ShardError: a shard cannot be read, or has changed since it was indexed.
        """
        for number, sample in self._read_in_order():
            yield {**sample, "__key__": self._new_key(number, sample)} if self._rekey else sample

    def _check(self, shards: list[ShardContents], key_rule: KeyRule) -> list[int]:
        """Return the numbers of the samples that can be written; report the errors of the others."""
        packer = WriteOptions(encoder=False, key_rule=key_rule).packer()
        good, hashes = list[int](), array("q")
        number = 0
        for shard in shards:
            for fault in shard.faults:
                self._on_fault(fault.error)
            bad = {fault.key for fault in shard.faults}
            for entry in shard.index:
                if entry.key not in bad:
                    sample: Sample = {"__key__": entry.key, "__url__": shard.url, **dict.fromkeys(entry.fields, b"")}
                    sample["__key__"] = self._new_key(number, sample)
                    try:
                        packer.pack(sample)
                        good.append(number)
                        hashes.append(hash(sample["__key__"]))
                    except EncodeError as error:
                        self._on_fault(error)
                number += 1

        def read_key(number: int) -> list[str]:
            url, entry = self._locate(number)
            return [self._new_key(number, {"__key__": entry.key, "__url__": url})]

        repeated = set[int]()
        for number, key, _ in find_repeated_keys(np.array(hashes), np.array(good, np.int64), read_key):
            repeated.add(number)
            url, _ = self._locate(number)
            self._on_fault(
                EncodeError(
                    f"The sample {key!r} occurs twice, the second time in {redact(url)}, and samples with the same key "
                    "cannot be distinguished after reordering. For new keys, ",
                    REKEY,
                )
            )
        return [number for number in good if number not in repeated]

    def _locate(self, number: int) -> tuple[str, IndexedSample]:
        """Return the shard of a sample of the input, and its entry in the index."""
        shard = bisect_right(self._ends, number)
        return self._shards[shard].url, self._shards[shard].index[number - self._ends[shard]]

    def _new_key(self, number: int, sample: Sample) -> str:
        return make_key(self._rekey, number, sample) if self._rekey else sample["__key__"]

    def _read_in_order(self, fields: Sequence[str] | None = None) -> Iterator[tuple[int, Sample]]:
        """Yield each sample with its number, in order; all fields except the given ones are empty bytes."""
        order, ends = np.array(self._order, np.int64), np.array([0, *self._ends])
        shards = np.searchsorted(ends, order, "right") - 1
        numbers, cuts = order - ends[shards], range(CHUNK, len(order), CHUNK)
        chunks = zip(np.split(shards, cuts), np.split(numbers, cuts), strict=True)
        access = AccessOptions(storage_options=self._options.storage_options, limits=self._options.limits)
        urls, indexes = [each.url for each in self._shards], [each.index for each in self._shards]
        with SampleReader(urls, indexes.__getitem__, access, fields=fields) as reader:
            for row, sample in enumerate(reader.stream(chunks)):
                if not isinstance(sample, dict):
                    raise sample or LookupError(f"there is no sample {order[row]}")
                entry = None if fields is None else self._shards[shards[row]].index[int(numbers[row])]
                yield self._order[row], sample if entry is None else {**dict.fromkeys(entry.fields, b""), **sample}


def _index_shard(url: str, options: ReadOptions) -> ShardContents:
    """Return the contents of a shard from its sidecar index if that is valid, otherwise from its headers."""
    storage_options = options.storage_options
    try:
        has_access = has_random_access(url, storage_options=storage_options)
        index = None
        if has_access:
            index = _read_sidecar(url, options)
    except ShardError as error:
        empty = index_members((), Shard(url))
        return ShardContents(url, empty, [ShardFault(redact(url), type(error).__name__, "", "", str(error))])
    if not has_access:
        raise ShardOpenError(
            f"{redact(url)} is compressed or has no random access, so its samples cannot be reordered. Write it to an "
            f"uncompressed file first, for example with wds-datapipes cat"
        )
    return read_contents(url, options) if index is None else ShardContents(url, index)


def _read_sidecar(url: str, options: ReadOptions) -> ShardIndex | None:
    """Return the index of a shard if it is valid.

    Raises:
        StaleSidecarError: it groups members by another key rule.
        ShardError: the shard cannot be opened.
    """
    path, store = index_url(url), options.storage_options
    try:
        index = read_index(path, storage_options=store)
    except (MissingSidecarError, CorruptSidecarError):
        return None
    if index.describe_change(origin_of(url, store), file_facts(url, storage_options=store)):
        return None
    rules = IndexOptions(key_rule=options.key_rule).rules
    if index.facts.key_rule != rules.key_rule:
        raise StaleSidecarError(
            f"{redact(path)} was built with {index.facts.rules}, not with {rules}, which would group other samples. ",
            same_rules(index.facts.rules),
            "; otherwise delete the index",
        )
    return index if index.facts.rules == rules else None
