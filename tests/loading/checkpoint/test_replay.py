"""Pipelines without a known position resume by replay: they repeat their items up to the last delivered one."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torchdata.datapipes.iter  # noqa: F401 - registers its stages
from data_parallel_pipelines import open_service
from error_facts import naming
from numbered_shards import key_of, numbered_shards
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.dataloader2 import DataLoader2
from users_stages import Unchanged

from wds_datapipes import ShardList, ShardReadingService, StatefulShards
from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import WorkerState, checkpoints_in, state_of
from wds_datapipes.pipes.state.replay import digest

Pipe = IterDataPipe[Any]


shards = numbered_shards([10] * 4)
loader_of = partial(open_service, seed=3)


class Drawn(Unchanged):
    """Draws from the generators of the process, which loaders seed in workers."""

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            yield item, random.random(), float(np.random.random()), float(torch.rand(()))


class Unseeded(Unchanged):
    """Yields an order that depends on the process, and not on the seeds of the loader."""

    def __iter__(self) -> Iterator[Any]:
        items = [*self.source]
        start = int(os.environ.get("START", "0"))
        yield from items[start:] + items[:start]


def samples() -> Any:
    pipe = ShardList("{0..3}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()
    return pipe.map(key_of)


def listed() -> Any:
    return IterableWrapper(range(40)).shuffle().sharding_filter()


def begun(pipe: Pipe, workers: int, count: int) -> tuple[dict[str, Any], list[Any]]:
    """Return the state after some items, and the items that follow."""
    with loader_of(pipe, workers) as loader:
        items = iter(loader)
        list(itertools.islice(items, count))
        return loader.state_dict(), list(items)


def through_json(text: dict[str, Any]) -> Any:
    return json.loads(json.dumps(text))


def test_one_line_names_the_stage_and_the_cost(caplog: pytest.LogCaptureFixture) -> None:
    state, _ = begun(samples().shuffle(), 2, 6)
    with caplog.at_level(logging.INFO, "wds_datapipes"), loader_of(samples().shuffle(), 2, state) as loader:
        list(loader)
    (line,) = [record.getMessage() for record in caplog.records if "replay" in record.getMessage()]
    assert line.startswith("Resuming by replay: 6 items are produced again. ")
    assert "Shuffler has no position in the shards" in line


def test_workers_draw_the_same_numbers_again() -> None:
    state, rest = begun(Drawn(samples()), 2, 9)
    with loader_of(Drawn(samples()), 2, through_json(state)) as loader:
        assert list(loader) == rest


@pytest.mark.parametrize("workers", [0, 1])
def test_different_items_are_an_error(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    state, _ = begun(Unseeded(samples()), workers, 6)
    monkeypatch.setenv("START", "1")
    with (
        loader_of(Unseeded(samples()), workers, state) as loader,
        pytest.raises(StateError, match=r"does not yield the same ones.* Item 3 of the epoch differs"),
    ):
        list(loader)


def test_fewer_items_are_an_error() -> None:
    (saved,) = checkpoints_in(begun(listed(), 0, 6)[0])
    parts = [WorkerState.of([{"replayed": 60, "digest": [0, 0]}])]
    state = state_of([replace(saved, parts=parts)])
    with loader_of(listed(), 0, state) as loader, pytest.raises(StateError, match=naming("40 items", 60)):
        list(loader)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_loaders_accept_states_of_each_other(workers: int) -> None:
    of_service, rest = begun(listed(), workers, 5)
    data = StatefulShards(listed(), seed=3)
    data.load_state_dict(through_json(of_service))
    items = data.tracked(DataLoader(data, batch_size=None, num_workers=workers))
    first = next(items)
    state = through_json(data.state_dict())
    assert [first, *items] == rest
    with loader_of(listed(), workers, state) as loader:
        assert [first, *loader] == rest


class Arrays(IterDataPipe[Any]):
    """Yields lists that contain an array, a tensor and a buffer."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(4):
            yield [np.full(3, number), torch.full((3,), number), bytearray([number] * 3)]


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_state_describes_the_item_as_it_was_yielded_even_if_the_loop_changes_it(part: int) -> None:
    saving, resumed = (DataLoader2(Arrays(), reading_service=ShardReadingService(1)) for _ in range(2))
    item = next(iter(saving))
    item[part][0] = 9
    resumed.load_state_dict(saving.state_dict())
    assert [[int(each[0]) for each in item] for item in resumed] == [[1] * 3, [2] * 3, [3] * 3]
    saving.shutdown()
    resumed.shutdown()


VALUES: list[Any] = [
    *(None, True, 1, 1.0, 1j, "", "1", b"", b"1", [], [1], (1,), {}, {"a": 1}, {"a": 2}, {"b": 1}),
    *(np.ones(1), np.ones((1, 1)), np.zeros(1), np.zeros(1, int), torch.zeros(1), torch.ones(1)),
]


@pytest.mark.parametrize(
    "around",
    [lambda value: value, lambda value: [0, value], lambda value: (0, value), lambda value: {"a": {"b": [value]}}],
    ids=["alone", "list", "tuple", "nested"],
)
def test_items_that_differ_in_one_value_have_different_digests(around: Any) -> None:
    digests = [digest(around(value)) for value in VALUES]
    assert digests == [digest(around(copy.deepcopy(value))) for value in VALUES]
    assert len(set(digests)) == len(VALUES)
