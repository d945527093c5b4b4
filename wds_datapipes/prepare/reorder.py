"""Reorder a dataset: permute the index entries of all shards, and read each sample by its offset."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from wds_datapipes.errors import (
    DecodeError,
    EncodeError,
    MissingFieldError,
    SampleError,
    ShardError,
    ShardOpenError,
)
from wds_datapipes.index.build_many import find_index
from wds_datapipes.index.builder import IndexBuilder
from wds_datapipes.index.file_format import index_url
from wds_datapipes.index.reading.sample_reader import SampleReader, has_random_access
from wds_datapipes.index.shard_index import ShardFacts
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.parallel.map_shards import map_shards
from wds_datapipes.prepare.shard_contents import ShardContents, ShardFault, read_contents
from wds_datapipes.prepare.subset import make_key
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.tar.header_writer import HeaderWriter
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.types import Sample
from wds_datapipes.writing.sample_packer import TarSamplePacker

__all__ = ["FieldSortKey", "SampleEntries", "WithoutValue"]

T = TypeVar("T")

WithoutValue: TypeAlias = Literal["raise", "first", "last"]
"""How to sort samples without a value: raise an error, or put them first or last."""

#: The number of reading threads, and the most samples and bytes that a thread reads at a time.
MAX_CONCURRENT_READS, MAX_BATCH_SAMPLES, MAX_BATCH_BYTES = 16, 64, 1 << 18
#: The most characters of a value that an error shows.
SHOWN = 60


class SampleEntries:
    """The index entries of all samples of a dataset, reordered in memory.

    Memory grows with the number of samples, not with their size.

    Args:
        urls: the shards, uncompressed and with random access.
        rekey: a pattern for new keys, as in `Subset`; ``number`` counts the samples of the input.
        on_fault: called with the error of each skipped shard or sample; by default, errors are raised.
        on_shard: called with the number of samples and the size of each indexed shard.
        key_rule: splits member names into keys and fields.
        end_marker: ``"optional"`` accepts shards without an end marker.
        storage_options: passed to remote file systems.
        limits: the limits on memory and header sizes.

    Raises:
        ShardError: a shard cannot be read, or has no random access.
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
        on_fault: Callable[[Exception], object] | None = None,
        on_shard: Callable[[int, int], object] | None = None,
        key_rule: KeyRule = first_dot,
        end_marker: EndMarker = "required",
        storage_options: Mapping[str, Any] | None = None,
        limits: ReadLimits = DEFAULT_LIMITS,
    ) -> None:
        self._rekey, self._on_fault = rekey, on_fault
        work = partial(
            _index_shard, key_rule=key_rule, end_marker=end_marker, storage_options=storage_options, limits=limits
        )
        contents: dict[int, ShardContents] = {}
        for number, task in map_shards(work, urls, (), executor=None, max_workers=None):
            contents[number] = task.result()
            if on_shard is not None:
                on_shard(len(contents[number].index), contents[number].bytes or 0)
        shards = [contents[number] for number in range(len(urls))]
        self._readers = [
            SampleReader(shard.url, shard.index, key_rule=key_rule, storage_options=storage_options, limits=limits)
            for shard in shards
        ]
        self._ends = list(accumulate(len(shard.index) for shard in shards))
        self._order = self._check(shards, key_rule)

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._order)

    def shuffle(self, seed: int) -> None:
        """Shuffle the samples uniformly, by a permutation that depends only on the seed."""
        # NumPy guarantees the stream of a bit generator across versions, but not its permutations.
        draws = np.random.Philox(seed).random_raw(self._ends[-1] if self._ends else 0)
        self._order.sort(key=draws.__getitem__)

    def sort(self, key: FieldSortKey) -> None:
        """Sort the samples by a key, stably.

        Raises:
            SampleError: a sample has no comparable value.
        """
        values: dict[int, Any] = {}
        load = partial(_load_value, field=key.field)
        for number, sample in self._read_in_order(load):
            try:
                values[number] = key(sample)
            except SampleError as error:  # noqa: PERF203  each sample may fail
                self._skip(error)
        self._order = sorted(values, key=values.__getitem__, reverse=key.reverse)

    def read(self) -> Iterator[Sample]:
        """Yield the samples in order.

        Raises:
            ShardError: a shard cannot be read, or has changed since it was indexed.
        """
        for number, sample in self._read_in_order(SampleReader.read):
            yield {**sample, "__key__": self._new_key(number, sample)} if self._rekey else sample

    def close(self) -> None:
        """Close all shards."""
        for reader in self._readers:
            reader.close()

    def _check(self, shards: list[ShardContents], key_rule: KeyRule) -> list[int]:
        """Return the numbers of the samples that can be written, and report the errors of the others."""
        headers = HeaderWriter(user="", group="", mode=0o644, mtime=0)
        packer = TarSamplePacker(headers, encoder=False, allow_pickle=False, keep_meta=False, key_rule=key_rule)
        good: list[int] = []
        seen: set[str] = set()
        number = 0
        for shard in shards:
            for fault in shard.faults:
                self._skip(fault.error)
            bad = {fault.key for fault in shard.faults}
            for entry in shard.index:
                if entry.key not in bad:
                    sample: Sample = {"__key__": entry.key, "__url__": shard.url, **dict.fromkeys(entry.fields, b"")}
                    key = sample["__key__"] = self._new_key(number, sample)
                    try:
                        if key in seen:
                            raise EncodeError(
                                f"The sample {key!r} occurs twice, the second time in {redact(shard.url)}, and samples "
                                f"with the same key cannot be distinguished after reordering. Number them"
                            )
                        packer.pack(sample)
                        seen.add(key)
                        good.append(number)
                    except EncodeError as error:
                        self._skip(error)
                number += 1
        return good

    def _skip(self, error: Exception) -> None:
        if self._on_fault is None:
            raise error
        self._on_fault(error)

    def _new_key(self, number: int, sample: Sample) -> str:
        return make_key(self._rekey, number, sample) if self._rekey else sample["__key__"]

    def _read_in_order(self, load: Callable[[SampleReader, int], T]) -> Iterator[tuple[int, T]]:
        """Call a function for each sample concurrently, and yield the results in order."""
        waiting: deque[Future[list[tuple[int, T]]]] = deque()
        pool = ThreadPoolExecutor(MAX_CONCURRENT_READS)
        try:
            for batch in self._batches():
                waiting.append(pool.submit(_load_batch, load, batch))
                if len(waiting) == MAX_CONCURRENT_READS:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _batches(self) -> Iterator[list[tuple[int, SampleReader, int]]]:
        """Yield batches of samples, each with its number, reader and position there, for one thread to read."""
        batch: list[tuple[int, SampleReader, int]] = []
        size = 0
        for number in self._order:
            shard = bisect_right(self._ends, number)
            reader = self._readers[shard]
            position = number - self._ends[shard] + len(reader.index)
            batch.append((number, reader, position))
            size += reader.index.span_of(position)
            if len(batch) == MAX_BATCH_SAMPLES or size >= MAX_BATCH_BYTES:
                yield batch
                batch, size = [], 0
        yield batch


