"""Who works on shards: processes of this host, one for each shard at a time; an executor; or this process itself."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

from wds_datapipes.errors import WorkerDiedError
from wds_datapipes.extras import require

__all__ = [
    "BorrowedExecutor",
    "ForkedPool",
    "InProcessExecutor",
    "ShardExecutor",
    "connect_dask",
    "ending_later",
    "failure_of",
    "send_module",
]

#: How long processes have to put away what they are writing when they are told to end, in seconds.
END_S = 5.0
#: How often they are told, in seconds: Python overlooks a signal that comes right before it begins to wait.
AGAIN_S = 0.1
#: How often a process looks whether its parent is still there, in seconds, where nothing tells it before.
PARENT_CHECK_S = 0.2
#: How many tasks an executor is given at once, if nothing else is said: more than most clusters have processors.
LENT_AT_ONCE = 1000
#: How long to wait for the scheduler of a Dask cluster, in seconds.
CONNECT_S = 10


class ShardExecutor(Protocol):
    """Calls one function with many arguments."""

    #: How many tasks it is given at once.
    at_once: int

    def submit(self, *arguments: Any) -> Future[Any]:
        """Call the function with these arguments, some time, somewhere."""

    def end(self) -> None:
        """Give up all that is not done, and leave no process behind."""


class InProcessExecutor:
    """Works at once, in this process."""

    at_once = 1

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work

    def submit(self, *arguments: Any) -> Future[Any]:
        """Call the function."""
        done: Future[Any] = Future()
        try:
            done.set_result(self._work(*arguments))
        except Exception as error:  # noqa: BLE001  who asks for the result gets it
            done.set_exception(error)
        return done

    def end(self) -> None:
        """There is nothing to end."""


class BorrowedExecutor:
    """Lets any executor of `concurrent.futures` work, which stays open."""

    def __init__(self, work: Callable[..., Any], executor: Executor, at_once: int | None) -> None:
        self._work, self._executor = work, executor
        self.at_once = at_once or LENT_AT_ONCE
        self._tasks: set[Future[Any]] = set()

    def submit(self, *arguments: Any) -> Future[Any]:
        """Hand the function and its arguments to the executor."""
        task = self._executor.submit(self._work, *arguments)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def end(self) -> None:
        """Cancel what has not begun; what has begun goes on to its end."""
        for task in list(self._tasks):
            task.cancel()


@contextlib.contextmanager
def connect_dask(address: str) -> Iterator[Any]:
    """Connect to a scheduler, and lend the client.

    Args:
        address: such as ``"tcp://host:8786"``, or ``"host:8786"``.

    Raises:
        MissingDependencyError: Dask is not installed.
        ConnectionError: there is no scheduler.
    """
    distributed = require("distributed", extra="dask", purpose="reach a Dask cluster")
    try:
        client = distributed.Client(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise ConnectionError(f"There is no Dask scheduler at {address!r}: {type(error).__name__}: {error}") from None
    try:
        yield client
    finally:
        client.close()


def send_module(client: Any, function: Callable[..., Any], folder: Path) -> None:
    """Send the module of a function to all workers, if it is a file of a folder, where they need not be."""
    module = inspect.getmodule(function)
    file = getattr(module, "__file__", None)
    if file is not None and Path(file).parent == folder:
        client.upload_file(file)


class _Worker(NamedTuple):
    pool: ProcessPoolExecutor
    pid: int
    process: Any

    def end(self) -> None:
        """Wait for its end, and close what there is to it now, whoever may still have an error that leads there."""
        self.pool.shutdown(cancel_futures=True)
        if self.process is not None:
            with contextlib.suppress(ValueError):  # it is at work yet
                self.process.close()


class ForkedPool:
    """Lets processes work that are forked here, so that the function need not be pickled.

    Each is a pool of its own: when one is killed, it is known which task it had, and the others go on. When this
    process ends, whatever the reason, they do so too.

    Args:
        work: the function.
        count: how many processes there are at the most.
        private: descriptors that they do not keep, such as of a file that is locked as long as one has it.
    """

    def __init__(self, work: Callable[..., Any], count: int, private: Collection[int] = ()) -> None:
        self._work, self._private = work, private
        self.at_once = count
        self._idle: list[_Worker] = []
        self._busy: dict[Future[Any], _Worker] = {}

    def submit(self, *arguments: Any) -> Future[Any]:
        """Give a process the arguments; there is one for each of `at_once` tasks."""
        for done in [task for task in self._busy if task.done()]:
            worker = self._busy.pop(done)
            if isinstance(done.exception(), BrokenExecutor):
                worker.end()
            else:
                self._idle.append(worker)
        if not self._idle:
            self._hire()
        with _interrupts_later():  # or a process would be neither idle nor busy, and nobody would end it
            worker = self._idle.pop()
            task = worker.pool.submit(_work, *arguments)
            self._busy[task] = worker
        return task

    def end(self) -> None:
        """End all processes: those that are at work put away what they are writing."""
        for _ in range(round(END_S / AGAIN_S)):
            self._signal(signal.SIGTERM)
            if not wait(self._busy, AGAIN_S).not_done:
                break
        self._signal(signal.SIGKILL)
        for worker in [*self._idle, *self._busy.values()]:
            worker.end()
        self._idle.clear()
        self._busy.clear()

    def _hire(self) -> None:
        pool = ProcessPoolExecutor(
            1, mp_context=multiprocessing.get_context("fork"), initializer=_begin, initargs=(self._work, self._private)
        )
        with _interrupts_later(), warnings.catch_warnings():
            # From Python 3.12 on. Of what is forked, torch is told to have no threads, and fsspec begins its own anew.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
            pid = pool.submit(os.getpid).result()
            process = next((each for each in multiprocessing.active_children() if each.pid == pid), None)
            self._idle.append(_Worker(pool, pid, process))

    def _signal(self, number: signal.Signals) -> None:
        for task, worker in self._busy.items():
            if not task.done():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, number)


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Let Ctrl-C wait: Python drops an exception that comes while it forks, and a new process would print its own."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *interrupt: came.append(interrupt))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(*came[0])


def failure_of(task: Future[Any]) -> BaseException | None:
    """Return why a task that is done has no result, or ``None`` if it has one."""
    if task.cancelled():
        return WorkerDiedError(
            "The executor has given the task up: its workers, or its connection to them, may be gone"
        )
    error = task.exception()
    if isinstance(error, BrokenExecutor):
        return WorkerDiedError(f"A worker process has ended without a result: it may have been killed ({error})")
    return error


#: What a forked process does, and whether it is about it.
_inherited: Callable[..., Any] | None = None
_at_work = threading.Lock()
#: Whether its end has to wait for a moment, and whether it does.
_end_waits = _end_is_due = False


@contextlib.contextmanager
def ending_later() -> Iterator[None]:
    """Let the end of a forked process wait, until what is made here has an owner that removes it."""
    global _end_waits
    _end_waits = True
    try:
        yield
    finally:
        _end_waits = False
    if _end_is_due:
        raise SystemExit(1)


def _begin(work: Callable[..., Any], private: Collection[int]) -> None:
    global _inherited  # a process has one, and it is not sent with each task
    _inherited = work
    for descriptor in private:
        os.close(descriptor)
    # A terminal sends this one to all. Who has forked this process ends it; its own children get the default again.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, _leave)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # those of the parent were not forked, and there is a process for each processor
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel, os.getppid()), daemon=True).start()


def _work(*arguments: Any) -> Any:
    assert _inherited is not None  # noqa: S101  it has begun
    with _at_work:
        return _inherited(*arguments)


def _leave(_number: int, _frame: object) -> None:
    """End this process, unless it is about it: Python drops an exception that comes while it removes an object."""
    global _end_is_due
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, SystemExit):
        error = error.__context__
    if _end_waits:
        _end_is_due = True
    elif error is None:
        raise SystemExit(1)


def _end_with(sentinel: int, parent: int) -> None:
    """End this process soon after its parent, which a later sibling may hide by holding the sentinel open."""
    # A signal that this thread got would not wake the main one, which alone does something about it.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    while not wait_for([sentinel], PARENT_CHECK_S) and os.getppid() == parent:
        pass
    for _ in range(round(END_S / AGAIN_S)):
        os.kill(os.getpid(), signal.SIGTERM)  # to put away what is being written
        if _at_work.acquire(timeout=AGAIN_S):
            break
    os._exit(1)
