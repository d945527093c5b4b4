"""The order of the round robin, with workers that live in this process and answer on command."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchdata.dataloader2.communication import messages
from torchdata.dataloader2.communication.iter import InvalidStateResetRequired, QueueWrapper, TerminateRequired
from torchdata.dataloader2.random import SeedGenerator

from wds_datapipes.loading.torchdata_patches.round_robin import LiveWorkers, WatchedClient
from wds_datapipes.loading.torchdata_patches.worker_processes import SendableError


class Worker:
    """Both queues of a worker that yields ``count`` items, each after ``delay`` waits."""

    def __init__(self, name: int, count: int, delays: Iterator[int]) -> None:
        self.name, self.count, self.delays = name, count, delays
        self.made = 0
        self.asked: list[type] = []
        self.answers: deque[Any] = deque()
        self.remaining = 0
        self._thread = threading.Thread(target=self.close)
        self._thread.start()

    def close(self) -> None:
        """Imitate a queue whose thread has written everything."""

    def put(self, request: Any) -> None:
        assert not self.answers, "only one request may be on its way"
        self.asked.append(type(request))
        self.remaining = next(self.delays) if isinstance(request, messages.GetNextRequest) else 0
        self.answers.append(self.answer(request))

    def answer(self, request: Any) -> Any:
        if isinstance(request, messages.GetNextRequest):
            if self.made == self.count:
                return messages.StopIterationResponse()
            self.made += 1
            return messages.GetNextResponse((self.name, self.made - 1))
        if isinstance(request, messages.ResetEpochRequest):
            self.made = 0
            return messages.ResetEpochResponse()
        return {
            messages.PauseRequest: messages.PauseResponse,
            messages.ResumeRequest: messages.ResumeResponse,
            messages.LimitRequest: messages.LimitResponse,
            messages.TerminateRequest: messages.TerminateResponse,
        }[type(request)]()

    def wait(self, timeout: float) -> None:
        assert self.answers, "nobody waits for a worker that was not asked"
        self.remaining -= 1

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not block and (self.remaining > 0 or not self.answers):
            raise queue.Empty
        return self.answers.popleft()


class Client(WatchedClient):
    def __init__(self, worker: Worker) -> None:
        self.request_queue = self.response_queue = worker
        self._failure = None


def round_robin(counts: list[int]) -> list[tuple[int, int]]:
    return [(name, turn) for turn in range(max(counts)) for name, count in enumerate(counts) if turn < count]


def connect(counts: list[int], delays: Callable[[], int] = lambda: 0) -> tuple[LiveWorkers, list[Worker]]:
    workers = [Worker(name, count, iter(delays, None)) for name, count in enumerate(counts)]
    return LiveWorkers([QueueWrapper(Client(worker)) for worker in workers]), workers


COUNTS = st.lists(st.integers(0, 8), min_size=1, max_size=8)
DELAYS = st.randoms(use_true_random=False).map(lambda random: lambda: random.choice([0, 0, 1, 3]))


@given(COUNTS, DELAYS)
def test_the_order_depends_only_on_the_counts(counts: list[int], delays: Callable[[], int]) -> None:
    pipe, workers = connect(counts, delays)
    assert list(pipe) == round_robin(counts)
    assert [worker.asked.count(messages.GetNextRequest) for worker in workers] == [count + 1 for count in counts]


@given(st.lists(COUNTS.filter(lambda counts: len(counts) == 3), min_size=1, max_size=4), st.data())
def test_an_abandoned_epoch_does_not_affect_the_next(epochs: list[list[int]], data: st.DataObject) -> None:
    pipe, workers = connect([0, 0, 0])
    for counts in epochs:
        for worker, count in zip(workers, counts, strict=True):
            worker.count = count
        pipe.reset_epoch(SeedGenerator(1), None)
        taken = data.draw(st.integers(0, sum(counts) + 1))
        assert list(islice(pipe, taken)) == round_robin(counts)[:taken]


@given(COUNTS, st.sets(st.integers(1, 40)), DELAYS)
def test_a_pause_loses_nothing(counts: list[int], pauses: set[int], delays: Callable[[], int]) -> None:
    pipe, _ = connect(counts, delays)
    items = []
    for item in pipe:
        items.append(item)
        if len(items) in pauses:
            pipe.request_pause()
            pipe.request_resume()
    assert items == round_robin(counts)


@given(COUNTS, st.integers(1, 12))
def test_no_more_items_are_made_than_the_limit_allows(counts: list[int], limit: int) -> None:
    pipe, workers = connect(counts)
    pipe.request_limit(limit)
    iterator = iter(pipe)
    items: list[tuple[int, int]] = []
    made = 0
    while chunk := list(islice(iterator, limit)):
        items += chunk
        before, made = made, sum(worker.made for worker in workers)
        assert made - before <= limit
        pipe.request_pause()
        pipe.request_resume()
    assert items == round_robin(counts)


def test_the_limit_counts_the_requests_of_every_worker() -> None:
    pipe, workers = connect([9, 9, 9])
    pipe.request_limit(4)
    iterator = iter(pipe)
    assert list(islice(iterator, 4)) == [(0, 0), (1, 0), (2, 0), (0, 1)]
    assert [worker.made for worker in workers] == [2, 1, 1]
    pipe.request_pause()
    pipe.request_resume()
    assert list(islice(iterator, 4)) == [(1, 1), (2, 1), (0, 2), (1, 2)]
    assert [worker.made for worker in workers] == [3, 3, 2]


def test_a_requested_item_is_made_despite_the_limit() -> None:
    pipe, _ = connect([3, 3])
    pipe.request_limit(1)
    assert list(pipe) == round_robin([3, 3])


def test_each_worker_is_asked_for_one_item_ahead() -> None:
    pipe, workers = connect([9, 9, 9])
    iterator = iter(pipe)
    assert next(iterator) == (0, 0)
    assert [worker.made for worker in workers] == [2, 1, 1]


def test_items_kept_by_a_pause_do_not_enter_the_next_epoch() -> None:
    pipe, _ = connect([3, 3])
    assert next(iter(pipe)) == (0, 0)
    pipe.request_pause()
    pipe.request_resume()
    pipe.reset_epoch(SeedGenerator(1), None)
    assert list(pipe) == round_robin([3, 3])


def test_an_iterator_of_an_ended_epoch_requests_nothing() -> None:
    pipe, workers = connect([3, 3])
    old = iter(pipe)
    next(old)
    pipe.reset_epoch(SeedGenerator(1), None)
    assert list(old) == []
    assert [worker.made for worker in workers] == [0, 0]


def test_termination_ends_the_iteration_and_waits_for_no_answer() -> None:
    pipe, workers = connect([3, 3], lambda: 1000)
    for worker in workers:
        worker.answers.clear()
    pipe.request_terminate()
    assert list(pipe) == []
    assert [worker.asked for worker in workers] == [[messages.TerminateRequest]] * 2


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (messages.InvalidStateResponse(), InvalidStateResetRequired),
        (messages.TerminateResponse(), TerminateRequired),
    ],
)
def test_other_answers_that_end_the_epoch(answer: object, error: type[Exception]) -> None:
    pipe, workers = connect([3, 3])
    workers[0].answer = lambda request: answer  # type: ignore[method-assign]  # the one worker that answers otherwise
    with pytest.raises(error):
        next(iter(pipe))


def failure() -> messages.WorkerExceptionResponse:
    try:
        raise LookupError("no such shard")
    except LookupError:
        return messages.WorkerExceptionResponse(SendableError(where="in worker process 1"))


def test_an_error_comes_after_the_items_before_it_and_again_in_the_next_epoch() -> None:
    pipe, workers = connect([3, 3])
    answer = workers[1].answer
    workers[1].answer = (  # type: ignore[method-assign]  # the one worker that fails
        lambda request: failure() if workers[1].made == 1 else answer(request)
    )
    iterator = iter(pipe)
    assert list(islice(iterator, 3)) == [(0, 0), (1, 0), (0, 1)]
    with pytest.raises(LookupError, match=r"(?s)Caught LookupError in worker process 1\..*no such shard"):
        next(iterator)
    with pytest.raises(LookupError, match="no such shard"):
        pipe.reset_epoch(SeedGenerator(1), None)
