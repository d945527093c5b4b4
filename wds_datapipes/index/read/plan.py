"""Read plan: which bytes of a shard are read for some samples, and which samples are read together."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.tar.buffer import READ_AHEAD_BYTES
from wds_datapipes.tar.headers import BLOCK


class ReadLimit(NamedTuple):
    """What a request of a plan may have.

    Attributes:
        max_bytes: the maximum size of a request before its last field, in bytes.
        max_gap: the maximum number of bytes between two ranges of a request.
        alone_from: fields of at least this size in bytes are read alone and without headers, which saves a copy.
    """

    max_bytes: int
    max_gap: int
    alone_from: int | None = None


#: From this size on, a field of a local shard is read alone, in bytes.
LONG_BYTES = 32 << 10
#: How local shards are read.
LOCAL = ReadLimit(max_bytes=4 * READ_AHEAD_BYTES, max_gap=READ_AHEAD_BYTES // 4, alone_from=LONG_BYTES)
#: How remote shards are read: reading the maximum gap takes about as long as a request.
MAX_REQUEST_GAP_BYTES = 128 << 10
REMOTE = ReadLimit(max_bytes=2 << 20, max_gap=MAX_REQUEST_GAP_BYTES)
#: By how much ``read_ahead`` is divided for a group, whose samples are read together. Smaller groups suffice for
#: samples in the order of their shards, whose neighbors are in the same group anyway.
GROUPS, ASCENDING_GROUPS = 2, 4
#: The maximum number of bytes of headers that are read with a field.
MAX_HEADER_BYTES = 8 << 10
#: The maximum gap between two ranges of a request, as a number of average samples.
GAP_SAMPLES = 32


class ReadPlan(NamedTuple):
    """A plan for reading samples of a shard.

    Attributes:
        keys: the key of each sample.
        counts: the number of fields of each sample.
        names: the name of each field, sample by sample and in the order of the archive.
        suffixes: the text after the key in the header of each field; b"" if this package does not define the key rule.
        members: the number of each field among all members of the index.
        ranges: the number of the range that contains each field.
        begins: where each field begins in its range, after its headers; 0 if the range contains only its data.
        ends: where it ends.
        starts: the offset of each range in the shard.
        stops: the offset of its end.
        requests: the number of the request that reads each range.
        firsts: the first range of each request, and the number of ranges.
        groups: the group whose samples each request reads.
        is_held: whether the request of each range reads other ranges, or more fields than those of one sample.
    """

    keys: list[str]
    counts: list[int]
    names: list[str]
    suffixes: list[bytes]
    members: list[int]
    ranges: list[int]
    begins: list[int]
    ends: list[int]
    starts: list[int]
    stops: list[int]
    requests: list[int]
    firsts: list[int]
    groups: list[int]
    is_held: list[bool]


def plan_reading(
    index: ShardIndex,
    numbers: Numbers,
    fields: Collection[str] | None = None,
    *,
    groups: Numbers,
    limit: ReadLimit = LOCAL,
) -> ReadPlan:
    """Return how to read samples of a shard, in any order.

    A request also reads the bytes between its ranges.

    Args:
        index: the index of the shard.
        numbers: the numbers of the samples.
        fields: the fields to read; by default all.
        groups: the group of each sample, in ascending order; a request reads samples of one group.
        limit: what a request may have.

    Examples:
        >>> from wds_datapipes.index.format.builder import build_index
        >>> from wds_datapipes.testing import build_shard
        >>> index = build_index(build_shard("a.tar", [{"__key__": "x", "txt": "one"}, {"__key__": "y", "txt": "two"}]))
        >>> plan = plan_reading(index, np.array([0, 1]), groups=np.array([0, 0]))
        >>> plan.starts, plan.stops, plan.ranges, plan.begins, plan.ends
        ([0], [1539], [0, 0], [512, 1536], [515, 1539])
    """
    columns = index.columns
    members, counts = _members(index, numbers, fields)
    offsets, sizes = columns["member_offsets"][members], columns["member_sizes"][members]
    heads = np.full(len(members), BLOCK) if index.has_plain_names else heads_of(index, members)
    is_alone = np.zeros(len(members), bool) if limit.alone_from is None else sizes >= limit.alone_from
    spans = np.where(is_alone, 0, _rounded(sizes) + heads)
    sample_bytes = int(spans.sum()) // max(len(numbers), 1)
    groups = np.repeat(groups, counts)
    order = np.lexsort((offsets, groups))
    lows, ends = (offsets - np.where(is_alone, 0, np.minimum(heads, MAX_HEADER_BYTES)))[order], (offsets + sizes)[order]
    is_range, is_request = _cuts(
        lows,
        ends,
        offsets[order],
        groups[order],
        is_alone[order],
        sample_bytes,
        limit.max_bytes,
        gap_of(sample_bytes, limit.max_gap),
    )
    found = np.cumsum(is_range) - 1
    ranges = np.empty_like(found)
    ranges[order] = found
    requests = np.cumsum(is_request) - 1
    starts, stops = lows[is_range], ends[np.append(is_range[1:], True)[: len(order)]]
    firsts = [*found[is_request].tolist(), len(starts)]
    begins = offsets - starts[ranges]
    fields_of = columns["member_fields"][members]
    return ReadPlan(
        index.keys_of(numbers),
        counts.tolist(),
        np.array(index.fields, object)[fields_of].tolist(),
        np.array(index.suffixes, object)[fields_of].tolist(),
        members.tolist(),
        ranges.tolist(),
        begins.tolist(),
        (begins + sizes).tolist(),
        starts.tolist(),
        stops.tolist(),
        requests[is_range].tolist(),
        firsts,
        groups[order][is_request].tolist(),
        ((np.diff(firsts) > 1) | (np.bincount(requests) * len(numbers) > len(members)))[requests[is_range]].tolist(),
    )


def gap_of(sample_bytes: float, max_bytes: int) -> float:
    """Return the maximum gap between two ranges, in bytes, up to which one request reads both."""
    return min(GAP_SAMPLES * sample_bytes, max_bytes)


def sizes_of(
    index: ShardIndex, numbers: Numbers, fields: Collection[str] | None = None, *, below: int | None = None
) -> Numbers:
    """Return the approximate size of some fields of each sample in bytes, except fields of at least ``below``."""
    members, counts = _members(index, numbers, fields)
    sizes = index.columns["member_sizes"][members]
    spans = _rounded(sizes) + BLOCK
    until = np.concatenate(([0], np.cumsum(spans if below is None else spans * (sizes < below))))
    ends = np.cumsum(counts)
    sums: Numbers = until[ends] - until[ends - counts]
    return sums


def heads_of(index: ShardIndex, members: Numbers) -> Numbers:
    """Return the size of each member's headers: the bytes between its data and the end of the previous member."""
    columns = index.columns
    offsets, sizes, firsts = (columns[name] for name in ("member_offsets", "member_sizes", "sample_members"))
    samples = np.searchsorted(firsts, members, "right") - 1
    befores = np.maximum(members - 1, 0)
    ends = _rounded(offsets[befores] + sizes[befores])
    heads: Numbers = offsets[members] - np.where(firsts[samples] == members, columns["sample_offsets"][samples], ends)
    return heads


