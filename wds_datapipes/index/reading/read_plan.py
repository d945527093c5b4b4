"""Read plan: the ranges of a shard that hold some fields with their headers, and where each field is in them."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.tar.headers import BLOCK

#: Data that is at most this far apart in a shard is read at once.
GAP_BYTES = 8 << 10


class ReadPlan(NamedTuple):
    """How to read samples of a shard.

    Attributes:
        keys: the key of each sample.
        counts: the number of fields of each sample.
        names: the name of each field, sample by sample and in the order of the archive.
        suffixes: what follows the key in the header of each field; b"" if the key rule is not one of this package.
        members: the number of each field among all members of the index.
        ranges: the number of the range that holds each field.
        begins: where each field begins in its range, behind its headers; 0 if the range holds only its data.
        ends: where it ends.
        starts: the offset of each range in the shard.
        stops: the offset of its end.
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


def plan_reading(
    index: ShardIndex,
    numbers: Numbers,
    fields: Collection[str] | None = None,
    *,
    max_bytes: int,
    alone_from: int | None = None,
    in_order: bool = True,
) -> ReadPlan:
    """Return how to read samples of a shard.

    Args:
        index: the index of the shard.
        numbers: the numbers of the samples.
        fields: the fields to read; by default all.
        max_bytes: the most bytes of a range before its last field.
        alone_from: fields of this size in bytes are read alone, without headers, so that they need not be copied again.
        in_order: whether each range is followed by the next in the order of the samples. Otherwise, a range may hold
            fields of any of the samples.

    Examples:
        >>> from wds_datapipes.index.build import build_index
        >>> from wds_datapipes.testing import build_shard
        >>> index = build_index(build_shard("a.tar", [{"__key__": "x", "txt": "one"}, {"__key__": "y", "txt": "two"}]))
        >>> plan = plan_reading(index, np.array([0, 1]), max_bytes=65536)
        >>> plan.starts, plan.stops, plan.ranges, plan.begins, plan.ends
        ([0], [1539], [0, 0], [512, 1536], [515, 1539])
    """
    columns = index.columns
    members, counts = _members(index, numbers, fields)
    offsets, sizes = columns["member_offsets"][members], columns["member_sizes"][members]
    heads = np.full(len(members), BLOCK) if index.has_plain_names else heads_of(index, members)
    order = slice(None) if in_order else np.argsort(offsets, kind="stable")
    starts, stops, found = _ranges(offsets[order], sizes[order], heads[order], max_bytes, alone_from)
    ranges = np.empty_like(found)
    ranges[order] = found
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
    )


def sizes_of(index: ShardIndex, numbers: Numbers, fields: Collection[str] | None = None) -> Numbers:
    """Return the size in bytes of each sample, or of some fields of each."""
    members, counts = _members(index, numbers, fields)
    until = np.concatenate(([0], np.cumsum(index.columns["member_sizes"][members])))
    ends = np.cumsum(counts)
    sizes: Numbers = until[ends] - until[ends - counts]
    return sizes


def heads_of(index: ShardIndex, members: Numbers) -> Numbers:
    """Return the bytes between each member's data and the end of the member before it: those of its headers."""
    columns = index.columns
    offsets, sizes, firsts = (columns[name] for name in ("member_offsets", "member_sizes", "sample_members"))
    samples = np.searchsorted(firsts, members, "right") - 1
    befores = np.maximum(members - 1, 0)
    ends = (offsets[befores] + sizes[befores] + BLOCK - 1) & -BLOCK
    heads: Numbers = offsets[members] - np.where(firsts[samples] == members, columns["sample_offsets"][samples], ends)
    return heads


def _members(index: ShardIndex, numbers: Numbers, fields: Collection[str] | None) -> tuple[Numbers, Numbers]:
    """Return the members to read, sample by sample, and how many each sample has."""
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


def _ranges(
    offsets: Numbers, sizes: Numbers, heads: Numbers, max_bytes: int, alone_from: int | None
) -> tuple[Numbers, Numbers, Numbers]:
    """Return where ranges start and stop that hold these fields one after the other, and the range of each field."""
    is_first = np.ones(len(offsets), bool)
    lows = offsets - np.minimum(heads, GAP_BYTES)
    gaps = lows[1:] - offsets[:-1] - sizes[:-1]
    is_first[1:] = (gaps < 0) | (gaps > GAP_BYTES)
    if alone_from is not None:
        is_alone = sizes >= alone_from
        is_first[1:] |= is_alone[1:] | is_alone[:-1]
        lows[is_alone] = offsets[is_alone]
    starts = lows[is_first]
    parts = (lows - starts[np.cumsum(is_first) - 1]) // max_bytes
    is_first[1:] |= parts[1:] != parts[:-1]
    is_first[1:] &= offsets[1:] != offsets[:-1]  # a field that is repeated is in the same range
    is_last = np.append(is_first[1:], True)[: len(is_first)]
    return lows[is_first], (offsets + sizes)[is_last], np.cumsum(is_first) - 1
