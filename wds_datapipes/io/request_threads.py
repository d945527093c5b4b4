"""Request threads: each has several requests in flight, so that few threads wait for many answers."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NoResultError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from wds_datapipes.io.daemon_threads import Calls, DaemonThreads, set_result

T = TypeVar("T")

#: The number of threads at first, and its maximum; more than at first do not help if a store is near.
FIRST_THREADS, MAX_THREADS = 2, 16
#: The maximum number of requests that a thread has in flight.
MAX_TOGETHER = 16
#: While the reader waits, the number of requests in flight doubles after this time in seconds, again and again.
DOUBLING_S = 0.02


@dataclass(frozen=True)
class SentCall(Generic[T]):
    """A call whose request was sent.

    Attributes:
        receive: waits for the answer, and returns the result of the call.
        drop: drops the request.
    """

    receive: Callable[[], T]
    drop: Callable[[], object]


class Pace:
    """How many requests are sent together.

    Attributes:
        threads: how many threads there are; others end.
        together: how many requests a thread has in flight.
        has_answer: whether an answer has arrived.
    """

    threads = MAX_THREADS
    together = 1
    has_answer = False


class RequestThreads(DaemonThreads):
    """A pool of daemon threads that send requests and receive the answers in the same order.

    There are few requests at first. Their number increases while the reader has to wait: a thread for each request
    would take twice as much CPU time, because threads wait for each other whenever an answer arrives.

    Args:
        name: the name of the threads.
    """

    def __init__(self, name: str) -> None:
        super().__init__(FIRST_THREADS, name)
        self._pace = Pace()

    def request(self, send: Callable[[], SentCall[T]]) -> Future[T]:
        """Call a function that sends a request, in a thread; return what its answer will be."""
        found: Future[Any] = self.submit(send)
        return found

    def await_answer(self, answer: Future[Any], is_near: Callable[[], bool], allow: Callable[[int], int] = int) -> None:
        """Wait for an answer, and meanwhile send more and more requests at the same time.

        Args:
            answer: the answer for which the reader waits.
            is_near: tells whether it waits for a near store, which is unknown before the first answer.
            allow: returns how many of a number of requests the store serves.
        """
        while not answer.done():
            if self._pace.has_answer:
                self.quicken(is_near=is_near(), allow=allow)
            with suppress(TimeoutError, NoResultError, CancelledError):
                answer.exception(DOUBLING_S)

    def quicken(self, *, is_near: bool, allow: Callable[[int], int] = int) -> None:
        """Send more requests at the same time, because the reader waits for an answer.

        Args:
            is_near: whether it waits for a near store.
            allow: see `await_answer`.
        """
        pace, together = self._pace, min(2 * self._pace.together, MAX_TOGETHER)
        count = self._count if is_near else min(2 * self._count, MAX_THREADS)
        allowed = allow(count * together)
        pace.threads = min(count, allowed)
        pace.together = min(together, allowed // pace.threads)
        self.resize(pace.threads)

    def _new_thread(self) -> threading.Thread:
        arguments = self._calls, self.is_closed, self._pace, len(self._threads)
        return threading.Thread(target=_run_requests, args=arguments, name=self._name, daemon=True)


def _run_requests(calls: Calls, is_closed: threading.Event, pace: Pace, number: int) -> None:
    sent, is_last = deque[tuple[Future[Any], SentCall[Any]]](), False
    while sent or not is_last:
        if number >= pace.threads and not sent:
            return
        # Several at a time take less CPU time. The pace may change while the thread waits for a call.
        is_due = len(sent) <= pace.together // 2
        while is_due and not is_last and len(sent) < pace.together and number < pace.threads:
            try:
                entry = calls.get(block=not sent)
            except queue.Empty:
                break
            if entry is None:
                is_last = True
                break
            future, send = entry
            if is_closed.is_set():
                future.cancel()
            if future.set_running_or_notify_cancel():
                try:
                    sent.append((future, send()))
                except BaseException as error:  # noqa: BLE001  `Future.result` raises it
                    future.set_exception(error)
            del entry, future, send  # objects of the calls must not stay alive while the thread waits for others
        if sent:
            future, call = sent.popleft()
            if is_closed.is_set():
                call.drop()
                future.set_exception(CancelledError())
            else:
                set_result(future, call.receive)
                pace.has_answer = True
            del future, call
    calls.put(None)  # for the other threads
