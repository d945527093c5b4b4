"""Calls in background threads: results, errors, and calls that are abandoned without waiting for them."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import CancelledError

import pytest

from wds_datapipes.io import daemon_threads
from wds_datapipes.io.daemon_threads import DaemonThreads

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


def test_a_call_submitted_while_the_pool_is_closed_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its result would be awaited forever."""

    class Queue(queue.Queue[object]):
        def put(self, item: object, *args: object, **options: object) -> None:
            if item is not None:
                pool.stop()  # as another thread may do now
            super().put(item)

    monkeypatch.setattr(queue, "SimpleQueue", Queue)
    pool = DaemonThreads(1, "calls")
    assert pool.submit(int).cancelled()
