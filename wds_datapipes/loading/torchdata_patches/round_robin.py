"""A patched receiving side of torchdata's service: one item from each worker in turn."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
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

from wds_datapipes.loading.workers.inbox import PULSE_S, Inbox
from wds_datapipes.loading.workers.prefetch_thread import given_up

__all__ = ["LiveWorkers", "WatchedClient"]

#: How long the last request may take to leave this process, in seconds.
FLUSH_S = 1.0


class WatchedClient(IterDataPipeQueueProtocolClient):  # type: ignore[misc]  # torchdata has no types
    """torchdata's end of the conversation with one worker, which learns of every way the worker can fail.

    Args:
        request_queue: the queue of what this process asks.
        response_queue: the queue of what the worker answers.
    """

    def __init__(self, request_queue: Any, response_queue: Any) -> None:
        super().__init__(request_queue, Inbox(response_queue))
        self._failure: Any = None

    @property
    def inbox(self) -> Inbox:
        """Where the answers arrive."""
        inbox: Inbox = self.response_queue
        return inbox

    def request_served(self, result: Any = None) -> None:
        """Raise the worker's error, whatever it was asked for."""
        super().request_served(result)
        if isinstance(result, WorkerExceptionResponse):
            self._failure = result.exc
            self._failure.reraise()

    def request_reset_epoch(self, seed_generator: Any, iter_reset_fn: Any) -> None:
        """Raise the worker's error again: a worker ends after an error, and serves no other epoch."""
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
    """Takes one item from each worker in turn; a worker that has no more leaves the round.

    The order is a function of what each worker yields, and of nothing else. Each worker is asked for one item ahead.

    Several threads may come here: a prefetch thread iterates while the main thread resets or terminates. ``_epoch``
    counts the resets, and an iterator that was begun before the last one asks and takes nothing any more.
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
            buffer.clear()  # what a pause has kept belongs to the epoch before
        super().reset_epoch(seed_generator, iter_reset_fn)

    def request_terminate(self) -> None:
        """Ask every worker to end, without waiting for what it was asked before."""
        with self._turn:
            self._terminated = True
        for pipe in self.datapipes:
            pipe.protocol.request_terminate()

    def _next_response(self, epoch: int, alive: deque[int]) -> Any:
        """Return what the first worker of ``alive`` answers, or None when this iterator's time is over."""
        while True:
            with self._turn:
                if epoch != self._epoch or self._terminated or given_up():
                    return None
                try:
                    response = self._take(alive)
                except EmptyQueue:
                    pass
                else:
                    if isinstance(response, GetNextResponse):
                        self._ask(alive[0])  # it works on the next item while this one is used
                    return response
            self.datapipes[alive[0]].protocol.inbox.wait(PULSE_S)

    def _take(self, alive: deque[int]) -> Any:
        first = alive[0]
        if self.res_buffers[first]:
            return self.res_buffers[first].popleft()
        client = self.datapipes[first].protocol
        if client.can_take_request():  # the epoch begins, or goes on after a pause
            for index in alive:
                self._ask(index)
            if client.can_take_request():  # the limit is reached, and yet somebody wants an item
                self._ask(first, over_limit=True)
        return client.get_response_next(block=False)

    def _ask(self, index: int, *, over_limit: bool = False) -> None:
        client = self.datapipes[index].protocol
        within_limit = self._limit is None or self._request_cnt < self._limit
        if client.can_take_request() and not self.res_buffers[index] and (within_limit or over_limit):
            client.request_next()
            self._request_cnt += 1
