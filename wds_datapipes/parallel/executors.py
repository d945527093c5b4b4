"""Executors for tasks on shards: forked processes on this host, a user's executor, or this process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Collection
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from multiprocessing.connection import wait as wait_for
from typing import Any, NamedTuple

from wds_datapipes.errors import WorkerDiedError
from wds_datapipes.interrupts import defer_interrupts
from wds_datapipes.system import HAS_FORK, default_workers

#: How long terminated processes may take to clean up unfinished files, in seconds.
SHUTDOWN_S = 5.0
#: The interval at which signals are repeated, in seconds, because Python misses a signal that arrives just before it
#: waits.
SIGNAL_INTERVAL_S = 0.1
#: The interval at which a process checks whether its parent is alive, in seconds.
PARENT_CHECK_S = 0.2
#: The default number of concurrent tasks on an executor: more than the number of processors in most clusters.
DEFAULT_TASKS = 1000


class InProcessExecutor(Executor):
    """Runs each task immediately in this process."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        """Call the function."""
        done: Future[Any] = Future()
        try:
            done.set_result(work(*arguments, **keywords))
        except Exception as error:  # noqa: BLE001  Future.result() raises it
            done.set_exception(error)
        return done


class BorrowedExecutor:
    """Runs tasks on any executor of ``concurrent.futures``, and leaves it open."""

    def __init__(self, work: Callable[..., Any], executor: Executor, max_tasks: int | None) -> None:
        self._work, self._executor = work, executor
        self.max_tasks = max_tasks or DEFAULT_TASKS
        self._tasks: set[Future[Any]] = set()

    def submit(self, *arguments: Any) -> Future[Any]:
        """Submit the function and its arguments to the executor."""
        task = self._executor.submit(self._work, *arguments)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def shutdown(self) -> None:
        """Cancel pending tasks; running ones continue."""
        for task in list(self._tasks):
            task.cancel()


class _Worker(NamedTuple):
    pool: ProcessPoolExecutor
    pid: int
    process: Any

    def shutdown(self) -> None:
        """Wait for the process to end, and release its resources immediately instead of at garbage collection."""
        self.pool.shutdown(cancel_futures=True)
        if self.process is not None:
            with contextlib.suppress(ValueError):  # still running
                self.process.close()


class ForkedPool:
    """Runs tasks in forked processes, so that the function need not be picklable.

    Each process is a separate pool, so if one is killed, its task is known and the others continue. The processes end
    when this process ends, for any reason.

    Args:
        work: the function.
        count: the maximum number of processes.
        private: descriptors to close in the processes, such as that of a locked file.
    """

    def __init__(self, work: Callable[..., Any], count: int, private: Collection[int] = ()) -> None:
        self._work, self._private = work, private
        self.max_tasks = count
        self._idle: list[_Worker] = []
        self._busy: dict[Future[Any], _Worker] = {}

    def submit(self, *arguments: Any) -> Future[Any]:
        """Send the arguments to an idle process; start one if needed."""
        for done in [task for task in self._busy if task.done()]:
            worker = self._busy.pop(done)
            if isinstance(done.exception(), BrokenExecutor):
                worker.shutdown()
            else:
                self._idle.append(worker)
        if not self._idle:
            self._start_worker()
        with defer_interrupts():  # otherwise, a process could be neither idle nor busy, and would never be stopped
            worker = self._idle.pop()
            task = worker.pool.submit(_run_task, *arguments)
            self._busy[task] = worker
        return task

    def shutdown(self) -> None:
        """Stop all processes; busy ones clean up unfinished files first."""
        for _ in range(round(SHUTDOWN_S / SIGNAL_INTERVAL_S)):
            self._signal(signal.SIGTERM)
            if not wait(self._busy, SIGNAL_INTERVAL_S).not_done:
                break
        self._signal(signal.SIGKILL)
        for worker in [*self._idle, *self._busy.values()]:
            worker.shutdown()
        self._idle.clear()
        self._busy.clear()

    def _start_worker(self) -> None:
        pool = ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("fork"),
            initializer=_init_worker,
            initargs=(self._work, self._private),
        )
        with defer_interrupts(), warnings.catch_warnings():
            # Python 3.12 and newer warn. The fork is safe: in the child, torch uses one thread, and fsspec restarts its
            # own.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
            pid = pool.submit(os.getpid).result()
            process = next((each for each in multiprocessing.active_children() if each.pid == pid), None)
            self._idle.append(_Worker(pool, pid, process))

    def _signal(self, number: signal.Signals) -> None:
        for task, worker in self._busy.items():
            if not task.done():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, number)


def start_workers(
    work: Callable[..., Any],
    tasks: int,
    *,
    executor: Executor | None = None,
    num_workers: int | None = None,
    private: Collection[int] = (),
) -> BorrowedExecutor | ForkedPool:
    """Return workers for a number of tasks: a user's executor, forked processes, or this process.

    Args:
        work: the function.
        tasks: the number of tasks, which limits the number of processes.
        executor: any executor of ``concurrent.futures``.
        num_workers: the number of processes, by default one per processor, or the number of concurrent tasks on an
            executor; with 0, tasks run in this process.
        private: descriptors to close in processes.
    """
    if executor is not None:
        return BorrowedExecutor(work, executor, num_workers)
    count = default_workers() if num_workers is None else num_workers
    if count and tasks:
        if not HAS_FORK:
            raise ValueError(f"num_workers must be 0, because {sys.platform} cannot fork processes; or pass executor=")
        return ForkedPool(work, min(count, tasks), private)
    return BorrowedExecutor(work, InProcessExecutor(), 1)


def failure_of(task: Future[Any]) -> BaseException | None:
    """Return the error of a finished task, or ``None`` if it has a result."""
    if task.cancelled():
        return WorkerDiedError("The executor cancelled the task: its workers or the connection to them may be gone")
    error = task.exception()
    if isinstance(error, BrokenExecutor):
        return WorkerDiedError(f"A worker process died without a result: it may have been killed ({error})")
    return error


#: The function of a forked process, and a lock held while it runs. A process has only one function.
_function: Callable[..., Any] | None = None
_running = threading.Lock()


def _init_worker(work: Callable[..., Any], private: Collection[int]) -> None:
    global _function  # not sent with each task
    _function = work
    for descriptor in private:
        os.close(descriptor)
    # A terminal sends SIGINT to all processes, but the parent stops this one. Its own children get the default handler.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # threads are not forked, and each processor has a process
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_with_parent, args=(parent.sentinel, os.getppid()), daemon=True).start()


def _run_task(*arguments: Any) -> Any:
    assert _function is not None  # noqa: S101  set by _init_worker
    with _running:
        return _function(*arguments)


def _exit_on_signal(_number: int, _frame: object) -> None:
    """Exit, unless this process is already exiting; Python drops exceptions raised while an object is deleted."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, SystemExit):
        error = error.__context__
    if error is None:
        raise SystemExit(1)


def _exit_with_parent(sentinel: int, parent: int) -> None:
    """Exit soon after the parent; its PID is checked, too, because a later sibling may keep the sentinel open."""
    # Only the main thread handles signals, and a signal received by this thread would not wake it.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    while not wait_for([sentinel], PARENT_CHECK_S) and os.getppid() == parent:
        pass
    for _ in range(round(SHUTDOWN_S / SIGNAL_INTERVAL_S)):
        os.kill(os.getpid(), signal.SIGTERM)  # to clean up unfinished files
        if _running.acquire(timeout=SIGNAL_INTERVAL_S):
            break
    os._exit(1)
