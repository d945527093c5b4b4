"""Requests of which few threads have several in flight: their answers, their errors, and what closing drops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import pytest

from wds_datapipes.io import daemon_threads, request_threads
from wds_datapipes.io.request_threads import MAX_TOGETHER, RequestThreads, SentCall

LIMIT_S = 300.0


class Requests:
    """Records what is sent, received and dropped; each answer is its number."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.released = threading.Event()
        self.released.set()

    @property
    def in_flight(self) -> int:
        log = [*self.log]
        return sum(what == "sent" for what, _ in log) - sum(what == "received" for what, _ in log)

    def request(self, number: int, error: str = "") -> Callable[[], SentCall[int]]:
        def receive() -> int:
            self.released.wait(LIMIT_S)
            if error == "receive":
                raise ValueError(f"no answer {number}")
            self.log.append(("received", number))
            return number

        def send() -> SentCall[int]:
            self.log.append(("sent", number))
            if error == "send":
                raise ValueError(f"not sent {number}")
            return SentCall(receive, lambda: self.log.append(("dropped", number)))

        return send


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "requests"]


@pytest.fixture
def requests() -> Requests:
    return Requests()


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[RequestThreads]:
    """Yield a pool of one thread."""
    monkeypatch.setattr(request_threads, "FIRST_THREADS", 1)
    made = RequestThreads("requests")
    yield made
    made.close()
    assert not threads()


def hold_thread(pool: RequestThreads) -> threading.Event:
    """Let the thread of a pool wait until an event is set, so that requests gather."""
    begun, released = threading.Event(), threading.Event()

    def wait() -> bool:
        begun.set()
        return released.wait(LIMIT_S)

    pool.request(lambda: SentCall(wait, bool))
    assert begun.wait(LIMIT_S)
    return released


def quicken(pool: RequestThreads, times: int) -> None:
    for _ in range(times):
        pool.quicken(is_near=True)


@pytest.mark.parametrize(
    ("quicker", "sent_before"),
    [(0, [1, 2, 3, 4, 5, 6, 7, 8]), (1, [2, 3, 4, 5, 6, 7, 8, 8]), (2, [4, 4, 6, 6, 8, 8, 8, 8])],
)
def test_requests_are_sent_while_others_are_in_flight(
    pool: RequestThreads, requests: Requests, quicker: int, sent_before: list[int]
) -> None:
    quicken(pool, quicker)
    released = hold_thread(pool)
    futures = [pool.request(requests.request(number)) for number in range(8)]
    released.set()
    assert [future.result(LIMIT_S) for future in futures] == [*range(8)]
    assert [number for what, number in requests.log if what == "received"] == [*range(8)]
    found = [requests.log.index(("received", number)) - number for number in range(8)]
    assert found == sent_before


def test_more_and_more_requests_are_in_flight_while_the_reader_waits(requests: Requests) -> None:
    pool, most = RequestThreads("requests"), request_threads.MAX_THREADS
    assert pool.request(requests.request(0)).result(LIMIT_S) == 0
    requests.released.clear()
    futures = [pool.request(requests.request(number)) for number in range(1, 500)]
    reader = threading.Thread(target=pool.await_answer, args=(futures[-1], lambda: False))
    reader.start()
    # 2 threads, each with a request; 2 more, each with at least 2; 4 with 4; and 8 with 8
    while len(threads()) < most or requests.in_flight < 2 + 4 + 16 + 64:
        time.sleep(0.001)
    assert requests.in_flight <= most * MAX_TOGETHER
    requests.released.set()
    reader.join(LIMIT_S)
    assert [future.result(LIMIT_S) for future in futures] == [*range(1, 500)]
    pool.close()


def test_a_reader_sends_no_more_requests_before_the_first_answer_of_a_store(requests: Requests) -> None:
    pool = RequestThreads("requests")
    requests.released.clear()
    futures = [pool.request(requests.request(number)) for number in range(50)]
    reader = threading.Thread(target=pool.await_answer, args=(futures[0], lambda: False))
    reader.start()
    reader.join(5 * request_threads.DOUBLING_S)
    assert reader.is_alive()
    assert requests.in_flight <= request_threads.FIRST_THREADS
    requests.released.set()
    reader.join(LIMIT_S)
    assert [future.result(LIMIT_S) for future in futures] == [*range(50)]
    pool.close()