def _members(index: ShardIndex, numbers: Numbers, fields: Collection[str] | None) -> tuple[Numbers, Numbers]:
    """Return the members to read, sample by sample, and the number of members of each sample."""
    columns = index.columns
    firsts = columns["sample_members"][numbers]
    counts = columns["sample_members"][numbers + 1] - firsts
    # The members of all samples, one after the other.
    members = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    if fields is not None:
        if index.facts.lowercase:
            fields = [field.lower() for field in fields]
        is_wanted = np.array([name in fields for name in index.fields], bool)[columns["member_fields"][members]]
        ends = np.cumsum(counts)
        until = np.concatenate(([0], np.cumsum(is_wanted)))
        members, counts = members[is_wanted], until[ends] - until[ends - counts]
    return members, counts


def _rounded(sizes: Numbers) -> Numbers:
    return (sizes + BLOCK - 1) & -BLOCK


def _cuts(
    lows: Numbers,
    ends: Numbers,
    offsets: Numbers,
    groups: Numbers,
    is_alone: npt.NDArray[np.bool_],
    sample_bytes: int,
    max_bytes: int,
    max_gap: float,
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return whether a range, and whether a request, begins with each of the fields, in ascending order."""
    is_request = np.ones(len(lows), bool)
    gaps = lows[1:] - ends[:-1]
    is_next_group = groups[1:] != groups[:-1]
    is_request[1:] = (gaps < 0) | (gaps > max_gap) | is_alone[1:] | is_alone[:-1] | is_next_group
    starts = lows[is_request]
    pieces = (lows - starts[np.cumsum(is_request) - 1]) // max_bytes
    is_request[1:] |= pieces[1:] != pieces[:-1]
    is_other = (offsets[1:] != offsets[:-1]) | is_next_group  # a repeated field is in the same range
    is_request[1:] &= is_other
    # A gap of up to about one sample is kept, not cut out.
    is_range = is_request.copy()
    is_range[1:] |= (gaps > max(sample_bytes, BLOCK)) & is_other
    return is_range, is_request


def split_by_size(sizes: Numbers, most: int) -> list[int]:
    """Return where groups of consecutive samples begin and end: each has up to ``most`` bytes, or a single sample.

    >>> split_by_size(np.array([3, 3, 9, 1, 1]), 6)
    [0, 2, 3, 5]
    """
    ends, stops = np.cumsum(sizes), [0]
    while stops[-1] < len(ends):
        before = int(ends[stops[-1] - 1]) if stops[-1] else 0
        stops.append(max(int(np.searchsorted(ends, before + most, "right")), stops[-1] + 1))
    return stops
