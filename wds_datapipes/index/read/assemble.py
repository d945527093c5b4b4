"""Assembling samples from the ranges of a plan, whose headers are compared with the index."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np

from wds_datapipes.errors import DuplicateKeyError, MisalignedShardsError, ShardError, WdsError, plural
from wds_datapipes.index.read.fetch import PlannedRanges, ShardRanges
from wds_datapipes.index.read.plan import MAX_HEADER_BYTES, ReadPlan, heads_of
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import ReadLimits
from wds_datapipes.on_error.policy import note
from wds_datapipes.samples.fields import describe_sample
from wds_datapipes.tar.buffer import ReadBuffer
from wds_datapipes.tar.headers import BLOCK, NUMBERS, HeaderReader, round_to_blocks, text
from wds_datapipes.types import Sample

Item: TypeAlias = "Sample | WdsError | OSError | None"
"""A sample, an error in its place, or None if there is no sample."""

#: The distance from the beginning and the end of the size in a field's header to the field's data, in bytes.
SIZE_BEFORE, SIZE_END = BLOCK - 124, BLOCK - 136
#: If the gap between two fields exceeds the headers of a long name, the name of the second field is not read.
MAX_HEAD_BYTES = 1 << 20


@dataclass(frozen=True)
class PlannedSamples:
    """The samples of a plan, in its order.

    Args:
        plan: the plan.
        planned: reads its ranges.
        ranges: reads other ranges of the shard.
        limits: the limits for the shard.
        extra: additional fields of each sample.
    """

    plan: ReadPlan
    planned: PlannedRanges
    ranges: ShardRanges
    limits: ReadLimits
    extra: Mapping[str, str]

    def assemble(self, first: int = 0) -> Iterator[Sample]:
        """Yield the samples from number ``first`` of the plan on.

        Raises:
            ShardError: a sample cannot be read.
            ChangedShardError: the name or size in the header of a field differs from the index.
        """
        plan, extra, ranges, planned = self.plan, self.extra, self.ranges, self.planned
        held, is_held, hold = planned.held, planned.is_held, planned.hold
        starts, stops, read = plan.starts, plan.stops, ranges.read
        columns = zip(plan.names, plan.suffixes, plan.members, plan.ranges, plan.begins, plan.ends, strict=True)
        members = islice(columns, sum(plan.counts[:first]), None)
        empty: Sample = {"__key__": "", "__url__": ranges.url}
        if ranges.path is not None:
            empty["__local_path__"] = ranges.path
        has_names = ranges.index.key_rule is not None
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
                            data = hold(number) if is_held[number] else read(starts[number], stops[number])
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
                            self._check_header(before, member, offset, end - begin, raw_name)
                    sample[name] = data[begin:end]
                if extra:
                    sample |= extra
                yield sample
        except (WdsError, OSError) as error:
            at = starts[number] + begin
            note(error, f"It was read for {name!r} of the sample {key!r}, at byte {at} of {ranges.name}.")
            raise

    def _check_header(self, before: bytes, member: int, offset: int, size: int, raw_name: bytes) -> None:
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
        ranges, index = self.ranges, self.ranges.index
        name, head = text(raw_name), int(heads_of(index, np.array([member]))[0])
        if head > MAX_HEAD_BYTES:
            name, head = "", BLOCK
        headers = before[-head:] if head <= len(before) else ranges.read(offset - head, offset)
        ahead = ReadBuffer(io.BytesIO(headers), ranges.name, offset - head)
        expected = f"{name or index.fields[index.columns['member_fields'][member]]!r} of {plural(size, 'byte')}"
        try:
            reader = HeaderReader(ahead, ranges.name, ignore_zeros=True, end_marker="optional", limits=self.limits)
            while (found := reader.resolve(ahead.take(BLOCK))) is not None and ahead.offset < offset:
                ahead.skip(round_to_blocks(found.size), least=0)
        except ShardError as error:
            raise ranges.changed_error(f"byte {offset} is not the data of {expected}: {error}") from None
        if found is None or found.size != size or name not in ("", found.name):
            instead = "no member" if found is None else f"the data of {found.name!r} of {plural(found.size, 'byte')}"
            raise ranges.changed_error(f"at byte {offset} is {instead} instead of {expected}")


class FieldConflictError(DuplicateKeyError):
    """Two joined datasets have the same field. No error policy skips this error, because it affects all samples."""

    concerns_all = True


def join_fields(sample: Item, counterparts: Iterable[Item]) -> Item:
    """Return a sample with the fields of its counterparts in other datasets, or the first error."""
    if not isinstance(sample, dict):
        return sample
    for other in counterparts:
        if other is None:
            continue
        if not isinstance(other, dict):
            return other
        if other["__key__"] != sample["__key__"]:
            return MisalignedShardsError(
                f"{describe_sample(sample)} was joined with {describe_sample(other)}, but their keys differ. An index "
                "was replaced after the dataset was opened: open the dataset again"
            )
        added = {name: value for name, value in other.items() if name[:2] != "__"}
        if repeated := added.keys() & sample.keys():
            return FieldConflictError(
                f"join cannot add the field {min(repeated)!r} from {redact(str(other['__url__']))}, because "
                f"{describe_sample(sample)} already has it. Choose other fields with fields="
            )
        sample |= added
    return sample
