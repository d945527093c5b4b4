"""Processes that work on many shards, and how they end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes.parallel.map_shards import map_shards


def work(folder: str, url: str) -> str:
    Path(folder, str(os.getpid())).touch()
    threading.Event().wait(0.2 if url == "last" else 60)
    return url


def work_on_many(folder: str) -> None:
    for _ in map_shards(partial(work, folder), ["a", "b", "c"], executor=None, num_workers=2):
        pass


def until(condition: Any) -> bool:
    deadline = time.monotonic() + 300
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


@pytest.mark.usefixtures("nothing_left")
def test_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=work_on_many, args=(str(tmp_path),))
    process.start()
    assert until(lambda: len(os.listdir(tmp_path)) == 2)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    process.close()
    assert until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in os.listdir(tmp_path)))


@pytest.mark.usefixtures("nothing_left")
def test_processes_end_when_the_iteration_is_interrupted(tmp_path: Path) -> None:
    done = map_shards(partial(work, str(tmp_path)), ["last", "a", "b"], executor=None, num_workers=2)
    number, task = next(done)
    assert (number, task.result()) == (0, "last")
    done.close()
    assert multiprocessing.active_children() == []


class Refusing(Executor):
    """Accepts only one task."""

    def __init__(self) -> None:
        self.taken = 0

    def submit(self, *arguments: Any, **keywords: Any) -> Future[Any]:
        self.taken += 1
        if self.taken > 1:
            raise RuntimeError("closed")
        done: Future[Any] = Future()
        done.set_result("done")
        return done


def test_an_executor_that_accepts_no_more_is_reported_for_each_shard() -> None:
    found = dict(map_shards(partial(work, ""), ["a", "b", "c"], executor=Refusing(), num_workers=None))
    assert found[0].result() == "done"
    assert [str(found[number].exception()) for number in (1, 2)] == ["closed"] * 2
