"""Indexes of many shards: builds those that are missing or stale."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wds_datapipes.arguments import checks_calls
from wds_datapipes.errors import CorruptSidecarError, MissingSidecarError, StaleSidecarError, plural
from wds_datapipes.hints import COLUMNS, FIRST_DOT, INDEX_DIR, LAST_DOT, REBUILD
from wds_datapipes.index.format.builder import DEFAULT_OPTIONS, build_index
from wds_datapipes.index.format.index_copies import IndexCopies
from wds_datapipes.index.format.index_file import index_url, index_urls, read_index, write_index
from wds_datapipes.index.format.manifest import Manifest
from wds_datapipes.index.format.options import AccessOptions, IndexOptions
from wds_datapipes.index.format.origin import origin_of
from wds_datapipes.index.format.shard_index import RULES, Rules, ShardIndex
from wds_datapipes.index.format.user_columns import Columns, ComputeColumns, as_function, columns_fingerprint
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.io.file_lock import NO_LOCKS, lock_file
from wds_datapipes.io.host_results import share_on_host
from wds_datapipes.io.openers import local_path, redact
from wds_datapipes.io.remote.remote_file import file_facts
from wds_datapipes.io.small_files import folder_of
from wds_datapipes.io.urls import create_folder
from wds_datapipes.on_error.policy import ErrorPolicy, OnError, check_on_error
from wds_datapipes.parallel.map_shards import Shards, map_shards, resolve_shards
from wds_datapipes.parallel.progress import ProgressMeter
from wds_datapipes.redaction import hides_credentials
from wds_datapipes.types import ShardInfo

LOGGER = logging.getLogger("wds_datapipes")
#: The shard about whose server this process has warned.
_warned: list[str] = []
#: The number of indexes that are read concurrently.
THREADS = 16
#: The file that is locked in the folder of indexes while they are built.
FOLDER_LOCK = ".wdsidx.lock"


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
            names to places in fields; see `build_index`. An index with other columns is invalid. Without this argument,
            valid indexes keep theirs.
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

    def run(
        work: Callable[[str], IndexResult | None],
        numbers: list[int],
        executor: Executor | None,
        meter: ProgressMeter | None = None,
    ) -> list[int]:
        """Call a function for shards; return those without a result, unless the policy stops."""
        left = []
        urls = [shards[number] for number in numbers]
        for place, task in map_shards(work, urls, executor=executor, num_workers=num_workers):
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

    with ThreadPoolExecutor(THREADS, "wds-find-index") as threads:
        missing = [*range(len(shards))] if rebuild else run(indexer.find, [*range(len(shards))], threads)
        if not missing:
            _remove_abandoned_locks(targets)
        while missing:
            with lock_folder(targets[missing[0]], create=index_dir is not None) as has_waited:
                if rebuild or not has_waited:
                    with ProgressMeter("Indexing", len(missing), shown=progress, logger=LOGGER) as meter:
                        run(indexer.build, missing, executor, meter)
                    break
            missing = run(indexer.find, missing, threads)
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
        return None if index is None else _result(url, path, index, is_new=False)

    def build(self, url: str) -> IndexResult:
        """Build the index of a shard."""
        path, store = index_url(url, self.index_dir), self.storage_options
        if not self.rebuild:
            _check_replaceable(path, self.options, has_columns=self.columns is not None, store=store)
        index = build_index(url, self.options, columns=self.columns, fields=self.fields, storage_options=store)
        write_index(index, path, storage_options=store)
        return _result(url, path, index, is_new=True)


def shard_sizes(
    shards: Manifest | Shards, access: AccessOptions, *, window: int = 1, lanes: int = 1
) -> list[tuple[str, int]]:
    """Return the shards and their numbers of samples; with a manifest, no shard is accessed.

    Args:
        shards: a manifest, a pattern, or the URLs.
        access: where the indexes are, and whether and how missing and stale ones are built.
        window: the maximum number of shards of a lane whose samples are shuffled together.
        lanes: the number of lanes.

    Raises:
        StaleSidecarError: a shard has no valid index, and none may be built.
        ShardError: a shard cannot be indexed.
        ValueError: the cache has no space for a window.
    """
    if isinstance(shards, Manifest):
        urls, counts, sizes = shards.urls, shards.counts.tolist(), shards.sizes.tolist()
    else:
        found = indexed_shards(shards, access)
        urls = [shard.url for shard in found]
        counts, sizes = [shard.samples for shard in found], [shard.bytes for shard in found]
    _check_cache(access, sizes, window, lanes)
    return list(zip(urls, counts, strict=True))


def indexed_shards(shards: Shards, access: AccessOptions) -> list[ShardInfo]:
    """Return the number of samples and the size of each shard, according to its index.

    Raises:
        StaleSidecarError: a shard has no valid index, and none may be built.
        ShardError: a shard cannot be indexed.
    """
    urls = resolve_shards(shards, access.storage_options)
    action = f"finds or builds {plural(len(urls), 'index', 'indexes')}"
    facts = share_on_host(action, partial(_find_or_build, urls, access), urls, access, access.storage_options)
    return [ShardInfo(*fact) for fact in facts]


class _Opened(NamedTuple):
    """The index of a shard, as it is found when a dataset is opened.

    Attributes:
        url: the shard.
        path: its index.
        result: what a valid index has; None if there is no valid one.
        rules: the rules of the index, valid or not, if it can be read.
        problem: why the index is not valid.
    """

    url: str
    path: str
    result: IndexResult | None
    rules: Rules | None
    problem: str = ""


def _open_index(url: str, access: AccessOptions, read: Callable[[str], ShardIndex]) -> _Opened:
    """Read the index of a shard, and compare it with what the store reports about the shard.

    Raises:
        StaleSidecarError: it was built by other rules than those of ``access``.
        ShardError: the shard cannot be opened.
    """
    path, store = index_url(url, access.index_dir), access.storage_options
    now = file_facts(url, storage_options=store)
    try:
        index = read(path)
    except (MissingSidecarError, CorruptSidecarError) as error:
        return _Opened(url, path, None, None, str(error).removesuffix("."))
    rules = index.facts.rules
    if access.indexing is not None and rules != access.indexing.rules:
        raise StaleSidecarError(
            f"{redact(path)} was built with {rules}, and indexing= has {access.indexing.rules}. Remove indexing= to "
            "use the index as it is, or build it again with build_indexes(..., rebuild=True)"
        )
    if change := index.describe_change(origin_of(url, store), now):
        return _Opened(url, path, None, rules, f"the shard has changed since {redact(path)} was built: {change}")
    return _Opened(url, path, _result(url, path, index, is_new=False), rules)


def _find_or_build(
    urls: Sequence[str], access: AccessOptions, on_result: Callable[[object], object]
) -> list[list[Any]]:
    """Return the URL, the number of samples and the size of each shard, according to its index."""
    opened = list[_Opened]()
    work = partial(_open_index, access=access, read=IndexCopies(access).read)
    with ThreadPoolExecutor(THREADS, "wds-find-index") as threads:
        for each in threads.map(work, urls):
            opened.append(each)
            on_result(each)
    missing = [each for each in opened if each.result is None]
    if missing:
        _check_may_build(missing, access)
    results = [each.result for each in opened]
    wanted = [(each, _options_to_build(each, opened, access)) for each in missing]
    for rules in dict.fromkeys(options.rules for _, options in wanted):
        those = [(each.url, options) for each, options in wanted if options.rules == rules]
        results += build_indexes(
            [url for url, _ in those],
            index_dir=access.index_dir,
            options=those[0][1],
            on_result=on_result,
            storage_options=access.storage_options,
        )
    facts = {each.url: [each.url, each.samples, each.bytes] for each in results if each is not None}
    return [facts[url] for url in urls]


def _check_may_build(missing: Sequence[_Opened], access: AccessOptions) -> None:
    """Raise an error if the indexes that are not valid must not be built.

    Raises:
        StaleSidecarError: valid ones are required, or would have to be written to a store.
    """
    remote = [each for each in missing if local_path(each.path) is None]
    if access.indexes == "build" or (access.indexes == "local" and not remote):
        return
    first, *others = remote or missing
    count = f", nor {plural(len(others), 'other shard')}" if others else ""
    rules = "" if first.rules in (None, Rules()) else f", with {first.rules}"
    instead = ""
    if access.indexes == "local":
        instead = (
            ". By default, reading writes no index to a store: pass access=AccessOptions(index_dir=...) with a local "
            'folder, or access=AccessOptions(indexes="build")'
        )
    raise StaleSidecarError(
        f"{redact(first.url)} has no valid index{count}: {first.problem}. Build it with `wds-datapipes index` or "
        f"build_indexes{rules}{instead}"
    )


def _options_to_build(missing: _Opened, opened: Sequence[_Opened], access: AccessOptions) -> IndexOptions:
    """Return how a missing index is built: by its own rules if it is stale, otherwise by those of the other indexes.

    Raises:
        StaleSidecarError: the others have several rules, or a rule that is not of this package.
    """
    if access.indexing is not None:
        return replace(access.indexing, limits=access.limits)
    known = {each.rules: each for each in opened if each.rules is not None}
    if missing.rules is None and len(known) > 1:
        (one, first), (two, second), *_ = known.items()
        raise StaleSidecarError(
            f"{redact(missing.url)} has no valid index: {missing.problem}. It is unclear how to build it, because "
            f"{redact(first.path)} was built with {one}, and {redact(second.path)} with {two}. Build it with "
            "`wds-datapipes index` or build_indexes"
        )
    rules = missing.rules or next(iter(known), Rules())
    if rules.key_rule not in RULES:
        raise StaleSidecarError(
            f"{redact(missing.url)} has no valid index: {missing.problem}. The dataset is indexed with {rules}, which "
            "is not part of this package. Pass it, access=AccessOptions(indexing=IndexOptions(key_rule=...))"
        )
    key_rule, lowercase, on_duplicate = rules
    return IndexOptions(
        key_rule=RULES[key_rule],
        lowercase=lowercase,
        on_duplicate=on_duplicate,  # type: ignore[arg-type]  # a recorded str
        limits=access.limits,
    )


def _check_cache(access: AccessOptions, sizes: Sequence[int] | Numbers, window: int, lanes: int) -> None:
    """Check that the cache has space for the largest shard and for a window of a lane.

    Args:
        access: contains the limit.
        sizes: the size of each shard in bytes; 0 if unknown.
        window: see `shard_sizes`.
        lanes: see `shard_sizes`.

    Raises:
        ValueError: the cache is too small.
    """
    if access.cache_bytes is None or not len(sizes):
        return
    count = max(min(window, len(sizes) // lanes), 1)
    need = max(int(np.max(sizes)), int(np.sum(sizes)) * count // len(sizes))
    if access.cache_bytes < need:
        raise ValueError(
            f"cache_bytes={access.cache_bytes} is too small: reading {count:,} of {plural(len(sizes), 'shard')} at a "
            f"time takes {need} bytes, so copies would be evicted before they are read. Choose at least that for each "
            'rank of the host, order="window" with fewer window_shards, or more lanes'
        )


def _result(url: str, path: str, index: ShardIndex, *, is_new: bool) -> IndexResult:
    facts = index.facts
    return IndexResult(url, path, len(index), index.members, facts.bytes or 0, facts.sha256, is_new)


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
            f"function: {COLUMNS}, or delete the index"
        )
    if index.facts.rules != options.rules:
        raise StaleSidecarError(
            f"{redact(path)} was built with {index.facts.rules}, not with {options.rules}, so building it again would "
            f"change its samples. {same_rules(index.facts.rules)}, or {REBUILD} to replace the index"
        )


def same_rules(rules: Rules) -> str:
    """Return advice to use the rules of an index."""
    hint = {"first_dot": FIRST_DOT, "last_dot": LAST_DOT}.get(rules.key_rule)
    is_default = rules[1:] == Rules()[1:]
    return f"To keep them, {hint}" if hint is not None and is_default else "To keep them, pass the same options"


@contextmanager
def lock_folder(path: str, *, create: bool = False) -> Iterator[bool]:
    """Hold the lock of the folder of an index, after waiting for the process that holds it.

    Yields whether there was such a process, which may have built indexes. Remote folders and folders on a file system
    without locks are not locked. The kernel releases the lock of a process that dies.

    Args:
        path: the index.
        create: create the folder if needed.

    Raises:
        MissingSidecarError: the folder cannot be written.
    """
    file, has_waited = local_path(path), False
    with ExitStack() as stack:
        if file is not None:
            lock = Path(file).parent / FOLDER_LOCK
            try:
                if create:
                    create_folder(lock.parent)
                if stack.enter_context(lock_file(lock, wait=False)) is None:
                    has_waited = True
                    LOGGER.warning("Waiting for another process that builds indexes and has locked %s", lock)
                    stack.enter_context(lock_file(lock))
            except (FileNotFoundError, ValueError):  # nor is there the shard, which is reported when it is opened
                pass
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise MissingSidecarError(
                        f"The directory {lock.parent} cannot be written, so indexes cannot be built there: "
                        f"{error.strerror}. For another directory, {INDEX_DIR}"
                    ) from None
                lock.unlink(missing_ok=True)
        yield has_waited


def _remove_abandoned_locks(paths: Iterable[str]) -> None:
    """Remove the locks that killed processes have left in the folders of indexes; `lock_folder` removes the others."""
    for folder in {folder_of(path) for path in paths}:
        if (local := local_path(folder)) is not None:
            with suppress(OSError), lock_file(Path(local, FOLDER_LOCK), wait=False, create=False):
                pass


def find_index(
    url: str,
    path: str,
    options: IndexOptions = DEFAULT_OPTIONS,
    *,
    columns_by: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ShardIndex | None:
    """Return the index of a shard if a valid one with these options exists."""
    try:
        index = read_index(path, storage_options=storage_options)
    except (MissingSidecarError, CorruptSidecarError):
        return None
    if columns_by not in (None, index.columns_by):
        return None
    then, now = index.facts, file_facts(url, storage_options=storage_options)
    if then.rules != options.rules:
        return None
    if then.bytes is None or then.bytes != now.bytes or (options.digest and then.sha256 is None):
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
            "indexes are used as they are and compared with the shards as samples are read",
            redact(url),
        )
    file = local_path(path)
    is_newer = file is not None and now.mtime_ns is not None and Path(file).stat().st_mtime_ns >= now.mtime_ns
    return index if is_newer else None
