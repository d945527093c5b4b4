"""Runs a pipeline for each shard on an executor, in order and within a limit."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from typing import NamedTuple, TypeVar

from wds_datapipes.errors import WorkerDiedError
from wds_datapipes.io.openers import redact
from wds_datapipes.parallel.map_shards import submit_task

__all__ = ["ExecutorHandle", "run_tasks"]

T = TypeVar("T")

#: The executors of this process, by the numbers of their handles.
_EXECUTORS: dict[int, Executor] = {}


class ExecutorHandle(NamedTuple):
    """Stands for an executor of this process. Copies of a pipeline share the executor, which cannot be copied."""

    number: int
    pid: int

    @classmethod
    def of(cls, executor: Executor) -> ExecutorHandle:
        """Return the handle of an executor, which lives as long as this process.

        Raises:
            TypeError: it has no ``submit``.
        """
        if not callable(getattr(executor, "submit", None)):
            raise TypeError(
                f"executor must be a concurrent.futures.Executor, with a method submit, not {executor!r:.200}; for "
                "Dask, pass client.get_executor()"
            )
        _EXECUTORS[id(executor)] = executor
        return cls(id(executor), os.getpid())

    def get(self) -> Executor:
        """Return the executor.

        Raises:
            RuntimeError: this is another process, where the executor does not work.
        """
        if self.pid != os.getpid():
            raise RuntimeError(
                "process_shards sends work to the processes of its executor, and cannot be used in a worker process of "
                "the loader: pass num_workers=0"
            )
        return _EXECUTORS[self.number]


def run_tasks(
    executor: Executor, function: Callable[[str], T], urls: Iterable[str], prefetch: int
) -> Generator[tuple[str, T], None, None]:
    """Yield each URL with the result of a function, in order; at most ``prefetch`` of them are requested ahead.

    Raises:
        WorkerDiedError: the executor has lost a process, and does not repeat its tasks.
    """
    tasks: deque[tuple[str, Future[T]]] = deque()
    remaining = iter(urls)
    try:
        while True:
            while len(tasks) <= prefetch and (url := next(remaining, None)) is not None:
                tasks.append((url, submit_task(executor, (function, url))))
            if not tasks:
                return
            url, task = tasks.popleft()
            try:
                result = task.result()
            except (BrokenExecutor, CancelledError) as error:
                raise WorkerDiedError(
                    f"The executor has ended without a result for {redact(url)}: {type(error).__name__}: {error}. "
                    "ProcessPoolExecutor does not survive the end of a process; executors of Dask and Ray do"
                ) from error
            yield url, result
    finally:
        for _, task in tasks:
            task.cancel()
