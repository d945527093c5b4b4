"""Workers and hosts that die: an error that says where, or each item once, in order, with ``restart=``."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from error_facts import naming
from loader_kinds import Service, items_of
from pipeline_table import REFUSED, key_of, refused
from ray_hosts import (
    LIMIT_S,
    Hosts,
    Remote,
    arrays,
    drawn,
    failing,
    keys,
    kill,
    poisoned,
    replayed,
    running_hosts,
    samples,
    stream,
    write_shards,
)
from sweeps import WHOLE

from wds_datapipes.errors import StateError, WorkerDiedError
from wds_datapipes.loading.transport.flow_control import CALLS_AHEAD, MAX_TOGETHER

cluster, hosts = running_hosts()
HOST = socket.gethostname()
SHARDS, SAMPLES = 6, 60
#: How many workers and hosts die in one run.
KILLS = 40 if WHOLE else 5
NEAR_A = {"resources": {"a": 1}}


@pytest.fixture(autouse=True)
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_shards(SHARDS, SAMPLES)


def epochs_of(kind: Any, build: Callable[[], Any], count: int = 2) -> list[list[Any]]:
    with closing(kind(build, 2)) as run:
        return [items_of(run.epoch()) for _ in range(count)]


def test_a_dead_worker_is_an_error_that_says_where_and_the_state_resumes(hosts: Hosts) -> None:
    build = partial(keys, SHARDS)
    whole = epochs_of(Service, build)
    with closing(Remote(build, 2)) as run:
        items = run.epoch()
        head = items_of(items, 9)
        state = run.state()
        victim = run.loader.reading_service.report().workers[1]
        kill(psutil.Process(victim.pid))
        where = naming(f"Worker 1 on host {HOST} (pid {victim.pid}) has died", victim.shard)
        with pytest.raises(WorkerDiedError, match=where):
            head.extend(rest_of(items, run))
    assert head == (whole[0] + whole[1])[: len(head)]
    with closing(Remote(build, 2, state)) as run:
        assert items_of(run.epoch()) == whole[0][9:]


def rest_of(items: Iterator[Any], run: Remote) -> Iterator[Any]:
    """Yield the rest of an epoch and the next one, because all items of the first may have been sent."""
    yield from items
    yield from run.epoch()


def disturbed(run: Remote, hosts: Hosts, rng: Random, kills: set[int], epochs: int) -> Iterator[list[Any]]:
    """Read epochs, while workers and hosts die after some items."""
    number = 0
    for _ in range(epochs):
        found = []
        for item in run.epoch():
            found += items_of(iter([item]))
            number += 1
            if number in kills:
                if rng.random() < 0.3:
                    name = rng.choice("ab")
                    hosts.kill(name)
                    hosts.start()
                elif actors := hosts.actors():
                    kill(rng.choice(actors))
        yield found


@pytest.mark.timeout(7200 if WHOLE else 600)
@pytest.mark.parametrize("build", [keys, drawn, arrays, stream, replayed] if WHOLE else [drawn, arrays, stream])
def test_each_item_comes_once_and_in_order_while_workers_and_hosts_die(hosts: Hosts, build: Any) -> None:
    rng, epochs = Random(build.__name__), 3 if not WHOLE else 20
    whole = epochs_of(Service, partial(build, SHARDS), epochs)
    kills = {*rng.sample(range(1, sum(map(len, whole))), KILLS)}
    with closing(Remote(partial(build, SHARDS), 2, restart=True)) as run:
        assert [*disturbed(run, hosts, rng, kills, epochs)] == whole
        report = run.loader.reading_service.report()
        assert report.total.received == sum(map(len, whole))


@pytest.mark.parametrize("build", [keys, stream])
def test_a_state_after_a_restart_resumes(hosts: Hosts, build: Any) -> None:
    """States in the middle of messages of the dead actor and of the new one are those of local workers."""
    states: list[list[Any]] = []
    kinds: list[tuple[Any, dict[str, Any]]] = [(Service, {}), (Remote, {"restart": True, "worker_options": NEAR_A})]
    for kind, options in kinds:
        states.append([])
        with closing(kind(partial(build, SHARDS), 2, **options)) as run:
            for epoch in range(2):
                for number, _ in enumerate(run.epoch()):
                    if options and number == 13 and not epoch:
                        hosts.kill("a")
                        hosts.start()
                    if number % 10 == 7:
                        states[-1].append(run.state())
    assert states[0] == states[1]


@pytest.mark.parametrize("build", [keys, stream])
def test_workers_that_die_between_epochs_or_before_the_first_item_are_replaced(hosts: Hosts, build: Any) -> None:
    whole = epochs_of(Service, partial(build, SHARDS), 3)
    with closing(Remote(partial(build, SHARDS), 2, restart=True)) as run:
        for number, epoch in enumerate(whole):
            items = run.epoch()
            if number == 0:
                hosts.kill("a")
                hosts.start()
            assert items_of(items) == epoch
            for actor in hosts.actors():
                kill(actor)


def test_a_worker_that_dies_again_and_again_at_one_item_is_an_error(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        closing(Remote(lambda: keys(SHARDS).map(poisoned), 2, restart=True)) as run,
        caplog.at_level(logging.WARNING, "wds_datapipes"),
        pytest.raises(WorkerDiedError, match=naming("has died 3 times before the same item")),
    ):
        items_of(run.epoch())
    # The first actors may have died with other items in their last messages, which the next one has sent again.
    deaths = [text for text in caplog.messages if "Another actor continues" in text]
    assert len(deaths) >= 2
    assert f"on host {HOST}" in deaths[0]


def test_all_workers_of_a_host_that_dies_start_again_at_the_same_time(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    """Another host joins once all have been replaced, while the loop waits for the first one and needs no other."""
    write_shards(SHARDS, 2 * CALLS_AHEAD * MAX_TOGETHER)  # some are not in flight
    build, workers = partial(keys, SHARDS), 4
    with closing(Service(build, workers)) as run:
        whole = items_of(run.epoch())
    with (
        closing(Remote(build, workers, restart=True, worker_options=NEAR_A)) as run,
        caplog.at_level(logging.WARNING, "wds_datapipes"),
    ):
        items = run.epoch()
        found = items_of(items, 2 * workers)
        actors = hosts.actors()
        hosts.kill("a")
        for actor in actors:  # they would otherwise keep running
            kill(actor)
        loop = threading.Thread(target=lambda: found.extend(items))
        loop.start()
        deadline = time.monotonic() + LIMIT_S
        while len(replaced := names_of_replaced(caplog)) < workers and time.monotonic() < deadline:
            time.sleep(0.1)
        hosts.start()
        loop.join()
    assert replaced == {f"Worker {number}" for number in range(workers)}
    assert found == whole


def names_of_replaced(caplog: pytest.LogCaptureFixture) -> set[str]:
    """Return the names of the workers that others have replaced."""
    return {text[: len("Worker 0")] for text in caplog.messages if "Another actor" in text}


def test_a_worker_without_items_may_die_in_each_epoch(hosts: Hosts) -> None:
    """Its limit of deaths in succession is one for the same item."""
    whole = epochs_of(Service, partial(keys, 1), 5)
    with closing(Remote(partial(keys, 1), 2, restart=True)) as run:
        for epoch in whole:
            assert items_of(run.epoch()) == epoch
            for actor in hosts.actors():
                kill(actor)


def epochs_with_a_kill(run: Remote, hosts: Hosts) -> Iterator[Any]:
    while True:
        yield from run.epoch()
        kill(hosts.actors()[0])


def skipping(shards: int) -> Any:
    return samples(shards).map_samples(refused, on_error="skip").map(key_of)


def skipping_replayed(shards: int) -> Any:
    return skipping(shards).batch(3).unbatch()


@pytest.mark.parametrize("build", [skipping, skipping_replayed])
def test_skipped_items_are_counted_once_although_workers_die(hosts: Hosts, build: Any) -> None:
    """A worker that replays an epoch skips them again."""
    write_shards(SHARDS, count := 2 * CALLS_AHEAD * MAX_TOGETHER)  # some are not in flight
    with closing(Remote(partial(build, SHARDS), 1, restart=True)) as run:
        totals = [0]
        for _ in range(2):
            items = run.epoch()
            for _ in range(2):
                items_of(items, count)  # more than are in flight
                kill(hosts.actors()[0])
                totals.append(run.loader.reading_service.report().total.skipped.total)
            items_of(items)
            totals.append(run.loader.reading_service.report().total.skipped.total)
    assert totals == sorted(totals)
    refused_in_shard = len(range(1, count, 3))
    assert totals[3::3] == [SHARDS * refused_in_shard, 2 * SHARDS * refused_in_shard]


def test_the_number_of_restarts_is_limited(hosts: Hosts) -> None:
    with (
        closing(Remote(partial(keys, SHARDS), 1, restart=1)) as run,
        pytest.raises(WorkerDiedError, match=naming("restart= allows 1 restart of each worker")),
    ):
        items_of(epochs_with_a_kill(run, hosts))


@pytest.mark.parametrize("name", REFUSED)
def test_a_pipeline_that_cannot_be_restarted_is_an_error_at_the_start(hosts: Hosts, name: str) -> None:
    build, reason = REFUSED[name]
    with closing(Remote(build, 2, restart=True)) as run, pytest.raises(StateError, match=f"restart=True .*{reason}"):
        run.epoch()


def test_an_error_of_the_pipeline_names_the_host_and_restarts_nothing(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    build = partial(failing, SHARDS)
    with closing(Service(build, 2)) as run:
        local = until_error(run.epoch())
    with closing(Remote(build, 2, restart=True)) as run:
        remote = until_error(run.epoch())
        assert remote[0] == local[0]
        assert isinstance(remote[1], ValueError)
        assert f"on host {HOST}, whose last shard was" in str(remote[1])
        assert "the sample 2-17 is odd" in str(remote[1])
        assert not [text for text in caplog.messages if "Another actor" in text]


def until_error(items: Iterator[Any]) -> tuple[list[Any], Exception]:
    found: list[Any] = []
    try:
        found.extend(items)
    except ValueError as error:
        return found, error
    raise AssertionError(f"no error after {len(found)} items")
