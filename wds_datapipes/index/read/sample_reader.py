"""Sample reader: random access to the samples of a shard by its index, and to ranges of its bytes."""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from itertools import islice
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from wds_datapipes.errors import ShardError, WdsError, plural
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.read.fetch import ShardRanges
from wds_datapipes.index.read.plan import MAX_HEADER_BYTES, ReadPlan, heads_of, plan_reading
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.io.remote.request_steps import Steps, run_steps
from wds_datapipes.on_error.policy import note
from wds_datapipes.tar.buffer import ReadBuffer
from wds_datapipes.tar.headers import BLOCK, NUMBERS, HeaderReader, round_to_blocks, text
from wds_datapipes.types import Sample

#: The approximate size of a read, and the maximum gap between two fields in it, in bytes. Fields of at least
#: ``LONG_BYTES`` are read alone, which saves a copy.
LONG_BYTES = 32 << 10
READ_LIMITS = {"max_bytes": 256 << 10, "max_gap": 16 << 10, "alone_from": LONG_BYTES}
#: The same for a remote shard: reading this much more takes about as long as a request.
MAX_REQUEST_GAP_BYTES = 128 << 10
REQUEST_LIMITS = {"max_bytes": 2 << 20, "max_gap": MAX_REQUEST_GAP_BYTES}
#: The distance from the beginning and the end of the size in a field's header to the field's data, in bytes.
SIZE_BEFORE, SIZE_END = BLOCK - 124, BLOCK - 136
#: If the gap between two fields exceeds the headers of a long name, the name of the second field is not read.
MAX_HEAD_BYTES = 1 << 20

Submit: TypeAlias = Callable[[Steps[list[bytes]]], Future[list[bytes]]]
"""Takes steps in another thread."""


