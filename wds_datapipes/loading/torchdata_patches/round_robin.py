"""The patched receiving side of torchdata's service, which takes one item from each worker in turn."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torchdata.dataloader2.communication.iter import (
    InvalidStateResetRequired,
    TerminateRequired,
    _IterateQueueDataPipes,
)
from torchdata.dataloader2.communication.messages import (
    GetNextResponse,
    InvalidStateResponse,
    StopIterationResponse,
    TerminateResponse,
    WorkerExceptionResponse,
)
from torchdata.dataloader2.communication.protocol import EmptyQueue, IterDataPipeQueueProtocolClient

from wds_datapipes.errors import WorkerDiedError
from wds_datapipes.loading.torchdata_patches.queues import PULSE_S, Inbox
from wds_datapipes.loading.workers.connection import is_abandoned, set_reader

__all__ = ["LiveWorkers", "WatchedClient", "guard_thread", "pause"]

#: How long sending the last request may take, in seconds.
FLUSH_S = 1.0


class WatchedClient(IterDataPipeQueueProtocolClient):  # type: ignore[misc]  # torchdata has no types
    """torchdata's client of one worker, which detects every way the worker can fail.

    Args:
        request_queue: the queue of requests to the worker.
        response_queue: the queue of its responses.
    """

    def __init__(self, request_queue: Any, response_queue: Any) -> None:
        super().__init__(request_queue, Inbox(response_queue))
        self._failure: Any = None

    @property
    def inbox(self) -> Inbox:
        """The receiving end of the responses."""
        inbox: Inbox = self.response_queue
        return inbox

    def request_served(self, result: Any = None) -> None:
        """Raise the worker's error, whatever the request."""
        super().request_served(result)
        if isinstance(result, WorkerExceptionResponse):
            self._failure = result.exc
            self._failure.reraise()

    def request_reset_epoch(self, seed_generator: Any, iter_reset_fn: Any) -> None:
        """Raise the worker's error again: a worker ends after an error, and serves no further epoch."""
        if self._failure is not None:
            self._failure.reraise()
        super().request_reset_epoch(seed_generator, iter_reset_fn)

    def request_terminate(self) -> None:
        """Send the last request, and wait until it is written.

        A process that ends while its thread writes leaves the queue locked for every other process that writes to it.
        """
        super().request_terminate()
        self.request_queue.close()
        self.request_queue._thread.join(FLUSH_S)


class LiveWorkers(_IterateQueueDataPipes):  # type: ignore[misc]  # torchdata has no types
    """Takes one item from each worker in turn, skipping workers that are exhausted.

    The order depends only on the items of each worker. One item is requested ahead from each worker.

    Several threads may use it: a prefetch thread iterates while the main thread resets or terminates. ``_epoch`` counts
    the resets; an iterator that began before the last reset no longer requests or takes anything.
    """

    _is_child_datapipe = False

    def __init__(self, datapipes: list[Any]) -> None:
        super().__init__(datapipes)
        self._epoch = 0
        self._turn = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        epoch = self._epoch
        alive = deque(range(len(self.datapipes)))
        while alive and (response := self._next_response(epoch, alive)) is not None:
            if isinstance(response, InvalidStateResponse):
                raise InvalidStateResetRequired
            if isinstance(response, TerminateResponse):
                raise TerminateRequired
            if isinstance(response, StopIterationResponse):
                alive.popleft()
            else:
                alive.rotate(-1)
                yield response.value

    def reset_epoch(self, seed_generator: Any, iter_reset_fn: Any) -> None:
        """Begin an epoch in every worker."""
        with self._turn:
            self._epoch += 1
        for buffer in self.res_buffers:
            buffer.clear()  # items kept by a pause belong to the previous epoch
        super().reset_epoch(seed_generator, iter_reset_fn)

    def request_terminate(self) -> None:
        """Ask every worker to end, without waiting for pending responses."""
        with self._turn:
            self._terminated = True
        for pipe in self.datapipes:
            pipe.protocol.request_terminate()

    def _next_response(self, epoch: int, alive: deque[int]) -> Any:
        """Return the response of the first worker of ``alive``, or ``None`` if a later epoch has begun."""
        while True:
            with self._turn:
                if epoch != self._epoch or self._terminated or is_abandoned():
                    return None
                try:
                    response = self._take(alive)
                except EmptyQueue:
                    pass
                else:
                    if isinstance(response, GetNextResponse):
                        self._ask(alive[0])  # it makes the next item while this one is used
                    return response
            self.datapipes[alive[0]].protocol.inbox.wait(PULSE_S)

    def _take(self, alive: deque[int]) -> Any:
        first = alive[0]
        if self.res_buffers[first]:
            return self.res_buffers[first].popleft()
        client = self.datapipes[first].protocol
        if client.can_take_request():  # the epoch begins, or resumes after a pause
            for index in alive:
                self._ask(index)
            if client.can_take_request():  # the limit is reached, but another item is requested
                self._ask(first, over_limit=True)
        return client.get_response_next(block=False)

    def _ask(self, index: int, *, over_limit: bool = False) -> None:
        client = self.datapipes[index].protocol
        within_limit = self._limit is None or self._request_cnt < self._limit
        if client.can_take_request() and not self.res_buffers[index] and (within_limit or over_limit):
            client.request_next()
            self._request_cnt += 1


#: The polling interval while a prefetcher's thread pauses, in seconds.
PAUSE_CHECK_S = 1e-3


def guard_thread(fill: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``thread_worker`` of one of torchdata's prefetchers so that its thread never ends silently."""

    @functools.wraps(fill)
    def thread_worker(prefetch_data: Any, *args: Any) -> None:
        set_reader(prefetch_data)
        prefetch_data.source_datapipe = _deliver(prefetch_data.source_datapipe, prefetch_data.prefetch_buffer.append)
        try:
            fill(prefetch_data, *args)
        finally:
            set_reader(None)

    return thread_worker


def pause(prefetcher: Any) -> None:
    """Pause one of torchdata's prefetchers: wait until its thread has stopped making items, or has ended."""
    if prefetcher.thread is not None:
        data = prefetcher.prefetch_data
        data.run_prefetcher = False
        data.paused = False  # it may remain from an earlier pause; the thread sets it repeatedly
        while not data.paused and prefetcher.thread.is_alive():
            prefetcher.thread.join(PAUSE_CHECK_S)


def _deliver(source: Iterable[Any], deliver: Callable[[Exception], None]) -> Iterator[Any]:
    """Yield from ``source``; deliver its exception, and end.

    torchdata's thread reports that it has stopped before it delivers the error, so that a reader in between mistakes
    the error for the end of the epoch. It catches neither the exceptions of ``iter`` nor ``SystemExit``.
    """
    try:
        yield from source
    except GeneratorExit:
        raise
    except Exception as error:  # noqa: BLE001 - the reader of the buffer raises it
        deliver(error)
    except BaseException as error:  # noqa: BLE001 - a reader would treat it as an item if it is not an Exception
        died = WorkerDiedError(
            f"The pipeline raised {error!r} in a prefetch thread, where it ends only that thread. "
            "Code that a pipeline runs must not call exit()."
        )
        died.__cause__ = error
        deliver(died)