def _load_batch(
    load: Callable[[SampleReader, int], T], batch: list[tuple[int, SampleReader, int]]
) -> list[tuple[int, T]]:
    return [(number, load(reader, position)) for number, reader, position in batch]


def _index_shard(
    url: str, *, key_rule: KeyRule, storage_options: Mapping[str, Any] | None, **options: Any
) -> ShardContents:
    """Return the contents of a shard from the index next to it, if that is valid, or from its headers."""
    try:
        has_access = has_random_access(url, storage_options=storage_options)
        index = find_index(url, index_url(url), key_rule, storage_options=storage_options) if has_access else None
    except ShardError as error:
        empty = IndexBuilder().finish(end=None, facts=ShardFacts())
        return ShardContents(url, empty, [ShardFault(redact(url), type(error).__name__, "", "", str(error))])
    if not has_access:
        raise ShardOpenError(
            f"{redact(url)} is compressed or has no random access, so its samples cannot be reordered. Write it to an "
            f"uncompressed file first, for example with wds-datapipes cat"
        )
    if index is not None:
        return ShardContents(url, index)
    return read_contents(url, key_rule=key_rule, storage_options=storage_options, **options)


def _load_value(reader: SampleReader, number: int, *, field: str) -> Sample:
    """Return a sample with one field read, and the others empty."""
    entry = reader.index[number]
    sample: Sample = {"__key__": entry.key, "__url__": reader.url, **dict.fromkeys(entry.fields, b"")}
    if field in sample:
        sample[field] = reader.read_field(number, field)
    return sample


