"""The same work for many shards, in several processes at once."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

from wds_datapipes.core.openers import redact
from wds_datapipes.core.shards import expand_urls
from wds_datapipes.errors import PatternError, WorkerDied

__all__ = ["Shards", "each_shard", "listed_shards"]

T = TypeVar("T")

Shards: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"
"""A pattern of shards without variables, or an iterable of URLs, such as a `ShardList`."""


def listed_shards(urls: Shards) -> list[str]:
    """Return the URLs of shards: those of a pattern, or those that an iterable yields, as they are."""
    if isinstance(urls, str | os.PathLike):
        if "${" in (text := os.fspath(urls)):
            raise PatternError(f"Only ShardList puts variables in. Pass ShardList({redact(text)!r})")
        return expand_urls(urls, variables={})
    return [os.fspath(url) for url in urls]


def each_shard(
    work: Callable[..., T],
    urls: Sequence[str],
    arguments: Sequence[Any],
    *,
    executor: Executor | None,
    max_workers: int | None,
) -> Iterator[tuple[int, Future[T]]]:
    """Call ``work(url, *arguments)`` for each shard, and yield its number and its future as it is done.

    What has not begun is cancelled when the iteration is broken off.

    Args:
        work: a function that another process can import.
        urls: the shards.
        arguments: what it gets besides, and can be pickled.
        executor: who works; by default processes that are forked here and end with the iteration.
        max_workers: how many of them, if not one for each processor. With 1, or one shard, this process works itself.

    Raises:
        ValueError: ``max_workers`` makes no sense.
        WorkerDied: a worker process has ended without a result.
    """
    if max_workers is not None and max_workers < 1:
        raise ValueError(f"max_workers is a number from 1, not {max_workers!r}")
    workers = min(max_workers or len(os.sched_getaffinity(0)), len(urls))
    if executor is None and workers <= 1:
        for number, url in enumerate(urls):
            yield number, _called(work, url, arguments)
        return
    with _pool(executor, workers) as pool:
        with warnings.catch_warnings():
            # From Python 3.12 on. What is forked runs none of what the threads of torch and fsspec hold locks for.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
            tasks = {pool.submit(work, url, *arguments): number for number, url in enumerate(urls)}
        try:
            for task in as_completed(tasks):
                if isinstance(error := task.exception(), BrokenExecutor):
                    raise WorkerDied(
                        f"A worker process has ended without a result, while {redact(urls[tasks[task]])} or another "
                        f"shard was worked on: it may have been killed, as for its memory ({error})"
                    ) from None
                yield tasks[task], task
        finally:
            for task in tasks:
                task.cancel()


def _called(work: Callable[..., T], url: str, arguments: Sequence[Any]) -> Future[T]:
    done: Future[T] = Future()
    try:
        done.set_result(work(url, *arguments))
    except Exception as error:  # noqa: BLE001  who asks for the result gets it
        done.set_exception(error)
    return done


@contextmanager
def _pool(executor: Executor | None, workers: int) -> Iterator[Executor]:
    """Lend the executor that was given, or one of our own, which ends with this."""
    if executor is not None:
        yield executor
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        yield pool
