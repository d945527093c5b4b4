"""Indexes of many shards: builds those that are missing or stale."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wds_datapipes.arguments import checks_calls
from wds_datapipes.errors import CorruptSidecarError, MissingSidecarError, StaleSidecarError, plural
from wds_datapipes.index.build import DEFAULT_OPTIONS, ComputeColumns, build_index, columns_fingerprint
from wds_datapipes.index.file_format import index_url, index_urls, read_index, write_index
from wds_datapipes.index.manifest import Manifest
from wds_datapipes.index.options import AccessOptions, IndexOptions
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.reading.index_copies import IndexCopies
from wds_datapipes.index.shard_index import ShardIndex, rule_name
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
    columns: ComputeColumns | None = None,
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
        options: how shards are indexed. An index built by other rules is invalid, as is one without a digest if there
            should be one.
        columns: a function that computes columns of your own, such as labels, from each sample; see `build_index`. An
            index with columns of another function is invalid. Without this argument, valid indexes keep theirs.
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
        SidecarError: an index or its directory cannot be written, or a shard has changed while it was read.
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
    columns_by = None if columns is None else columns_fingerprint(columns, fields)
    indexer = _Indexer(index_dir, options, columns, fields, columns_by, storage_options, rebuild)
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
    read: Callable[[str], ShardIndex] | None = None

    def find(self, url: str) -> IndexResult | None:
        """Return the result of a shard that has a valid index."""
        path, store = index_url(url, self.index_dir), self.storage_options
        index = find_index(url, path, self.options, columns_by=self.columns_by, storage_options=store, read=self.read)
        return None if index is None else _result(url, path, index, is_new=False)

    def build(self, url: str) -> IndexResult:
        """Build the index of a shard."""
        path, store = index_url(url, self.index_dir), self.storage_options
        if self.columns is None and not self.rebuild:
            _check_no_columns(path, store)
        index = build_index(url, self.options, columns=self.columns, fields=self.fields, storage_options=store)
        write_index(index, path, storage_options=store)
        return _result(url, path, index, is_new=True)


def shard_sizes(
    shards: Manifest | Shards, access: AccessOptions, *, window: int = 1, lanes: int = 1
) -> list[tuple[str, int]]:
    """Return the shards and their numbers of samples; with a manifest, no shard is accessed.

    Args:
        shards: a manifest, a pattern, or the URLs.
        access: where the indexes are, and whether missing and stale ones are built.
        window: the maximum number of shards of a lane whose samples are shuffled together.
        lanes: the number of lanes.

    Raises:
        StaleSidecarError: a shard has no valid index.
        ShardError: a shard cannot be indexed.
        ValueError: the cache has no space for a window.
    """
    if isinstance(shards, Manifest):
        urls, counts, sizes = shards.urls, shards.counts.tolist(), shards.sizes.tolist()
    else:
        urls = resolve_shards(shards, access.storage_options)
        action = f"finds or builds {plural(len(urls), 'index', 'indexes')}"
        facts = share_on_host(action, partial(_find_or_build, urls, access), urls, access, access.storage_options)
        urls, counts, sizes = [[fact[column] for fact in facts] for column in range(3)]
    _check_cache(access, sizes, window, lanes)
    return list(zip(urls, counts, strict=True))


def _find_or_build(
    urls: Sequence[str], access: AccessOptions, on_result: Callable[[object], object]
) -> list[list[Any]]:
    """Return the URL, the number of samples and the size of each shard, according to its index."""
    index_dir, options, store = access.index_dir, IndexOptions(limits=access.limits), access.storage_options
    indexer = _Indexer(index_dir, options, storage_options=store, read=IndexCopies(access).read)
    found = list[IndexResult | None]()
    with ThreadPoolExecutor(THREADS, "wds-find-index") as threads:
        for result in threads.map(indexer.find, urls):
            found.append(result)
            on_result(result)
    missing = [url for url, result in zip(urls, found, strict=True) if result is None]
    if missing and access.indexes == "require":
        raise StaleSidecarError(
            f"{redact(index_url(missing[0], index_dir))} is missing, damaged, stale or built with other options. Build "
            'it with `wds-datapipes index`, or pass indexes="build"'
        )
    built = build_indexes(missing, index_dir=index_dir, options=options, on_result=on_result, storage_options=store)
    facts = {each.url: [each.url, each.samples, each.bytes] for each in (*found, *built) if each is not None}
    return [facts[url] for url in urls]


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


def _check_no_columns(path: str, storage_options: Mapping[str, Any] | None) -> None:
    """Raise an error if a stale index has columns, which would be lost."""
    try:
        index = read_index(path, storage_options=storage_options)
    except (MissingSidecarError, CorruptSidecarError):
        return
    if index.columns_by is not None:
        raise StaleSidecarError(
            f"{redact(path)} is stale and has the columns {index.user_columns}, so building it again requires their "
            "function. Pass it to build_indexes(columns=...), or delete the index"
        )


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
                        f"{error.strerror}. Pass another directory for indexes, index_dir="
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
    read: Callable[[str], ShardIndex] | None = None,
) -> ShardIndex | None:
    """Return the index of a shard if a valid one with these options exists; ``read`` reads it by its name."""
    try:
        index = read_index(path, storage_options=storage_options) if read is None else read(path)
    except (MissingSidecarError, CorruptSidecarError):
        return None
    if columns_by not in (None, index.columns_by):
        return None
    then, now = index.facts, file_facts(url, storage_options=storage_options)
    rules = (rule_name(options.key_rule), options.lowercase, options.on_duplicate)
    if (then.key_rule, then.lowercase, then.on_duplicate) != rules:
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
