"""Worker processes of commands, which end quietly and at once when Ctrl-C ends the command."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

__all__ = ["worker_pool"]

T = TypeVar("T")

#: How long a worker has to end, in seconds.
PATIENCE_S = 2


@contextmanager
def worker_pool(workers: int | None, urls: Sequence[str]) -> Iterator[Executor | None]:
    """Lend processes that work on shards, or ``None`` where this process works itself.

    Args:
        workers: how many, if not one for each processor.
        urls: the shards. Only this process has standard input.
    """
    count = min(workers or len(os.sched_getaffinity(0)), len(urls))
    if count <= 1 or "-" in urls:
        yield None
        return
    others = set(multiprocessing.active_children())
    pool = CommandPool(count, mp_context=multiprocessing.get_context("fork"), initializer=_begin)
    try:
        yield pool
    except BaseException:
        ours = set(multiprocessing.active_children()) - others
        for process in ours:
            process.terminate()
        for process in ours:
            process.join(PATIENCE_S)
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


class CommandPool(ProcessPoolExecutor):
    """Processes that end when a signal tells them to, after what they do is unwound, without beginning another task."""

    def submit(self, work: Callable[..., T], /, *arguments: Any, **keywords: Any) -> Future[T]:
        """Let a process call a function."""
        return super().submit(_guarded, work, *arguments, **keywords)


def _guarded(work: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    try:
        return work(*arguments, **keywords)
    except SystemExit:
        os._exit(0)  # the pool would send the exception to the command, and go on


def _begin() -> None:
    """Let Ctrl-C, and the end of the command, unwind what a worker does, so that nothing half is left."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)


def _end(*_: object) -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _again)
    sys.exit()


def _again(*_: object) -> None:
    """Do nothing: the worker is ending."""
