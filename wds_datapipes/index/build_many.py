"""Building the indexes of many shards: those that are missing or stale."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

from wds_datapipes.errors import CorruptSidecarError, MissingSidecarError
from wds_datapipes.index.build import build_index
from wds_datapipes.index.file_format import index_url, read_index, write_index
from wds_datapipes.index.shard_index import ShardIndex, rule_name
from wds_datapipes.io.openers import local_path
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.io.remote.range_reader import file_facts
from wds_datapipes.on_error.policy import ErrorPolicy, OnError, check_on_error
from wds_datapipes.parallel.map_shards import Shards, each_shard, listed_shards
from wds_datapipes.samples.grouping import OnDuplicate
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.tar.headers import EndMarker

__all__ = ["IndexResult", "build_indexes"]


class IndexResult(NamedTuple):
    """The index of a shard, and whether it was built or was there.

    Attributes:
        url: the shard.
        index_url: its index.
        samples: how many samples it has,
        members: and how many members these have.
        bytes: the size of the shard.
        sha256: its digest, if the index has one.
        is_new: whether the index was built just now; the others were there and hold.
    """

    url: str
    index_url: str
    samples: int
    members: int
    bytes: int
    sha256: str | None
    is_new: bool


class _Rules(NamedTuple):
    """The options of building an index."""

    key_rule: KeyRule
    lowercase: bool
    on_duplicate: OnDuplicate
    digest: bool
    ignore_zeros: bool
    end_marker: EndMarker
    limits: ReadLimits


def build_indexes(
    urls: Shards,
    *,
    folder: str | os.PathLike[str] | None = None,
    rebuild: bool = False,
    digest: bool = False,
    key_rule: KeyRule = first_dot,
    lowercase: bool = True,
    on_duplicate: OnDuplicate = "raise",
    ignore_zeros: bool = False,
    end_marker: EndMarker = "required",
    on_error: OnError = "raise",
    executor: Executor | None = None,
    max_workers: int | None = None,
    on_result: Callable[[IndexResult], object] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    limits: ReadLimits = DEFAULT_LIMITS,
) -> list[IndexResult]:
    """Build the indexes of shards that are missing, damaged or stale; valid ones are kept.

    An index holds if the size of the shard is what it says, and so is the version that the store tells, or the time
    when the local file was changed; where the index knows no time, it has to be newer than the shard.

    Args:
        urls: a pattern as `ShardList` takes it, but for variables, or an iterable of URLs, such as a `ShardList`.
        folder: a directory for the indexes, for shards in a place that cannot be written to; otherwise they are beside
            the shards.
        rebuild: build all of them, whether they hold or not.
        digest: form the SHA-256 of shards, for which all of them is read. An index that has none does not hold then.
        key_rule: see `build_index`, and so for the next four.
        lowercase: call fields by their lower-case names.
        on_duplicate: what to do where a field occurs twice in a sample.
        ignore_zeros: read archives that were concatenated.
        end_marker: ``"optional"`` accepts archives without their end marker.
        on_error: ``"raise"`` ends with the first shard that cannot be indexed; what was built by then stays. Others as
            in all stages.
        executor: any executor of `concurrent.futures` does the work, such as one for a cluster. By default there are
            processes of this host.
        max_workers: how many processes, if not one for each processor.
        on_result: called with each result as it comes, in any order.
        storage_options: passed to remote file systems.
        limits: what shards may ask for, see `ReadLimits`.

    Returns:
        A result for each shard, in their order, without those that ``on_error`` skipped.

    Raises:
        ShardError: a shard cannot be read.
        SampleError: a field occurs twice in a sample.
        SidecarError: an index cannot be written, or a shard has changed meanwhile.
        WorkerDiedError: a process has ended without a result.
        ValueError: two shards would have one index.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> for name in "ab":
        ...     _ = build_shard(f"{name}.tar", [{"__key__": "x", "txt": "one"}])
        >>> [(result.index_url, result.samples, result.is_new) for result in build_indexes("{a,b}.tar")]
        [('a.tar.wdsidx', 1, True), ('b.tar.wdsidx', 1, True)]
        >>> [result.is_new for result in build_indexes("{a,b}.tar")]
        [False, False]
    """
    check_on_error(on_error)
    shards = listed_shards(urls)
    places = [index_url(url, folder) for url in shards]
    if len(set(places)) < len(places):
        place = Counter(places).most_common(1)[0][0]
        raise ValueError(f"Several shards would have the index {place}. Give their indexes folders of their own")
    rules = _Rules(key_rule, lowercase, on_duplicate, digest, ignore_zeros, end_marker, limits)
    policy = ErrorPolicy(on_error, "build_indexes")
    results: dict[int, IndexResult] = {}
    arguments = (folder, rules, rebuild, storage_options)
    for number, task in each_shard(_one, shards, arguments, executor=executor, max_workers=max_workers):
        policy.tried += 1
        error = task.exception()
        if isinstance(error, Exception):
            if not policy.goes_on(error, url=shards[number]):
                break
            continue
        results[number] = task.result()
        if on_result is not None:
            on_result(results[number])
    policy.finish()
    return [results[number] for number in sorted(results)]


def _one(
    url: str, folder: str | None, rules: _Rules, rebuild: bool, storage_options: Mapping[str, Any] | None
) -> IndexResult:
    """Make sure that one shard has a valid index."""
    place = index_url(url, folder)
    index = None if rebuild else _usable_index(url, place, rules, storage_options)
    is_new = index is None
    if index is None:
        index = build_index(url, **rules._asdict(), storage_options=storage_options)
        if folder is not None and (path := local_path(place)) is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_index(index, place, storage_options=storage_options)
    facts = index.facts
    return IndexResult(url, place, len(index), index.members, facts.bytes or 0, facts.sha256, is_new)


def _usable_index(url: str, place: str, rules: _Rules, storage_options: Mapping[str, Any] | None) -> ShardIndex | None:
    """Return the index of a shard, if there is a valid one with these options."""
    try:
        index = read_index(place, storage_options=storage_options)
    except (MissingSidecarError, CorruptSidecarError):
        return None
    then, now = index.facts, file_facts(url, storage_options=storage_options)
    made_by = (then.key_rule, then.lowercase, then.on_duplicate)
    if made_by != (rule_name(rules.key_rule), rules.lowercase, rules.on_duplicate):
        return None
    if then.bytes is None or then.bytes != now.bytes or (rules.digest and then.sha256 is None):
        return None
    if None not in (then.etag, now.etag):
        return index if then.etag == now.etag else None
    if None not in (then.mtime_ns, now.mtime_ns):
        return index if then.mtime_ns == now.mtime_ns else None
    path = local_path(place)
    is_newer = path is not None and now.mtime_ns is not None and Path(path).stat().st_mtime_ns >= now.mtime_ns
    return index if is_newer else None
