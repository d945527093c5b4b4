"""Daemon threads: call functions without delaying the end of a loop or of the process."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as NoResultError
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from wds_datapipes.interrupts import defer_interrupts

T = TypeVar("T")
Calls: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], Any] | None]"

#: The maximum time that closing waits for a call, in seconds; the call then finishes in the background.
GRACE_S = 2.0
#: How often a call is aborted until it ends, in seconds.
ABORT_S = 0.05


class TooSlowError(TimeoutError):
    """A store, or a connection to it, has stalled; a new connection may be faster."""


class DaemonThreads:
    """A pool of daemon threads that are started on demand.

    Closing it cancels the calls that have not begun. Unlike `concurrent.futures.ThreadPoolExecutor`, neither closing
    nor the end of the process waits for a slow store.

    Args:
        count: the maximum number of concurrent calls.
        name: the name of the threads.

    Attributes:
        stop: cancels the calls that have not begun without waiting.
        is_closed: set when the results are no longer needed; long calls should check it.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._calls: Calls = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.is_closed = threading.Event()
        #: What to cancel when the pool is closed; a subclass may add its own.
        self._queues = [self._calls]
        # The interpreter also calls it at exit.
        self.stop = weakref.finalize(self, _stop_threads, self._queues, self.is_closed)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Call a function in a thread, after those submitted before; cancel the call if the pool is closed."""
        future: Future[T] = Future()
        if self.is_closed.is_set():
            future.cancel()
            return future
        self._calls.put((future, call))
        self._start_thread()
        if self.is_closed.is_set():  # another thread has closed the pool meanwhile, and maybe not seen the call
            future.cancel()
        return future

    def resize(self, count: int) -> None:
        """Change the maximum number of concurrent calls."""
        self._count = count
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        while self._start_thread():
            pass

    def _start_thread(self) -> bool:
        """Start a thread if no idle thread has taken a call; return whether it was started."""
        if self.is_closed.is_set() or self._calls.empty() or len(self._threads) >= self._count:
            return False
        thread = self._new_thread()
        with defer_interrupts():  # otherwise `close` could wait for a thread that was not started
            thread.start()
            self._threads.append(thread)
        return True

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=_run_calls, args=(self._calls, self.is_closed), name=self._name, daemon=True)

    def close(self, abort: Callable[[threading.Thread], object] = bool) -> None:
        """Cancel the calls that have not begun and wait briefly for the others.

        Args:
            abort: aborts what a thread waits for.
        """
        self.stop()
        end = time.monotonic() + GRACE_S
        for thread in self._threads:
            join_thread(thread, end, abort)


def join_thread(thread: threading.Thread, until: float, abort: Callable[[threading.Thread], object] = bool) -> bool:
    """Wait for a thread, at most until a time of `time.monotonic`; return whether it has ended.

    Args:
        thread: the thread.
        until: the time.
        abort: aborts what the thread waits for; called repeatedly, because it may be about to begin to wait.
    """
    if thread is threading.current_thread():  # garbage collection in a thread may close its own pool
        return False
    while thread.is_alive() and (left := until - time.monotonic()) > 0:
        abort(thread)
        thread.join(min(left, ABORT_S))
    return not thread.is_alive()


def _stop_threads(queues: Iterable[Calls], is_closed: threading.Event) -> None:
    is_closed.set()
    for calls in queues:
        with suppress(queue.Empty):
            while (entry := calls.get_nowait()) is not None:
                entry[0].cancel()
        calls.put(None)


def _run_calls(calls: Calls, is_closed: threading.Event) -> None:
    while (entry := calls.get()) is not None:
        future, call = entry
        if is_closed.is_set():
            future.cancel()
        if future.set_running_or_notify_cancel():
            set_result(future, call)
        del entry, future, call  # objects of the call must not stay alive while the thread waits for another call
    calls.put(None)  # for the other threads


def set_result(future: Future[T], call: Callable[[], T]) -> None:
    """Call a function and set its result or its error."""
    with suppress(InvalidStateError):  # it was abandoned
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001  `Future.result` raises it
            future.set_exception(error)
        else:
            future.set_result(result)


def close_result(future: Future[Any]) -> None:
    """Close the result of a call, if there is one."""
    if not future.cancelled() and future.exception() is None and (result := future.result()) is not None:
        result.close()


def start_call(call: Callable[[], T]) -> Future[T]:
    """Call a function in its own thread, because libraries may block forever and cannot be interrupted."""
    future: Future[T] = Future()
    threading.Thread(target=set_result, args=(future, call), name="wds-store", daemon=True).start()
    return future


def wait_for(future: Future[T], most_s: float) -> T:
    """Return the result of a call.

    Raises:
        TooSlowError: it takes longer than ``most_s`` seconds.
        BaseException: any error of the call.
    """
    try:
        return future.result(most_s)
    except NoResultError:
        if future.done():
            raise
        raise TooSlowError(f"no response within {most_s:g} s") from None
