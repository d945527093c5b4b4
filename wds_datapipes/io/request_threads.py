"""Request threads: each sends several requests before it waits for the first answer, so that few wait for many."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

from wds_datapipes.io.daemon_threads import Calls, DaemonThreads, set_result

T = TypeVar("T")

#: The number of threads at first, and its maximum; more than at first do not help if a store is near.
FIRST_THREADS, MAX_THREADS = 2, 16
#: The maximum number of requests that a thread sends before it waits for the first answer.
MAX_TOGETHER = 16


class SentCall(NamedTuple, Generic[T]):
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
        together: how many requests a thread sends before it waits for the first answer.
    """

    together = 1


class RequestThreads(DaemonThreads):
    """A pool of daemon threads that send requests and receive the answers in the same order.

    There are few requests at first. Their number increases whenever the reader has to wait: a thread for each request
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

    def quicken(self, *, is_near: bool) -> None:
        """Send more requests at the same time, because the reader waits for an answer.

        Args:
            is_near: whether it waits for a near store.
        """
        self._pace.together = min(2 * self._pace.together, MAX_TOGETHER)
        if not is_near:
            self.double(MAX_THREADS)

    def _new_thread(self) -> threading.Thread:
        arguments = self._calls, self.is_closed, self._pace
        return threading.Thread(target=_run_requests, args=arguments, name=self._name, daemon=True)


def _run_requests(calls: Calls, is_closed: threading.Event, pace: Pace) -> None:
    is_last = False
    while not is_last and (entry := calls.get()) is not None:
        batch, sent = [entry], deque[tuple[Future[Any], SentCall[Any]]]()
        with suppress(queue.Empty):
            while not is_last and len(batch) < pace.together:
                if (more := calls.get_nowait()) is None:
                    is_last = True
                else:
                    batch.append(more)
        for future, send in batch:
            if is_closed.is_set():
                future.cancel()
            if future.set_running_or_notify_cancel():
                try:
                    sent.append((future, send()))
                except BaseException as error:  # noqa: BLE001  `Future.result` raises it
                    future.set_exception(error)
        while sent:
            future, call = sent.popleft()
            if is_closed.is_set():
                call.drop()
                future.set_exception(CancelledError())
            else:
                set_result(future, call.receive)
            del call
        # Objects of the calls must not stay alive while the thread waits for others.
        del entry, batch, sent, future, send
    calls.put(None)  # for the other threads
