"""A run whose data change in the middle has the same items, states and steps on other hosts as on local workers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import pytest
from loader_kinds import Service
from numbered_shards import key_of, numbered_shards
from ray_hosts import Hosts, Remote, kill, running_hosts
from sweeps import WHOLE

from wds_datapipes import IndexedSamples, ShardList, explain
from wds_datapipes.index import EpochOptions

cluster, hosts = running_hosts()
SIZES = [7, 5, 9, 6, 8, 3]
shards = numbered_shards(SIZES)

Batches = list[list[str]]


class Restarted(Remote):
    """The same, whose workers die again and again, and are replaced."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, restart=True)


def is_even(key: str) -> bool:
    return int(key.split("-")[1]) % 2 == 0


def marked(key: str) -> str:
    return f"{key}!"


def stream(urls: str = "{0..5}.tar") -> Any:
    return ShardList(urls).shuffle().sharding_filter().load_wds_shards().group_samples().shuffle_samples(5)


def logged(batch: int) -> Any:
    return stream().log_samples(first=0, positions="log").map(key_of).batch(batch)


def indexed(batch: int = 4, exclude: Sequence[str] | None = None, shards: Any = "{0..3}.tar", **options: Any) -> Any:
    epoch = EpochOptions(exclude=exclude)
    return IndexedSamples(shards, global_batch_size=batch, epoch=epoch, **options).map(key_of).batch(batch)


NAMED = {"a": "{0..2}.tar", "b": "{3..5}.tar"}

#: The pipelines of a run, one after the other, and whether its steps are known.
CHANGES: dict[str, tuple[list[Callable[[], Any]], bool]] = {
    "functions and filters of a stream": (
        [lambda: stream().map(key_of).batch(3), lambda: stream().map(key_of).filter(is_even).map(marked).batch(2)],
        False,
    ),
    "excluded samples": (
        [lambda: indexed(exclude=["0-3", "2-1"]), lambda: indexed(exclude=["0-3", "2-1", "3-0", "1-2", "2-7"])],
        True,
    ),
    "batches of another size": ([lambda: indexed(), lambda: indexed(6), lambda: indexed(2)], True),
    "the log of a stream": ([lambda: logged(3), lambda: logged(3).map(list)], True),
    "weights": (
        [
            lambda: indexed(shards=NAMED, weights={"a": 3, "b": 1}),
            lambda: indexed(shards=NAMED, weights={"a": 1, "b": 2}),
        ],
        True,
    ),
    "another dataset": (
        [
            lambda: indexed(shards={"a": NAMED["a"]}, weights={"a": 1}),
            lambda: indexed(shards=NAMED, weights={"a": 1, "b": 1}),
        ],
        True,
    ),
}

#: The loaders that run the pipelines in turn.
COURSES: list[list[Any]] = [[Service, Remote], [Remote, Service], [Remote, Remote], [Service, Restarted]]

#: How many batches the loop takes in each epoch of a pipeline: it leaves some epochs early.
TAKES: list[list[int | None]] = [[None, 3], [None, 1, 2], [2]]


def run(builds: Sequence[Callable[[], Any]], kinds: Sequence[Any], hosts: Hosts) -> tuple[list[Any], Batches]:
    """Return the state at the end of each pipeline, and all batches."""
    shutil.rmtree("log", ignore_errors=True)
    states, batches = list[Any](), Batches()
    for number, build in enumerate(builds):
        kind = kinds[number % len(kinds)]
        with closing(kind(build, 2)) as loop:
            if states:
                loop.loader.load_state_dict(states[-1], amend=True)
            for take in TAKES[number]:
                for batch in islice(loop.epoch(), take):
                    batches.append(batch)
                    if kind is Restarted and len(batches) % 3 == 0:
                        for actor in hosts.actors()[:1]:  # unless both were killed and no item was missed yet
                            kill(actor)
            states.append(loop.state())
    return states, batches


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        (name, kinds)
        for number, name in enumerate(CHANGES)
        for kinds in (COURSES if WHOLE else [COURSES[number % len(COURSES)]])
    ],
)
def test_a_changed_run_has_the_items_states_and_steps_of_local_workers(
    hosts: Hosts, name: str, kinds: list[Any]
) -> None:
    builds, has_steps = CHANGES[name]
    states, batches = run(builds, kinds, hosts)
    if has_steps:
        steps = [explain(builds[-1](), states[-1], step) for step in range(len(batches))]
        assert [[sample.key for sample in step] for step in steps] == batches
    assert (states, batches) == run(builds, [Service], hosts)
