"""Calls in background threads: results, errors, and calls that are abandoned without waiting for them."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import CancelledError
from itertools import chain

import pytest

from wds_datapipes.io import daemon_threads
from wds_datapipes.io.daemon_threads import DaemonThreads
from wds_datapipes.io.remote.http_connection import Connection
from wds_datapipes.io.remote.request_steps import RequestThreads, Steps

LIMIT_S = 300.0


def test_calls_run_at_the_same_time_up_to_the_limit() -> None:
    threads, barrier = DaemonThreads(3, "calls"), threading.Barrier(3)
    futures = [threads.submit(lambda: barrier.wait(LIMIT_S)) for _ in range(9)]
    assert sorted(future.result(LIMIT_S) for future in futures) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    with pytest.raises(ValueError, match="its own"):
        threads.submit(lambda: int("its own")).result(LIMIT_S)
    threads.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "calls"]


def test_closing_cancels_what_has_not_begun_and_leaves_a_slow_call_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_threads, "GRACE_S", 0.0)
    threads, begun, released = DaemonThreads(1, "calls"), threading.Event(), threading.Event()

    def call() -> bool:
        begun.set()
        return released.wait(LIMIT_S) and threads.is_closed.is_set()

    slow, next_one = threads.submit(call), threads.submit(lambda: None)
    assert begun.wait(LIMIT_S)
    threads.close()
    for future in (next_one, threads.submit(lambda: None)):
        with pytest.raises(CancelledError):
            future.result(LIMIT_S)
    released.set()
    assert slow.result(LIMIT_S)


def test_requests_wait_in_one_thread_and_blocking_calls_run_in_others() -> None:
    threads, pairs, taken_by = RequestThreads(3, "calls"), [socket.socketpair() for _ in range(4)], dict[int, int]()
    connections = [Connection(own) for own, _ in pairs]

    def read(number: int, limit_s: float = LIMIT_S) -> Steps[bytes]:
        connections[number].limit(limit_s)
        if number == 3:
            yield None  # the rest does not block
        data = yield from connections[number].attempt(lambda: pairs[number][0].recv(1))
        if number == 1:
            yield None
        taken_by[number] = threading.get_ident()
        return data

    futures = [threads.submit_steps(read(number)) for number in range(4)]
    for number in (2, 0, 1, 3):  # the last one begins once another has ended
        pairs[number][1].send(b"x")
        assert futures[number].result(LIMIT_S) == b"x"
    assert taken_by[0] == taken_by[2] == taken_by[3] != taken_by[1]
    assert isinstance(threads.submit_steps(read(4)).exception(LIMIT_S), IndexError)
    waits = threads.submit_steps(read(0))
    assert isinstance(threads.submit_steps(read(2, 0.02)).exception(LIMIT_S), TimeoutError)  # nothing arrives
    threads.close()
    for future in (waits, threads.submit_steps(read(0))):
        with pytest.raises(CancelledError):
            future.result(LIMIT_S)
    for each in chain(*pairs):
        each.close()


class PoolOwner:
    """Calls one of its methods in its threads."""

    def __init__(self) -> None:
        self.threads = DaemonThreads(2, "calls")

    def work(self) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "calls"]


def test_threads_end_with_the_object_that_they_called() -> None:
    owner = PoolOwner()
    started = owner.threads.submit(owner.work).result(LIMIT_S)
    assert started
    del owner
    for thread in started:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_a_thread_may_close_its_own_pool() -> None:
    pool = DaemonThreads(1, "calls")
    pool.submit(int).result(LIMIT_S)  # the pool knows its thread
    pool.submit(pool.close).result(LIMIT_S)  # as garbage collection does if the last user of a pool is in a cycle
    assert pool.submit(int).cancelled()
