"""Steps of requests: one thread polls the sockets of many requests, and continues each that has received something."""

from __future__ import annotations

import queue
import socket
import threading
import weakref
from collections.abc import Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import Any, TypeAlias, TypeVar, cast

from wds_datapipes.io.daemon_threads import Calls, DaemonThreads
from wds_datapipes.system import new_poll

T = TypeVar("T")
Steps: TypeAlias = Generator[tuple[socket.socket, int] | None, None, T]
"""The steps of a request, which return its result. A step yields a socket and the events to wait for, as in
`select.poll`; if it is continued too early, it waits again. It yields None before a call that may block."""

#: How often the thread that takes steps looks for new requests, and how often a waiting step is continued to check its
#: time limit, in seconds.
TICK_S, PAUSE_S = 0.005, 0.1


class RequestThreads(DaemonThreads):
    """Daemon threads that also take the steps of requests.

    Args:
        count: the maximum number of concurrent calls, and of concurrent requests.
        name: the name of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count, name)
        self._requests: Calls = queue.SimpleQueue()
        self._queues.append(self._requests)
        self._takes_steps = False

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
            most, self._count = self._count, self._count + 1  # the thread that polls is an additional one
            self.submit(partial(_take_steps, self._requests, weakref.ref(self), self.is_closed, most))
        return future


def _take_steps(requests: Calls, pool: weakref.ref[RequestThreads], is_closed: threading.Event, count: int) -> None:
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
