"""Some samples, drawn from all of a dataset, by the headers of its shards."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from wds_datapipes.errors import ShardError
from wds_datapipes.io.compression.decompress import buffer_stream
from wds_datapipes.io.compression.formats import HEAD_BYTES, detect_compression
from wds_datapipes.io.openers import redact
from wds_datapipes.io.remote.range_reader import open_ranges
from wds_datapipes.parallel.map_shards import each_shard
from wds_datapipes.prepare.shard_contents import ShardFault, outline_shard
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.samples.keys import KeyRule, first_dot, is_meta
from wds_datapipes.shards.loading import ReadOptions, read_shards
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.tar.reader import read_members
from wds_datapipes.types import MemberTuple, Sample

__all__ = ["RandomSamples", "draw_samples"]


@dataclass
class RandomSamples:
    """What was drawn, and what it was drawn from.

    Attributes:
        samples: these, in the order of the dataset.
        sizes: the sizes of all samples, in bytes.
        shards: how many shards there are.
        bytes: the size of the shards that could be read to their ends.
        faults: what is wrong with shards.
    """

    samples: list[Sample]
    sizes: npt.NDArray[np.int64]
    shards: int
    bytes: int
    faults: list[ShardFault]


class _Layout(NamedTuple):
    """Where the samples of a shard begin, and how large they are: packed as arrays of 8 bytes."""

    offsets: array[int]
    sizes: array[int]
    bytes: int
    faults: list[ShardFault]


def draw_samples(
    urls: Sequence[str],
    count: int,
    *,
    seed: int = 0,
    executor: Executor | None = None,
    max_workers: int | None = None,
    on_shard: Callable[[int, int], object] | None = None,
    key_rule: KeyRule = first_dot,
    end_marker: EndMarker = "required",
    storage_options: Mapping[str, Any] | None = None,
) -> RandomSamples:
    """Draw samples from all shards, each with the same probability and none twice.

    All headers are read, and the data of what is drawn, where shards can be read by ranges. Of a shard that breaks off,
    the samples before take part.

    Args:
        urls: the shards.
        count: how many samples; all of them, if there are fewer.
        seed: the same one draws the same samples of the same dataset.
        executor: who reads headers; by default processes of this host.
        max_workers: how many.
        on_shard: called with the number of samples and the size of each shard as it is done.
        key_rule: splits the members' names.
        end_marker: ``"optional"`` accepts shards without an end marker.
        storage_options: passed to remote file systems.

    Raises:
        UnknownSchemeError, MissingDependencyError: shards of this kind cannot be read at all.
        WorkerDiedError: a process has ended without a result.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": f"{n}", "cls": f"{n}"} for n in range(100)])
        >>> drawn = draw_samples([url], 3)
        >>> [sample["__key__"] for sample in drawn.samples], len(drawn.sizes)
        (['49', '53', '97'], 100)
    """
    options = {"key_rule": key_rule, "end_marker": end_marker, "storage_options": storage_options}
    layouts: dict[int, _Layout] = {}
    for number, task in each_shard(_layout, urls, (options,), executor=executor, max_workers=max_workers):
        layout = layouts[number] = task.result()
        if on_shard is not None:
            on_shard(len(layout.offsets), layout.bytes)
    ordered = [layouts[number] for number in range(len(urls))]
    ends = list(accumulate(len(layout.offsets) for layout in ordered))
    total = ends[-1] if ends else 0
    chosen: dict[int, list[int]] = {}
    for position in sorted(Random(seed).sample(range(total), min(count, total))):
        number = bisect_right(ends, position)
        chosen.setdefault(number, []).append(position - ends[number] + len(ordered[number].offsets))
    faults = [fault for layout in ordered for fault in layout.faults]
    samples: list[Sample] = []
    for number, positions in chosen.items():
        found, fault = _read_samples(urls[number], ordered[number], positions, key_rule, storage_options)
        samples += found
        faults += [] if fault is None else [fault]
    sizes = np.concatenate([np.empty(0, np.int64), *(np.frombuffer(layout.sizes, np.int64) for layout in ordered)])
    return RandomSamples(samples, sizes, len(urls), sum(layout.bytes for layout in ordered), faults)


def _layout(url: str, options: dict[str, Any]) -> _Layout:
    outline = outline_shard(url, **options)
    offsets = array("q", [sample.offset for sample in outline.samples])
    sizes = array("q", [sample.bytes for sample in outline.samples])
    return _Layout(offsets, sizes, outline.bytes or 0, outline.faults)


def _read_samples(
    url: str,
    layout: _Layout,
    positions: Sequence[int],
    key_rule: KeyRule,
    storage_options: Mapping[str, Any] | None,
) -> tuple[list[Sample], ShardFault | None]:
    """Read samples of a shard from their places on, and tell what is wrong that the headers have not told."""
    samples: list[Sample] = []
    try:
        with ExitStack() as opened:
            stream = _plain(url, storage_options, opened)
            if stream is None:
                samples += _read_past(url, positions, key_rule, storage_options)
            else:
                samples += _read_at(stream, url, layout.offsets, positions, key_rule)
    except ShardError as error:
        return samples, None if layout.faults else ShardFault(redact(url), type(error).__name__, "", "", str(error))
    return samples, None


def _plain(url: str, storage_options: Mapping[str, Any] | None, opened: ExitStack) -> BinaryIO | None:
    """Open a shard so that it seeks, if it is not compressed, and can be read by ranges."""
    stream = open_ranges(url, storage_options=storage_options)
    if stream is None:
        return None
    opened.enter_context(stream)
    return None if detect_compression(stream.read(HEAD_BYTES)) is not None else buffer_stream(stream)


def _read_at(
    stream: BinaryIO, url: str, offsets: Sequence[int], positions: Sequence[int], key_rule: KeyRule
) -> Iterator[Sample]:
    """Read samples from their places on."""
    for position in positions:
        start = offsets[position]
        stop = offsets[position + 1] if position + 1 < len(offsets) else -1
        stream.seek(start)
        members = read_members(stream, shard=url, archive=redact(url), start=start, stop=stop, end_marker="optional")
        sample = _first(members, url, key_rule, is_last=stop < 0)
        if sample:  # or the shard has changed meanwhile
            yield sample


def _read_past(
    url: str, positions: Sequence[int], key_rule: KeyRule, storage_options: Mapping[str, Any] | None
) -> Iterator[Sample]:
    """Read samples, and all that is before them."""
    shards = read_shards([url], ReadOptions(end_marker="optional", storage_options=storage_options))
    samples = group_samples(shards, key_rule=key_rule, on_duplicate="first", on_repeated_key="ignore")
    with closing(shards), closing(samples):  # type: ignore[type-var]  # generators, as they are now
        for number, sample in enumerate(samples):
            if number in positions:
                yield sample
            if number == positions[-1]:
                return


def _first(members: Iterator[MemberTuple], url: str, key_rule: KeyRule, *, is_last: bool) -> Sample:
    """Return the sample that begins a part of a shard; of two fields of one name, the first is the one."""
    sample: Sample = {}
    try:
        for _, name, data, _ in members:
            parts = None if is_meta(name) else key_rule(name)
            if parts is None:
                continue
            if sample and parts[0] != sample["__key__"]:
                break
            sample = sample or {"__key__": parts[0], "__url__": url}
            sample.setdefault(parts[1].lower(), data)
    except ShardError:
        if not (is_last and len(sample) > 2):  # the shard breaks off behind it, which is told already
            raise
    return sample
