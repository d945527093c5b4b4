"""Indexes of many shards: builds those that are missing or stale."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from wds_datapipes.errors import CorruptSidecarError, MissingSidecarError, StaleSidecarError
from wds_datapipes.index.build import build_index
from wds_datapipes.index.build_lock import lock_folder, lock_index
from wds_datapipes.index.file_format import index_url, read_index, write_index
from wds_datapipes.index.shard_index import ShardIndex, rule_name
from wds_datapipes.index.user_columns import ComputeColumns, columns_fingerprint
from wds_datapipes.io.openers import local_path, redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.io.remote.range_reader import file_facts
from wds_datapipes.on_error.policy import ErrorPolicy, OnError, check_on_error
from wds_datapipes.parallel.map_shards import Shards, map_shards, resolve_shards
from wds_datapipes.parallel.progress import ProgressMeter
from wds_datapipes.samples.grouping import OnDuplicate
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.tar.headers import EndMarker

__all__ = ["IndexResult", "build_indexes", "build_missing_index", "find_index"]

LOGGER = logging.getLogger("wds_datapipes")
#: The shard whose server this process has warned about.
_warned: list[str] = []


class IndexResult(NamedTuple):
    """The index of a shard, and whether it was just built.

    Attributes:
        url: the shard.
        index_url: its index.
        samples: the number of samples.
        members: the number of members of these samples.
        bytes: the size of the shard.
        sha256: its digest, if the index has one.
        is_new: whether the index was just built, rather than valid before.
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
    columns: ComputeColumns | None = None,
    fields: Collection[str] | None = None,
    on_error: OnError = "raise",
    executor: Executor | None = None,
    max_workers: int | None = None,
    on_result: Callable[[IndexResult], object] | None = None,
    progress: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    limits: ReadLimits = DEFAULT_LIMITS,
) -> list[IndexResult]:
    """Build the indexes of shards that are missing, damaged or stale; valid ones are kept.

    An index is valid if it matches the size of the shard and its ETag or, for a local file or a store without ETags,
    its modification time; an index without a modification time must be newer than the shard. If a store reports
    neither, indexes are always built again, with a warning.

    Of several processes that need the same indexes, such as the ranks of a training run, one builds them, and the
    others wait until they find them valid. A process that builds indexes in a directory locks it; if the process dies,
    another one continues. Indexes in a remote store are not locked, so each process may build them.

    Progress is logged to the logger ``wds_datapipes``, at most every 10 seconds.

    Args:
        urls: a pattern as for `ShardList`, but without variables, or an iterable of URLs, such as a `ShardList`.
        folder: a directory for the indexes, if the shards are on read-only storage; by default they are next to the
            shards.
        rebuild: build all indexes, even if they are valid.
        digest: compute the SHA-256 of the shards, which reads all of them. An index without a digest is invalid then.
        key_rule: splits member names; see `build_index`.
        lowercase: convert field names to lower case.
        on_duplicate: what to do if a field occurs twice in a sample.
        ignore_zeros: read concatenated archives.
        end_marker: ``"optional"`` accepts archives without their end marker.
        columns: a function that computes columns of your own, such as labels, from each sample; see `build_index`. An
            index with columns of another function is invalid then. Without this argument, valid indexes keep theirs.
        fields: the fields that this function needs; by default all. Others are not read.
        on_error: ``"raise"`` stops at the first shard that cannot be indexed, and keeps the indexes built so far. The
            other values are the same as in all stages.
        executor: any executor of ``concurrent.futures``, such as one for a cluster; by default, processes on this host.
        max_workers: the number of processes; by default, one per processor.
        on_result: called with each result as it arrives, in any order.
        progress: show a progress bar while indexes are built, if standard error is a terminal and rich is installed.
        storage_options: passed to remote file systems.
        limits: the limits for shards, see `ReadLimits`.

    Returns:
        A result for each shard, in order, without those that ``on_error`` skipped.

    Raises:
        ShardError: a shard cannot be read.
        SampleError: a field occurs twice in a sample.
        SidecarError: an index, or its directory, cannot be written; or a shard has changed while it was read.
        WorkerDiedError: a process died without a result.
        ValueError: two shards would have the same index.

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
    shards = resolve_shards(urls)
    targets = [index_url(url, folder) for url in shards]
    if len(set(targets)) < len(targets):
        target = redact(Counter(targets).most_common(1)[0][0])
        raise ValueError(f"Several shards would have the index {target}. Use separate folders for their indexes")
    rules = _Rules(key_rule, lowercase, on_duplicate, digest, ignore_zeros, end_marker, limits)
    policy = ErrorPolicy(on_error, "build_indexes")
    results: dict[int, IndexResult] = {}

    def run(work: Callable[..., IndexResult | None], numbers: list[int], meter: ProgressMeter | None) -> list[int]:
        """Call a function for shards; return those without a result, unless the policy stops."""
        left = []
        urls = [shards[number] for number in numbers]
        arguments = (folder, rules, storage_options)
        for place, task in map_shards(work, urls, arguments, executor=executor, num_workers=max_workers):
            error, number = task.exception(), numbers[place]
            if isinstance(error, Exception):
                policy.tried += 1
                if not policy.handle(error, url=shards[number]):
                    return []
                continue
            result = task.result()
            if result is None:
                left.append(number)
                continue
            policy.tried += 1
            results[number] = result
            if meter is not None:
                meter.add(shards=1, samples=result.samples, size=result.bytes)
            if on_result is not None:
                on_result(result)
        return sorted(left)

    by = None if columns is None else columns_fingerprint(columns, fields)
    find = partial(_find_result, columns_by=by)
    build = partial(_build_result, columns=columns, fields=fields, columns_by=by, rebuild=rebuild)
    missing = [*range(len(shards))] if rebuild else run(find, [*range(len(shards))], None)
    while missing:
        with lock_folder(targets[missing[0]], create=folder is not None) as has_waited:
            if rebuild or not has_waited:
                with ProgressMeter("Indexing", len(missing), shown=progress, logger=LOGGER) as meter:
                    run(build, missing, meter)
                break
        missing = run(find, missing, None)
    policy.finish()
    return [results[number] for number in sorted(results)]


def _find_result(
    url: str,
    folder: str | None,
    rules: _Rules,
    storage_options: Mapping[str, Any] | None,
    *,
    columns_by: str | None,
) -> IndexResult | None:
    """Return the result of a shard that has a valid index."""
    path = index_url(url, folder)
    index = find_index(url, path, *rules[:4], columns_by=columns_by, storage_options=storage_options)
    return None if index is None else _result(url, path, index, is_new=False)


def _build_result(
    url: str,
    folder: str | None,
    rules: _Rules,
    storage_options: Mapping[str, Any] | None,
    *,
    columns: ComputeColumns | None,
    fields: Collection[str] | None,
    columns_by: str | None,
    rebuild: bool,
) -> IndexResult:
    """Build the index of a shard, unless another process has built it meanwhile."""
    path = index_url(url, folder)
    with lock_index(path, create=folder is not None):
        if not rebuild:
            found = _find_result(url, folder, rules, storage_options, columns_by=columns_by)
            if found is not None:
                return found
            if columns is None:
                _check_no_columns(path, storage_options)
        index = build_index(url, **rules._asdict(), columns=columns, fields=fields, storage_options=storage_options)
        write_index(index, path, storage_options=storage_options)
    return _result(url, path, index, is_new=True)


def _result(url: str, path: str, index: ShardIndex, *, is_new: bool) -> IndexResult:
    facts = index.facts
    return IndexResult(url, path, len(index), index.members, facts.bytes or 0, facts.sha256, is_new)


def build_missing_index(
    url: str,
    path: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    limits: ReadLimits = DEFAULT_LIMITS,
    create_folder: bool = False,
) -> tuple[ShardIndex, str | None]:
    """Build the index of a shard that has none, or a damaged one, unless another process does.

    Returns:
        The index, and why it could not be written, if so.

    Raises:
        ShardError: the shard cannot be read.
        SampleError: a field occurs twice in a sample.
    """
    with ExitStack() as stack:
        with suppress(MissingSidecarError):  # then it cannot be written either
            stack.enter_context(lock_index(path, create=create_folder))
        with suppress(MissingSidecarError, CorruptSidecarError):
            return read_index(path, storage_options=storage_options), None
        index = build_index(url, storage_options=storage_options, limits=limits)
        try:
            write_index(index, path, storage_options=storage_options)
        except MissingSidecarError as error:
            return index, str(error)
    return index, None


def _check_no_columns(path: str, storage_options: Mapping[str, Any] | None) -> None:
    """Raise if a stale index has columns, which would be lost."""
    try:
        index = read_index(path, storage_options=storage_options)
    except (MissingSidecarError, CorruptSidecarError):
        return
    if index.columns_by is not None:
        raise StaleSidecarError(
            f"{redact(path)} is stale, and has the columns {index.user_columns}, which only the function that computed "
            "them can compute again. Call build_indexes(columns=...) with it, or delete the index"
        )


def find_index(
    url: str,
    path: str,
    key_rule: KeyRule = first_dot,
    lowercase: bool = True,
    on_duplicate: OnDuplicate = "raise",
    digest: bool = False,
    *,
    columns_by: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ShardIndex | None:
    """Return the index of a shard, if there is a valid one with these options."""
    try:
        index = read_index(path, storage_options=storage_options)
    except (MissingSidecarError, CorruptSidecarError):
        return None
    if columns_by not in (None, index.columns_by):
        return None
    then, now = index.facts, file_facts(url, storage_options=storage_options)
    options = (then.key_rule, then.lowercase, then.on_duplicate)
    if options != (rule_name(key_rule), lowercase, on_duplicate):
        return None
    if then.bytes is None or then.bytes != now.bytes or (digest and then.sha256 is None):
        return None
    if None not in (then.etag, now.etag):
        return index if then.etag == now.etag else None
    if None not in (then.mtime_ns, now.mtime_ns):
        return index if then.mtime_ns == now.mtime_ns else None
    if (now.etag, now.mtime_ns) == (None, None) and not _warned:
        _warned.append(url)
        LOGGER.warning(
            "The index of %s is built again although it may be valid, as are those of other shards there: the server "
            "reports neither ETag nor Last-Modified. Configure it to send one of them, or write a manifest: its "
            "indexes are used as they are, and compared with the shards as samples are read",
            redact(url),
        )
    file = local_path(path)
    is_newer = file is not None and now.mtime_ns is not None and Path(file).stat().st_mtime_ns >= now.mtime_ns
    return index if is_newer else None
