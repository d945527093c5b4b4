"""Indexes of many shards: builds those that are missing or stale."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from wds_datapipes.arguments import checks_calls
from wds_datapipes.errors import CorruptSidecarError, MissingSidecarError, StaleSidecarError
from wds_datapipes.hints import COLUMNS, FIRST_DOT, LAST_DOT, REBUILD, Message
from wds_datapipes.index.format.builder import DEFAULT_OPTIONS, build_index
from wds_datapipes.index.format.folder_lock import LOGGER, lock_folder, remove_abandoned_locks
from wds_datapipes.index.format.index_file import index_url, index_urls, read_index, write_index
from wds_datapipes.index.format.options import IndexOptions
from wds_datapipes.index.format.shard_facts import Rules
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.index.format.user_columns import Columns, ComputeColumns, as_function, columns_fingerprint
from wds_datapipes.index.format.validity import find_index
from wds_datapipes.io.openers import redact
from wds_datapipes.on_error.policy import ErrorPolicy, OnError, check_on_error
from wds_datapipes.parallel.map_shards import Shards, map_shards, resolve_shards
from wds_datapipes.parallel.progress import ProgressMeter
from wds_datapipes.redaction import hides_credentials

#: The number of indexes that are read concurrently.
THREADS = 16


@hides_credentials
class IndexResult(NamedTuple):
    """The index of a shard and whether it was just built.

    Attributes:
        url: the shard.
        index_url: its index.
        samples: the number of samples.
        members: the number of members of these samples.
        bytes: the size of the shard.
        sha256: its digest, if the index has one.
        is_new: whether the index was just built, rather than already valid.
    """

    url: str
    index_url: str
    samples: int
    members: int
    bytes: int
    sha256: str | None
    is_new: bool

    @classmethod
    def of(cls, url: str, path: str, index: ShardIndex, *, is_new: bool) -> IndexResult:
        """Create a result from an index and its name."""
        facts = index.facts
        return cls(url, path, len(index), index.members, facts.bytes or 0, facts.sha256, is_new)


@checks_calls
def build_indexes(
    urls: Shards,
    *,
    index_dir: str | os.PathLike[str] | None = None,
    rebuild: bool = False,
    options: IndexOptions = DEFAULT_OPTIONS,
    columns: Columns | None = None,
    fields: Collection[str] | None = None,
    on_error: OnError = "raise",
    executor: Executor | None = None,
    num_workers: int | None = None,
    on_result: Callable[[IndexResult], object] | None = None,
    progress: bool = True,
    storage_options: Mapping[str, Any] | None = None,
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
        index_dir: a directory for the indexes, if the shards are on read-only storage; by default they are next to the
            shards.
        rebuild: build all indexes, even if they are valid.
        options: how shards are indexed. An index without a digest is invalid if there should be one. An index that
            was built by other rules is an error, unless ``rebuild`` replaces it.
        columns: a function that computes columns of your own, such as labels, from each sample, or a mapping from their
            names to paths of values in fields; see `build_index`. An index with other columns is invalid. Without this
            argument, valid indexes keep theirs.
        fields: the fields that this function needs; by default all. Others are not read.
        on_error: ``"raise"`` stops at the first shard that cannot be indexed and keeps the indexes built so far. The
            other values are the same as in all stages.
        executor: any executor of ``concurrent.futures``, such as one for a cluster, to build the indexes; by default,
            processes on this host.
        num_workers: the number of processes; by default, one per processor. 0 builds them in this process.
        on_result: called with each result as it arrives, in any order.
        progress: show a progress bar while indexes are built, if standard error is a terminal and rich is installed.
        storage_options: passed to remote file systems.

    Returns:
        A result for each shard, in order, without those that ``on_error`` skipped.

    Raises:
        ShardError: a shard cannot be read.
        SampleError: a field occurs twice in a sample.
        SidecarError: an index or its directory cannot be written, an index was built by other rules, or a shard has
            changed while it was read.
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
    shards = resolve_shards(urls, storage_options)
    targets = index_urls(shards, index_dir)
    compute = as_function(columns)
    columns_by = None if compute is None else columns_fingerprint(compute, fields)
    indexer = _Indexer(index_dir, options, compute, fields, columns_by, storage_options, rebuild)
    policy = ErrorPolicy(on_error, "build_indexes")
    results: dict[int, IndexResult] = {}

    def process(
        work: Callable[[str], IndexResult | None],
        numbers: list[int],
        executor: Executor | None,
        meter: ProgressMeter | None = None,
    ) -> list[int]:
        """Call a function for shards; return those without a result, unless the policy stops."""
        left = []
        urls = [shards[number] for number in numbers]
        for at, task in map_shards(work, urls, executor=executor, num_workers=num_workers):
            error, number = task.exception(), numbers[at]
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

    with ThreadPoolExecutor(THREADS, "wds-find-index") as threads:
        missing = [*range(len(shards))] if rebuild else process(indexer.find, [*range(len(shards))], threads)
        if not missing:
            remove_abandoned_locks(targets)
        while missing:
            with lock_folder(targets[missing[0]], create=index_dir is not None) as has_waited:
                if rebuild or not has_waited:
                    with ProgressMeter("Indexing", len(missing), shown=progress, logger=LOGGER) as meter:
                        process(indexer.build, missing, executor, meter)
                    break
            missing = process(indexer.find, missing, threads)
    policy.finish()
    return [results[number] for number in sorted(results)]


@dataclass(frozen=True)
class _Indexer:
    """Finds or builds the index of a shard, in any process."""

    index_dir: str | os.PathLike[str] | None
    options: IndexOptions
    columns: ComputeColumns | None = None
    fields: Collection[str] | None = None
    columns_by: str | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    rebuild: bool = False

    def find(self, url: str) -> IndexResult | None:
        """Return the result of a shard that has a valid index."""
        path, store = index_url(url, self.index_dir), self.storage_options
        index = find_index(url, path, self.options, columns_by=self.columns_by, storage_options=store)
        return None if index is None else IndexResult.of(url, path, index, is_new=False)

    def build(self, url: str) -> IndexResult:
        """Build the index of a shard."""
        path, store = index_url(url, self.index_dir), self.storage_options
        if not self.rebuild:
            _check_replaceable(path, self.options, has_columns=self.columns is not None, store=store)
        index = build_index(url, self.options, columns=self.columns, fields=self.fields, storage_options=store)
        write_index(index, path, storage_options=store)
        return IndexResult.of(url, path, index, is_new=True)


def _check_replaceable(path: str, options: IndexOptions, *, has_columns: bool, store: Mapping[str, Any] | None) -> None:
    """Raise an error if an index has columns or rules that would be lost.

    Raises:
        StaleSidecarError: building it again would merge or split samples, or drop columns.
    """
    try:
        index = read_index(path, storage_options=store)
    except (MissingSidecarError, CorruptSidecarError):
        return
    if index.columns_by is not None and not has_columns:
        raise StaleSidecarError(
            f"{redact(path)} is stale and has the columns {index.user_columns}, so building it again requires their "
            "function: ",
            COLUMNS,
            ", or delete the index",
        )
    if index.facts.rules != options.rules:
        raise StaleSidecarError(
            f"{redact(path)} was built with {index.facts.rules}, not with {options.rules}, so building it again would "
            "change its samples. ",
            same_rules(index.facts.rules),
            ", or ",
            REBUILD,
            " to replace the index",
        )


def same_rules(rules: Rules) -> Message:
    """Return advice to use the rules of an index."""
    hint = {"first_dot": FIRST_DOT, "last_dot": LAST_DOT}.get(rules.key_rule)
    is_default = rules[1:] == Rules()[1:]
    return Message("To keep them, ", hint if hint is not None and is_default else "pass the same options")
