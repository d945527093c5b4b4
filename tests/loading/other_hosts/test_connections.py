"""The connection of the training process to its workers and to the cluster, which may end at any time."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from error_facts import naming
from loader_kinds import items_of
from ray_hosts import FOLDERS, LIMIT_S, Hosts, Remote, keys, kill, running_hosts, write_shards

from wds_datapipes.errors import WorkerTimeoutError
from wds_datapipes.loading import other_hosts
from wds_datapipes.loading.transport.flow_control import CALLS_AHEAD, MAX_TOGETHER
from wds_datapipes.loading.workers import actor_connection, connection
from wds_datapipes.loading.workers.actor_connection import START_S, ActorConnection

cluster, hosts = running_hosts()
SHARDS, SAMPLES = 4, 30


@pytest.fixture(autouse=True)
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_shards(SHARDS, SAMPLES)


#: A program that disconnects from the cluster while a loader runs, may connect again, and continues to iterate.
LEAVING = """
import json, os
import ray
from torchdata.dataloader2 import DataLoader2
from pipeline_table import as_it_is
from ray_hosts import FOLDERS, keys
from wds_datapipes import RayReadingService

def connect():
    environment = {{"env_vars": {{"PYTHONPATH": os.pathsep.join(map(str, FOLDERS))}}}}
    ray.init(address={address!r}, log_to_driver=False, configure_logging=False, runtime_env=environment)

found = []
for joins, goes_on in ((False, False), (False, True), (True, True), (True, False)):
    connect()
    loader = DataLoader2(keys({shards}), reading_service=RayReadingService(2))
    items = iter(loader)
    next(items)
    ray.shutdown()
    if joins:
        connect()
    message = ""
    try:
        rest = [*items] if goes_on else []
    except RuntimeError as error:
        message = str(error)
    for _ in range(2):
        loader.shutdown()
    found.append([message, loader.reading_service.report().total.received, ray.is_initialized()])
    ray.shutdown()
print(json.dumps(found))
"""


def test_a_process_that_leaves_the_cluster_starts_no_other_one(hosts: Hosts) -> None:
    """Functions of Ray do so in a process that has left."""
    program = LEAVING.format(address=hosts.cluster.address, shards=SHARDS)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, FOLDERS))}
    text = subprocess.run([sys.executable, "-W", "ignore", "-c", program], env=environ, stdout=subprocess.PIPE).stdout
    (still, *_), (left, *_), (joined, *_), _ = found = json.loads(text)
    assert not still
    for message in (left, joined):
        assert "ray.shutdown()" in message
        assert "Worker 1" in message
    assert [facts for _, *facts in found] == [[1, False], [1, False], [1, True], [1, True]]


def test_a_process_without_a_cluster_says_how_to_join_one(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts.ray, "is_initialized", lambda: False)
    with closing(Remote(partial(keys, SHARDS), 1)) as run, pytest.raises(RuntimeError, match=naming("ray.init(")):
        run.epoch()


class Clock:
    """A clock for the connections to workers, which tests set forward, and which may gain time whenever it is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gains_s: float = 0.0) -> None:
        self.ahead_s, self.gains_s = 0.0, gains_s
        for module in (connection, actor_connection):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        self.ahead_s += self.gains_s
        return time.monotonic() + self.ahead_s


def replace_starts(monkeypatch: pytest.MonkeyPatch, again: Callable[[Callable[[int], Any], int], Any]) -> None:
    """Let a function start the actors that replace others; it is passed what starts one, and its argument."""

    class Connection(ActorConnection):
        def __init__(self, name: str, start: Callable[[int], Any], *limits: Any) -> None:
            super().__init__(name, lambda alone: again(start, alone) if alone else start(alone), *limits)

    monkeypatch.setattr(other_hosts, "ActorConnection", Connection)


def test_a_restart_has_the_whole_time_limit(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop has waited for most of the limit when a host dies, and its successor takes as long to start."""
    write_shards(SHARDS, samples := 2 * CALLS_AHEAD * MAX_TOGETHER)  # some are not in flight
    clock = Clock(monkeypatch)

    def start_late(start: Callable[[int], Any], alone: int) -> Any:
        clock.ahead_s += 900.0
        actor = start(alone)
        clock.ahead_s += 900.0
        return actor

    replace_starts(monkeypatch, start_late)
    with closing(Remote(partial(keys, SHARDS), 1, restart=True, timeout_s=1000.0)) as run:
        items = run.epoch()
        head = items_of(items, 7)
        kill(hosts.actors()[0])
        assert len(head + items_of(items)) == SHARDS * samples
        assert clock.ahead_s == 1800.0
        items = run.epoch()
        clock.ahead_s += 5000.0
        assert items_of(items)


def test_a_worker_that_does_not_start_is_logged_once(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Clock(monkeypatch, gains_s=START_S / 4)
    options = {"resources": {"nowhere": 1}}
    with (
        closing(Remote(partial(keys, SHARDS), 1, timeout_s=5 * START_S, worker_options=options)) as run,
        caplog.at_level(logging.WARNING, "wds_datapipes"),
        pytest.raises(WorkerTimeoutError, match=naming("Worker 0", "has not started", "worker_options")),
    ):
        next(run.epoch())
    [message] = [text for text in caplog.messages if "has not started" in text]
    for fact in ("Worker 0", f"{START_S:g} s", "worker_options", "ray status"):
        assert fact in message


def test_a_loader_that_ends_while_a_worker_is_replaced_leaves_nothing(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread ends it at the moment when the new actor exists, but is not known yet."""
    write_shards(SHARDS, 2 * CALLS_AHEAD * MAX_TOGETHER)  # some are not in flight
    run = Remote(partial(keys, SHARDS), 1, restart=True)

    def start_and_end(start: Callable[[int], Any], alone: int) -> Any:
        actor = start(alone)
        other = threading.Thread(target=run.close)
        other.start()
        other.join(LIMIT_S)
        return actor

    replace_starts(monkeypatch, start_and_end)
    items = run.epoch()
    next(items)
    kill(hosts.actors()[0])
    with pytest.raises(RuntimeError, match="Worker 0 was shut down during a read"):
        items_of(items)
    hosts.await_idle()