def test_fewer_threads_have_fewer_requests_in_flight_after_a_store_has_refused_some(requests: Requests) -> None:
    pool, most = RequestThreads("requests"), request_threads.MAX_THREADS
    requests.released.clear()
    futures = [pool.request(requests.request(number)) for number in range(500)]
    while len(threads()) < most:
        pool.quicken(is_near=False)
    requests.released.set()
    assert [future.result(LIMIT_S) for future in futures] == [*range(500)]
    pool.quicken(is_near=False, allow=lambda _: 3)
    for _ in range(most):  # those that wait for a request take one before they end
        pool.request(requests.request(0)).result(LIMIT_S)
    while len(threads()) > 3:
        pool.request(requests.request(0)).result(LIMIT_S)
    requests.released.clear()
    futures = [pool.request(requests.request(number)) for number in range(100)]
    while requests.in_flight < 3:
        time.sleep(0.001)
    pool.quicken(is_near=False, allow=lambda _: 3)
    assert (requests.in_flight, len(threads())) == (3, 3)
    pool.quicken(is_near=False)
    while requests.in_flight < 3 + 3 * 2:  # those of three more threads
        time.sleep(0.001)
    requests.released.set()
    assert [future.result(LIMIT_S) for future in futures] == [*range(100)]
    pool.close()


def test_an_error_concerns_only_its_own_request(pool: RequestThreads, requests: Requests) -> None:
    quicken(pool, 3)
    released = hold_thread(pool)
    errors = {1: "send", 2: "receive"}
    futures = [pool.request(requests.request(number, errors.get(number, ""))) for number in range(4)]
    released.set()
    assert (futures[0].result(LIMIT_S), futures[3].result(LIMIT_S)) == (0, 3)
    for number, found in ((1, "not sent 1"), (2, "no answer 2")):
        with pytest.raises(ValueError, match=found):
            futures[number].result(LIMIT_S)


def test_closing_drops_what_was_sent_and_cancels_the_rest(
    pool: RequestThreads, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_threads, "GRACE_S", 0.0)
    requests.released.clear()
    quicken(pool, 1)
    released = hold_thread(pool)
    futures = [pool.request(requests.request(number)) for number in range(4)]
    released.set()
    while ("sent", 1) not in requests.log:
        time.sleep(0.001)
    pool.close()
    requests.released.set()
    assert futures[0].result(LIMIT_S) == 0  # the thread was waiting for it
    for future in futures[1:]:
        with pytest.raises(CancelledError):
            future.result(LIMIT_S)
    assert requests.log[2:] == [("received", 0), ("dropped", 1)]


def test_a_process_sends_at_most_32_requests_to_a_near_store_and_256_to_a_distant_one() -> None:
    first, most = request_threads.FIRST_THREADS, request_threads.MAX_THREADS
    assert (first, first * MAX_TOGETHER, most * MAX_TOGETHER) == (2, 32, 256)


@pytest.mark.parametrize("is_near", [True, False])
def test_the_number_of_threads_and_requests_has_a_limit(is_near: bool, requests: Requests) -> None:
    pool = RequestThreads("requests")
    requests.released.clear()
    for _ in range(20):
        pool.quicken(is_near=is_near)
    futures = [pool.request(requests.request(number)) for number in range(1000)]
    most = request_threads.FIRST_THREADS if is_near else request_threads.MAX_THREADS
    while len(threads()) < most:
        pool.quicken(is_near=is_near)  # starts threads for what waits
    assert len(threads()) == most
    assert len(requests.log) <= most * MAX_TOGETHER
    requests.released.set()
    assert [future.result(LIMIT_S) for future in futures] == [*range(1000)]
    assert len(threads()) == most
    pool.close()