class SampleReader:
    """Reads samples of one shard in any order, by offset; it is thread-safe.

    The names and sizes in the headers of all read fields are compared with the index.

    Args:
        ranges: reads the shard, and is closed with this reader.
        limits: the limits for the shard.
        extra: additional fields of each sample.

    Examples:
        >>> from wds_datapipes.index.format.builder import build_index
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "txt": "one"}, {"__key__": "y", "txt": "two"}])
        >>> list(SampleReader(ShardRanges(url, build_index(url))).stream(np.array([1])))
        [{'__key__': 'y', '__url__': 'a.tar', '__local_path__': 'a.tar', 'txt': b'two'}]
    """

    def __init__(
        self,
        ranges: ShardRanges,
        *,
        limits: ReadLimits = DEFAULT_LIMITS,
        extra: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.index, self._limits, self.extra, self._ranges = ranges.index, limits, extra, ranges

    def stream(self, numbers: Numbers, fields: Collection[str] | None = None) -> Iterator[Sample]:
        """Yield samples with their fields as bytes, each read when it is due; a local shard stays open until `close`.

        Args:
            numbers: the numbers of the samples.
            fields: the fields to read; by default all.

        Raises:
            ShardError: a sample cannot be read, or the shard has changed since it was indexed.
        """
        return self.plan(numbers, fields).samples()

    def plan(
        self,
        numbers: Numbers,
        fields: Collection[str] | None = None,
        parts: Numbers | None = None,
        submit: Submit | None = None,
    ) -> PlannedReads:
        """Return samples that can be read in parts, and ahead.

        Args:
            numbers: the numbers of the samples.
            fields: the fields to read; by default all.
            parts: the part of each sample, in ascending order; by default there is one.
            submit: takes the steps of a request in another thread; by default, each sample is read when it is due.

        Raises:
            ShardError: the shard has changed since it was indexed.
        """
        self._ranges.keep_open()
        parts = np.zeros(len(numbers), np.int64) if parts is None else parts
        limits = READ_LIMITS if submit is None else REQUEST_LIMITS
        plan = plan_reading(self.index, numbers, fields, parts=parts, **limits)
        return PlannedReads(self, plan, submit, is_ascending=bool(np.all(numbers[1:] >= numbers[:-1])))

    def check_header(self, before: bytes, member: int, offset: int, size: int, raw_name: bytes) -> None:
        """Compare the headers of a member of any format with the index.

        Args:
            before: bytes before its data.
            member: its number in the index.
            offset: the offset of its data.
            size: the size of its data.
            raw_name: the name in its header; b"" if it is unknown.

        Raises:
            ChangedShardError: it has a different name or size, or no header.
        """
        name, head = text(raw_name), int(heads_of(self.index, np.array([member]))[0])
        if head > MAX_HEAD_BYTES:
            name, head = "", BLOCK
        headers = before[-head:] if head <= len(before) else self._ranges.read(offset - head, offset)
        ahead = ReadBuffer(io.BytesIO(headers), self._ranges.name, offset - head)
        expected = (
            f"{name or self.index.fields[self.index.columns['member_fields'][member]]!r} of {plural(size, 'byte')}"
        )
        try:
            reader = HeaderReader(
                ahead, self._ranges.name, ignore_zeros=True, end_marker="optional", limits=self._limits
            )
            while (found := reader.resolve(ahead.take(BLOCK))) is not None and ahead.offset < offset:
                ahead.skip(round_to_blocks(found.size), least=0)
        except ShardError as error:
            raise self._ranges.changed_error(f"byte {offset} is not the data of {expected}: {error}") from None
        if found is None or found.size != size or name not in ("", found.name):
            instead = "no member" if found is None else f"the data of {found.name!r} of {plural(found.size, 'byte')}"
            raise self._ranges.changed_error(f"at byte {offset} is {instead} instead of {expected}")

    def close(self) -> None:
        """Close the shard."""
        self._ranges.close()


class PlannedReads:
    """Samples of one shard in the order of a plan.

    Fields that are close together are read by one request, and held until the last of them or the next part is due.

    Args:
        reader: reads the shard.
        plan: how to read the samples.
        submit: takes the steps of a request in another thread; None to read when a sample is due.
        is_ascending: whether the samples are in the order of the shard.
    """

    def __init__(self, reader: SampleReader, plan: ReadPlan, submit: Submit | None, *, is_ascending: bool) -> None:
        self._reader, self._ranges, self._plan, self._submit = reader, reader._ranges, plan, submit
        self._is_ascending = is_ascending
        self._requests: dict[int, Future[list[bytes]]] = {}
        self._held: dict[int, bytes] = {}  # by the number of the range
        self._part = -1

    def request(self, part: int) -> None:
        """Begin to read the samples of a part, if other threads do that."""
        if self._submit is not None:
            parts = self._plan.parts
            for request in range(bisect_left(parts, part), bisect_right(parts, part)):
                self._requests[request] = self._submit(self._take(request))

    def _take(self, request: int) -> Steps[list[bytes]]:
        """Read the ranges of a request at once."""
        plan = self._plan
        first, end = plan.firsts[request : request + 2]
        start = plan.starts[first]
        data = yield from self._ranges.read_steps(start, plan.stops[end - 1])
        if end - first == 1:
            return [data]
        view = memoryview(data)
        spans = zip(plan.starts[first:end], plan.stops[first:end], strict=True)
        return [bytes(view[begin - start : stop - start]) for begin, stop in spans]

    def _read(self, number: int) -> bytes:
        """Return the data of a range, and hold it and the others of its request."""
        plan, held = self._plan, self._held
        request = plan.requests[number]
        if self._is_ascending or plan.parts[request] != self._part:
            self._part = plan.parts[request]
            held.clear()
        task = self._requests.pop(request, None)
        held.update(enumerate(run_steps(self._take(request)) if task is None else task.result(), plan.firsts[request]))
        return held[number]

    def samples(self, first: int = 0) -> Iterator[Sample]:
        """Yield the samples from number ``first`` of the plan on.

        Raises:
            ShardError: a sample cannot be read.
            ChangedShardError: the name or size in the header of a field differs from the index.
        """
        plan, held, extra = self._plan, self._held, self._reader.extra
        columns = zip(plan.names, plan.suffixes, plan.members, plan.ranges, plan.begins, plan.ends, strict=True)
        members = islice(columns, sum(plan.counts[:first]), None)
        empty: Sample = {"__key__": "", "__url__": self._ranges.url}
        if self._ranges.path is not None:
            empty["__local_path__"] = self._ranges.path
        has_names = self._reader.index.key_rule is not None
        read, starts, stops = self._ranges.read, plan.starts, plan.stops
        is_held = plan.is_held if self._submit is None else [True] * len(starts)
        current, data, raw_key, name, begin = -1, b"", b"", "", 0
        try:
            for key, count in islice(zip(plan.keys, plan.counts, strict=True), first, None):
                sample = empty.copy()
                sample["__key__"] = key
                if has_names:
                    raw_key = key.encode("utf-8", "surrogateescape")
                for name, suffix, member, number, begin, end in islice(members, count):
                    if number != current:
                        current, data = number, held.get(number, b"")
                        if not data:
                            data = self._read(number) if is_held[number] else read(starts[number], stops[number])
                    if not (
                        begin
                        and data.startswith(raw_key + suffix, begin - BLOCK)
                        and NUMBERS[data[begin - SIZE_BEFORE : begin - SIZE_END]] == end - begin
                    ):
                        offset, raw_name = starts[number] + begin, raw_key + suffix
                        # The header of a field that is read alone; a call would take longer than the comparison.
                        head = b"" if begin else read(offset - BLOCK, offset)
                        if begin or not head.startswith(raw_name) or NUMBERS[head[-SIZE_BEFORE:-SIZE_END]] != end:
                            before = data[max(begin - MAX_HEADER_BYTES, 0) : begin] or head
                            self._reader.check_header(before, member, offset, end - begin, raw_name)
                    sample[name] = data[begin:end]
                if extra:
                    sample |= extra
                yield sample
        except (WdsError, OSError) as error:
            at = plan.starts[number] + begin
            note(error, f"It was read for {name!r} of the sample {key!r}, at byte {at} of {self._ranges.name}.")
            raise
