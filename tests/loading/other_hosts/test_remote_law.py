"""The order and the states of workers on other hosts are those of as many local workers."""

from __future__ import annotations

import itertools
from contextlib import closing
from typing import Any

import pytest
import torchdata.datapipes.iter  # noqa: F401 - registers its stages
from loader_kinds import Service, Tracked, comparable, items_of
from pipeline_table import EXACT, IN_MAIN, REFUSED, REPLAYED, SIZES, STREAMS, Build, shards_of
from ray_hosts import Hosts, Remote, running_hosts
from sweeps import WHOLE

from wds_datapipes import merge_states
from wds_datapipes.errors import StateError

cluster, hosts = running_hosts()
shards = shards_of()
pytestmark = pytest.mark.usefixtures("hosts")

ALL: dict[str, Build] = {
    **EXACT,
    **REPLAYED,
    **IN_MAIN,
    **{f"stream: {name}": build for name, build in STREAMS.items()},
    **{f"refused: {name}": build for name, (build, _) in REFUSED.items()},
}


def course_of(run: Any) -> list[Any]:
    """Return the items of two epochs, with the states after some of them, and that at the end."""
    course = []
    for _ in range(2):
        for number, item in enumerate(run.epoch()):
            course.append((comparable(item), state_of(run) if number % 5 == 3 else None))
        course.append(("end", state_of(run)))
    return course


def state_of(run: Any) -> Any:
    try:
        return run.state()
    except StateError as error:
        return str(error)


@pytest.mark.parametrize("name", ALL if WHOLE else [*ALL][::3])
def test_the_order_and_the_states_are_those_of_local_workers(name: str) -> None:
    with closing(Service(ALL[name], 2)) as run:
        local = course_of(run)
    with closing(Remote(ALL[name], 2)) as run:
        assert course_of(run) == local


#: Loaders, with their numbers of workers: one that saves a state, and one that loads it.
EXCHANGES: list[tuple[Any, int, Any, int]] = [
    (Service, 2, Remote, 2),
    (Service, 2, Remote, 3),
    (Remote, 2, Service, 3),
    (Remote, 2, Service, 0),
    (Tracked, 2, Remote, 1),
    (Remote, 2, Tracked, 2),
    (Remote, 1, Remote, 2),
]


@pytest.mark.parametrize(
    ("name", "exchange"),
    [
        *itertools.product(["keys", "random buckets"], EXCHANGES),
        *itertools.product(["shards in turn", "indexed samples"], EXCHANGES[:3]),
        # These need as many workers as before.
        *itertools.product(["a stage with a state", "a cache on disk"], EXCHANGES[:1]),
    ],
)
def test_states_load_in_both_directions(name: str, exchange: tuple[Any, int, Any, int]) -> None:
    """The loader that loads a state yields what local workers yield that load it."""
    build, (saving, workers, loading, others) = {**EXACT, **REPLAYED}[name], exchange
    with closing(saving(build, workers)) as run:
        items_of(run.epoch())
        items_of(run.epoch(), 7)
        state = run.state()
    with closing(Service(build, others, state)) as run:
        expected = [items_of(run.epoch()) for _ in range(2)]
    with closing(loading(build, others, state)) as run:
        assert [items_of(run.epoch()) for _ in range(2)] == expected


def test_states_load_on_other_numbers_of_ranks() -> None:
    build, states, heads = EXACT["shards in lanes"], list[Any](), list[str]()
    for rank in range(2):
        with closing(Remote(build, 1, distributed=(rank, 2))) as run:
            heads += items_of(run.epoch(), 5)
            states.append(run.state())
    rests = []
    for kind in (Service, Remote):
        with closing(kind(build, 2, merge_states(states), distributed=(0, 1))) as run:
            rests.append(items_of(run.epoch()))
    assert rests[0] == rests[1]
    assert sorted(heads + rests[0]) == [f"{shard}-{n}" for shard, size in enumerate(SIZES[""]) for n in range(size)]


def test_a_new_epoch_begins_while_workers_are_ahead() -> None:
    """The loop leaves each epoch early, selects the next one by its number, and reads one in two parts."""
    found = []
    for kind in (Service, Remote):
        with closing(kind(EXACT["a shuffle of few bytes"], 2)) as run:
            items = [items_of(run.epoch(), cut) for cut in (0, 1, 4, 7)]
            run.loader.set_epoch(9)
            items.append(items_of(run.epoch()))
            found.append(items)
    assert found[0] == found[1]


def test_a_loader_restarts_from_a_state(hosts: Hosts) -> None:
    with closing(Remote(EXACT["keys"], 2)) as run:
        items = run.epoch()
        items_of(items, 5)
        state, rest = run.state(), items_of(items)
        run.loader.load_state_dict(state)
        assert items_of(run.epoch()) == rest
    hosts.await_idle()
