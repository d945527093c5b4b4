"""Call a function for each of many shards, in several processes or on an executor."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import closing
from typing import Any, TypeAlias, TypeVar

from wds_datapipes.arguments import check_optional_integer, check_path
from wds_datapipes.errors import SpecError, WorkerDiedError
from wds_datapipes.io.openers import redact
from wds_datapipes.parallel.executors import BorrowedExecutor, ForkedPool, start_workers
from wds_datapipes.parallel.progress import ProgressMeter
from wds_datapipes.shards.patterns import expand_urls
from wds_datapipes.system import default_workers

#: The interval at which a process that waits for others checks for signals, in seconds.
SIGNAL_CHECK_S = 1.0

K = TypeVar("K")
T = TypeVar("T")

Shards: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"
"""A pattern of shards without variables, or an iterable of URLs, such as a `ShardList`."""


def resolve_shards(urls: Shards, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the URLs of shards, expanded from a pattern, or unchanged from an iterable."""
    if isinstance(urls, str | os.PathLike):
        if "${" in (text := os.fspath(urls)):
            raise SpecError(f"Only ShardList substitutes variables. Pass ShardList({redact(text)!r})")
        return expand_urls(urls, variables={}, storage_options=storage_options)
    if not isinstance(urls, Iterable):
        raise TypeError(f"shards must be a pattern, or an iterable of URLs, not {urls!r:.200}")
    return [check_path("the URL of a shard", url) for url in urls]


def map_shards(
    work: Callable[[str], T], urls: Sequence[str], *, executor: Executor | None, num_workers: int | None
) -> Generator[tuple[int, Future[T]], None, None]:
    """Call ``work(url)`` for each shard; yield the shard's number and the future when it is done.

    If iteration stops early, pending calls are cancelled.

    Args:
        work: a function that another process can import.
        urls: the shards.
        executor: the executor; by default, forked processes, which end with the iteration.
        num_workers: the number of processes; by default, one per processor. With 0 or 1, with a single shard, or with
            standard input among the shards, the calls are made in this process.

    Raises:
        ValueError: ``num_workers`` is invalid.
        WorkerDiedError: a worker process died without a result.
    """
    check_optional_integer("num_workers", num_workers, 0)
    count = default_workers() if num_workers is None else num_workers
    if "-" in urls or min(count, len(urls)) == 1:
        num_workers = 0 if executor is None else None
    pool = start_workers(work, len(urls), executor=executor, num_workers=num_workers)
    waiting = deque((number, (url,)) for number, url in enumerate(urls))
    with closing(run_tasks(pool, waiting)) as tasks:
        for number, task in tasks:
            if isinstance(error := task.exception(), BrokenExecutor):
                other = " or another shard" if executor is not None else ""  # all tasks of a broken pool fail
                raise WorkerDiedError(
                    f"A worker process died while it processed {redact(urls[number])}{other}: it may have been killed, "
                    f"for example when out of memory ({error})"
                ) from None
            yield number, task


def collect_shards(
    work: Callable[[str], T],
    urls: Sequence[str],
    *,
    label: str,
    measure: Callable[[T], tuple[int, int | None]],
    num_workers: int | None = None,
    progress: bool = True,
) -> list[T]:
    """Call a function for each shard in forked processes, show progress, and return the results in order.

    Args:
        work: the function, which need not be picklable.
        urls: the shards.
        label: the label of the progress bar.
        measure: returns the number of samples and the size of a shard, given the function's result for it.
        num_workers: as for `map_shards`.
        progress: show a progress bar if standard error is a terminal and rich is installed.

    Raises:
        WorkerDiedError: a worker process died without a result.
    """
    results: dict[int, T] = {}
    with ProgressMeter(label, len(urls), shown=progress) as meter:
        for number, task in map_shards(work, urls, executor=None, num_workers=num_workers):
            results[number] = task.result()
            samples, size = measure(results[number])
            meter.add(shards=1, samples=samples, size=size or 0)
    return [results[number] for number in range(len(urls))]


def run_tasks(
    pool: BorrowedExecutor | ForkedPool, waiting: deque[tuple[K, tuple[Any, ...]]]
) -> Generator[tuple[K, Future[Any]], None, None]:
    """Call a pool's function with all waiting arguments, including those added meanwhile.

    Yields the key and the future of each call when it is done. The pool is shut down when iteration ends.
    """
    running: dict[Future[Any], K] = {}
    try:
        while waiting or running:
            while waiting and len(running) < pool.max_tasks:
                key, arguments = waiting.popleft()
                running[_submit_task(pool, arguments)] = key
            # Python misses Ctrl-C just before an unlimited wait.
            while not (done := wait(running, SIGNAL_CHECK_S, FIRST_COMPLETED).done):
                pass
            for task in [task for task in running if task in done]:  # in submission order
                yield running.pop(task), task
    finally:
        pool.shutdown()


def _submit_task(pool: BorrowedExecutor | ForkedPool, arguments: tuple[Any, ...]) -> Future[Any]:
    """Submit a call; if the executor rejects it, store the error in the future, so that it is raised in turn."""
    try:
        return pool.submit(*arguments)
    except Exception as error:  # noqa: BLE001  executors raise different errors
        refused: Future[Any] = Future()
        refused.set_exception(error)
        return refused
