"""The same work for many shards, in several processes at once."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import closing
from typing import Any, TypeAlias, TypeVar

from wds_datapipes.errors import PatternError, WorkerDiedError
from wds_datapipes.io.openers import redact
from wds_datapipes.parallel.executors import BorrowedExecutor, ForkedPool, InProcessExecutor, ShardExecutor
from wds_datapipes.shards.patterns import expand_urls

__all__ = ["Shards", "each_shard", "listed_shards", "run_all"]

#: How often it is looked how others get on, in seconds.
LOOK_S = 0.1

K = TypeVar("K")
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
) -> Generator[tuple[int, Future[T]], None, None]:
    """Call ``work(url, *arguments)`` for each shard, and yield its number and its future as it is done.

    What has not begun is cancelled when the iteration is broken off.

    Args:
        work: a function that another process can import.
        urls: the shards.
        arguments: what it gets besides, and can be pickled.
        executor: who works; by default processes that are forked here and end with the iteration.
        max_workers: how many of them, if not one for each processor. With 1, with one shard, or with standard
            input among them, this process works itself.

    Raises:
        ValueError: ``max_workers`` makes no sense.
        WorkerDiedError: a worker process has ended without a result.
    """
    if max_workers is not None and max_workers < 1:
        raise ValueError(f"max_workers is a number from 1, not {max_workers!r}")
    workers = 1 if "-" in urls else min(max_workers or len(os.sched_getaffinity(0)), len(urls))
    workforce: ShardExecutor
    if executor is not None:
        workforce = BorrowedExecutor(work, executor, None)
    else:
        workforce = InProcessExecutor(work) if workers <= 1 else ForkedPool(work, workers)
    waiting = deque((number, (url, *arguments)) for number, url in enumerate(urls))
    with closing(run_all(workforce, waiting)) as tasks:
        for number, task in tasks:
            if isinstance(error := task.exception(), BrokenExecutor):
                other = " or another shard" if executor is not None else ""  # whose process breaks all others
                raise WorkerDiedError(
                    f"A worker process has ended without a result, while {redact(urls[number])}{other} was worked on: "
                    f"it may have been killed, as for its memory ({error})"
                ) from None
            yield number, task


def run_all(
    workforce: ShardExecutor, waiting: deque[tuple[K, tuple[Any, ...]]], look: Callable[[], object] | None = None
) -> Generator[tuple[K, Future[Any]], None, None]:
    """Call the function of a workforce with all arguments that wait, also those that are added meanwhile.

    Yields what they wait under, and a future, as it is done. Nobody works any more when the iteration has ended. What
    ``look`` is, is called while others work, again and again.
    """
    running: dict[Future[Any], K] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workforce.at_once:
                key, arguments = waiting.popleft()
                running[_submit(workforce, arguments)] = key
            done = wait(running, None if look is None else LOOK_S, FIRST_COMPLETED).done
            if look is not None:
                look()
            for task in [task for task in running if task in done]:  # in their order, where several are
                yield running.pop(task), task
    finally:
        workforce.end()


def _submit(workforce: ShardExecutor, arguments: tuple[Any, ...]) -> Future[Any]:
    try:
        return workforce.submit(*arguments)
    except Exception as error:  # noqa: BLE001  executors differ in how they are broken
        refused: Future[Any] = Future()
        refused.set_exception(error)
        return refused
