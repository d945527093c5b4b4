"""Threads that call functions and send requests without delaying the end of a loop or of the process."""

from __future__ import annotations

import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as NoResultError
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import Any, TypeAlias, TypeVar, cast

from wds_datapipes.interrupts import defer_interrupts
from wds_datapipes.system import new_poll

T = TypeVar("T")
Steps: TypeAlias = Generator[tuple[socket.socket, int] | None, None, T]
"""The steps of a request, which return its result. A step yields a socket and the events to wait for, as in
`select.poll`; if it is continued too early, it waits again. It yields None before a call that may block."""
Calls: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], Any] | None]"

#: How often the thread that takes steps looks for new requests, and how often a waiting step is continued to check its
#: time limit, in seconds.
TICK_S, PAUSE_S = 0.005, 0.1
#: The maximum time that closing waits for a call, in seconds; the call then finishes in the background.
GRACE_S = 2.0


class TooSlowError(TimeoutError):
    """A store, or a connection to it, has stalled; a new connection may be faster."""


class CallThreads:
    """A pool of daemon threads that are started on demand.

    Closing it cancels the calls that have not begun. Unlike `concurrent.futures.ThreadPoolExecutor`, neither closing
    nor the end of the process waits for a slow store.

    Args:
        count: the maximum number of concurrent calls, and of concurrent requests.
        name: the name of the threads.

    Attributes:
        stop: cancels the calls that have not begun without waiting.
        is_closed: set when the results are no longer needed; long calls should check it.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._calls: Calls = queue.SimpleQueue()
        self._requests: Calls = queue.SimpleQueue()
        self._takes_steps = False
        self._threads: list[threading.Thread] = []
        self.is_closed = threading.Event()
        # The interpreter also calls it at exit.
        self.stop = weakref.finalize(self, _stop_threads, (self._calls, self._requests), self.is_closed)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Call a function in a thread, after those submitted before; cancel the call if the pool is closed."""
        future: Future[T] = Future()
        if self.is_closed.is_set():
            future.cancel()
            return future
        self._calls.put((future, call))
        # If no idle thread has taken it:
        if not self._calls.empty() and len(self._threads) < self._count + self._takes_steps:
            thread = threading.Thread(
                target=_run_calls, args=(self._calls, self.is_closed), name=self._name, daemon=True
            )
            with defer_interrupts():  # otherwise `close` could wait for a thread that was not started
                thread.start()
                self._threads.append(thread)
        return future

    def submit_steps(self, steps: Steps[T]) -> Future[T]:
        """Take the steps of a request in the thread for all requests.

        A thread for each request would take more CPU time, because threads wait for each other. Steps that may block
        are taken in another thread.
        """
        future: Future[T] = Future()
        if self.is_closed.is_set():
            future.cancel()
            return future
        self._requests.put((future, steps))
        if not self._takes_steps:
            self._takes_steps = True
            self.submit(partial(_take_steps, self._requests, weakref.ref(self), self.is_closed, self._count))
        return future

    def close(self) -> None:
        """Cancel the calls that have not begun and wait briefly for the others."""
        self.stop()
        end = time.monotonic() + GRACE_S
        for thread in self._threads:
            if thread is not threading.current_thread():  # garbage collection in one of them may close the pool
                thread.join(max(0.0, end - time.monotonic()))


def _stop_threads(queues: tuple[Calls, ...], is_closed: threading.Event) -> None:
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


def _take_steps(requests: Calls, pool: weakref.ref[CallThreads], is_closed: threading.Event, count: int) -> None:
    poll, waiting = new_poll(), dict[int, tuple[Future[Any], Steps[Any]]]()
    moved = dict[Future[Any], tuple[Future[Any], Steps[Any]]]()  # those that another thread continues

    def wait_for_step(request: tuple[Future[Any], Steps[Any]], wait: tuple[socket.socket, int] | None) -> None:
        if wait is not None:
            waiting[wait[0].fileno()] = request
            poll.register(*wait)
        elif not request[0].done() and (threads := pool()) is not None:
            moved[threads.submit(partial(_continue, *request, may_block=True))] = request

    # No name may keep an object of a request alive while this thread waits for another one.
    while not is_closed.is_set():
        with suppress(queue.Empty):
            while len(waiting) + len(moved) < count:
                if (request := requests.get(not waiting and not moved)) is None:
                    break
                wait_for_step(request, _continue(*request))
                del request
        for step in [each for each in moved if each.done() and not each.cancelled()]:
            wait_for_step(moved.pop(step), step.result())
            del step
        # If nothing has arrived, one of the waiting steps checks its time limit.
        for descriptor, _ in poll.poll(TICK_S * 1000) or [(first, 0) for first in islice(waiting, 1)]:
            poll.unregister(descriptor)
            request = waiting.pop(descriptor)
            wait_for_step(request, _continue(*request))
            del request
    for future, _ in chain(waiting.values(), moved.values()):
        future.cancel()


def _continue(future: Future[T], steps: Steps[T], *, may_block: bool = False) -> tuple[socket.socket, int] | None:
    """Continue a request; return what it waits for, or None if it has ended or may block."""
    with suppress(InvalidStateError):  # it was cancelled
        try:
            while (wait := next(steps)) is None and may_block:
                pass
        except StopIteration as end:
            future.set_result(end.value)
        except BaseException as error:  # noqa: BLE001  `Future.result` raises it
            future.set_exception(error)
        else:
            return wait
    return None


def run_steps(steps: Steps[T]) -> T:
    """Take all steps of a request in this thread and return its result.

    Raises:
        BaseException: any error of a step.
    """
    try:
        while True:
            if (wait := next(steps)) is not None:
                poll = new_poll()
                poll.register(*wait)
                poll.poll(PAUSE_S * 1000)
    except StopIteration as end:
        return cast(T, end.value)


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