class FieldSortKey:
    """Extracts the sort key of a sample: its key, a field, or a value inside a JSON field.

    Text is compared by code points. JSON numbers are compared as numbers; with ``numeric``, text is, too.

    Args:
        by: ``"key"``; the name of a field; or a field and a path into its JSON, as in ``"json/size/width"`` or
            ``"json/captions/0"``. ``".key"`` is the field of that name.
        numeric: parse text as numbers.
        missing: how to sort samples without the field, or with null or nothing at the path in its JSON.
        reverse: sort in descending order; this does not affect ``missing``.

    Raises:
        ValueError: ``by`` names no field.

    Examples:
        >>> sort_key = FieldSortKey("json/size/0", missing="last")
        >>> sort_key({"__key__": "a", "json": b'{"size": [640, 480]}'}), sort_key({"__key__": "b", "json": b"{}"})
        ((0, 640), (1, 0))
    """

    def __init__(
        self, by: str, *, numeric: bool = False, missing: WithoutValue = "raise", reverse: bool = False
    ) -> None:
        field, slash, path = by.partition("/")
        self._by_key = by == "key"
        self.field, self.reverse = field.removeprefix(".").lower(), reverse
        if not self.field or (slash and not path) or (field == "__key__"):
            raise ValueError(
                f"samples are sorted by 'key', a field, or a path such as 'json/size/width', not by {by!r}"
            )
        self._path = path.split("/") if path else []
        self._by, self._numeric, self._missing = by, numeric, missing
        self._without = (-1 if (missing == "first") is not reverse else 1, 0)
        self._kind: type | None = None

    def __call__(self, sample: Sample) -> tuple[int, Any]:
        """Return the sort key of a sample.

        Raises:
            MissingFieldError: the sample has no value.
            DecodeError: the value is not JSON or not a number, or cannot be compared with those of other samples.
        """
        value = sample["__key__"] if self._by_key else sample.get(self.field)
        if value is not None and self._path:
            value = self._lookup(sample, value)
        if value is None:
            if self._missing == "raise":
                has = ", ".join(field for field in sample if field[:2] != "__")
                raise MissingFieldError(
                    f"The {_name(sample)} has no {self._by!r} to sort by. It has {has}. "
                    f'To keep it, pass missing="first" or "last"'
                )
            return self._without
        if isinstance(value, str | bytes) and self._numeric:
            value = self._number(sample, value)
        kind = float if isinstance(value, int | float) else type(value)
        if kind not in _KINDS or (kind is float and math.isnan(value)):
            raise DecodeError(
                f"The {_name(sample)} cannot be sorted by {self._by!r}: {_describe_key(value)} has no order"
            )
        if kind is not (self._kind or kind):
            raise DecodeError(
                f"The {_name(sample)} cannot be sorted by {self._by!r}: {_describe_key(value)} is {_KINDS[kind]}, but "
                f"earlier samples have {_KINDS[self._kind or kind]}"
            )
        self._kind = kind
        return 0, value

    def _lookup(self, sample: Sample, data: bytes) -> Any:
        """Return the value at the path inside a JSON field, or ``None``."""
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:  # including UnicodeDecodeError
            raise DecodeError(f"The field {self.field!r} of the {_name(sample)} is not JSON: {error}") from None
        for step in self._path:
            if isinstance(value, list):
                value = value[int(step)] if step.isdecimal() and int(step) < len(value) else None
            else:
                value = value.get(step) if isinstance(value, dict) else None
        return value

    def _number(self, sample: Sample, text: str | bytes) -> int | float:
        """Parse text as a number."""
        try:
            words = (text.decode("ascii") if isinstance(text, bytes) else text).strip()
            if not words.isascii() or "_" in words:  # accepted by Python
                raise ValueError
            try:
                return int(words)
            except ValueError:
                number = float(words)
                if math.isnan(number):
                    raise
                return number
        except ValueError:
            raise DecodeError(
                f"The {_name(sample)} cannot be sorted by {self._by!r}: {_describe_key(text)} is not a number"
            ) from None


_KINDS = {float: "a number", str: "text", bytes: "text"}


def _name(sample: Sample) -> str:
    url = sample.get("__url__")
    return f"sample {sample['__key__']!r}" + (f" of {redact(url)}" if url else "")


def _describe_key(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
