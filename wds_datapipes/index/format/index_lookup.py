"""Index lookup: finds the indexes of a dataset when it is opened, and builds those that are missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wds_datapipes.errors import CorruptSidecarError, MissingSidecarError, StaleSidecarError, plural
from wds_datapipes.index.format.dataset_builder import THREADS, IndexResult, build_indexes
from wds_datapipes.index.format.index_copies import IndexCopies
from wds_datapipes.index.format.index_file import index_url
from wds_datapipes.index.format.manifest import Manifest
from wds_datapipes.index.format.options import AccessOptions, IndexOptions
from wds_datapipes.index.format.origin import origin_of
from wds_datapipes.index.format.shard_facts import RULES, Rules
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.io.once_per_host import share_on_host
from wds_datapipes.io.openers import local_path, redact
from wds_datapipes.io.remote.remote_file import file_facts
from wds_datapipes.parallel.map_shards import Shards, resolve_shards
from wds_datapipes.types import ShardInfo


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
    return _Opened(url, path, IndexResult.of(url, path, index, is_new=False), rules)


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


def _check_cache(access: AccessOptions, sizes: Sequence[int] | npt.NDArray[np.int64], window: int, lanes: int) -> None:
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
