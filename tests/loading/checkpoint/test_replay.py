"""Pipelines without a known position resume by replay: they repeat their items up to the last delivered one."""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchdata.datapipes.iter  # noqa: F401 - registers its stages
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.dataloader2 import DataLoader2
from users_stages import InMain

from wds_datapipes import ShardList, ShardReadingService, StatefulShards
from wds_datapipes.errors import StateError
from wds_datapipes.pipes.state.replay import digest_item
from wds_datapipes.testing import build_shard

Pipe = IterDataPipe[Any]


@pytest.fixture(autouse=True)
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for shard in range(4):
        build_shard(f"{shard}.tar", [{"__key__": f"{shard}-{n}", "cls": str(n)} for n in range(10)])


class Drawn(IterDataPipe[Any]):
    """Draws from the generators of the process, which loaders seed in workers."""

    def __init__(self, source: Pipe) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            yield item, random.random(), float(np.random.random()), float(torch.rand(()))


class Unseeded(IterDataPipe[Any]):
    """Yields an order that depends on the process, and not on the seeds of the loader."""

    def __init__(self, source: Pipe) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        items = [*self.source]
        start = int(os.environ.get("START", "0"))
        yield from items[start:] + items[:start]


def key_of(sample: Any) -> Any:
    return sample["__key__"]


def samples() -> Any:
    pipe = ShardList("{0..3}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()
    return pipe.map(key_of)


def listed() -> Any:
    return IterableWrapper(range(40)).shuffle().sharding_filter()


def loader_of(pipe: Pipe, workers: int, state: Any = None) -> Any:
    loader = DataLoader2(pipe, reading_service=ShardReadingService(workers))
    loader.seed(3)
    if state is not None:
        loader.reading_service.load_state_dict(state)
    return loader


def through_json(text: dict[str, str]) -> Any:
    return json.loads(json.dumps(text))


def test_one_line_names_the_stage_and_the_cost(caplog: pytest.LogCaptureFixture) -> None:
    with loader_of(samples().shuffle(), 2) as loader:
        epoch = iter(loader)
        list(itertools.islice(epoch, 6))
        state = loader.reading_service.state_dict()
    with caplog.at_level(logging.INFO, "wds_datapipes"), loader_of(samples().shuffle(), 2, state) as loader:
        list(loader)
    (line,) = [record.getMessage() for record in caplog.records if "replay" in record.getMessage()]
    assert line.startswith("Resuming by replay: 6 items are made again. ")
    assert "Shuffler has no position in the shards" in line


def test_workers_draw_the_same_numbers_again() -> None:
    with loader_of(Drawn(samples()), 2) as loader:
        items = iter(loader)
        list(itertools.islice(items, 9))
        state = through_json(loader.reading_service.state_dict())
        rest = list(items)
    with loader_of(Drawn(samples()), 2, state) as loader:
        assert list(loader) == rest


@pytest.mark.parametrize("workers", [0, 1])
def test_different_items_are_an_error(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with loader_of(Unseeded(samples()), workers) as loader:
        epoch = iter(loader)
        list(itertools.islice(epoch, 6))
        state = loader.reading_service.state_dict()
    monkeypatch.setenv("START", "1")
    with (
        loader_of(Unseeded(samples()), workers, state) as loader,
        pytest.raises(StateError, match=r"does not yield the same ones.* Item 5 of the epoch differs"),
    ):
        list(loader)


def test_fewer_items_are_an_error() -> None:
    with loader_of(listed(), 0) as loader:
        epoch = iter(loader)
        list(itertools.islice(epoch, 6))
        state = loader.reading_service.state_dict()
    state = {key: text.replace('"replayed":6', '"replayed":60') for key, text in state.items()}
    with (
        loader_of(listed(), 0, state) as loader,
        pytest.raises(StateError, match="The epoch has 40 items now, and had at least 60"),
    ):
        list(loader)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_loaders_accept_states_of_each_other(workers: int) -> None:
    with loader_of(listed(), workers) as loader:
        items = iter(loader)
        list(itertools.islice(items, 5))
        of_service, rest = loader.reading_service.state_dict(), list(items)
    data = StatefulShards(listed(), seed=3)
    data.load_state_dict(through_json(of_service))
    items = data.tracked(DataLoader(data, batch_size=None, num_workers=workers))
    first = next(items)
    state = through_json(data.state_dict())
    assert [first, *items] == rest
    with loader_of(listed(), workers, state) as loader:
        assert [first, *loader] == rest


def test_a_state_of_another_process_is_an_error() -> None:
    """Those of the main process count the items of all workers, and those of workers their own."""
    with loader_of(listed(), 1) as loader:
        next(iter(loader))
        of_worker = loader.reading_service.state_dict()
    with loader_of(InMain(listed()).shuffle(), 1) as loader:
        next(iter(loader))
        of_all = loader.reading_service.state_dict()
    with pytest.raises(StateError, match="state of ShardReadingService"):
        StatefulShards(InMain(listed()).shuffle(), seed=3).load_state_dict(of_all)
    changed = json.loads(of_all["wds_datapipes"])
    changed["ranks"][0]["stages"] = json.loads(of_worker["wds_datapipes"])["ranks"][0]["stages"]
    state = {"wds_datapipes": json.dumps(changed)}
    with loader_of(listed(), 1, state) as loader, pytest.raises(StateError, match="each worker replays its own"):
        list(loader)


@pytest.mark.parametrize("begun", [-1, 0, 1])
def test_a_pipeline_of_torchdata_is_checkpointed_as_in_its_own_test(begun: int) -> None:
    """As ``test_initial_epoch_checkpointing``, with shuffles in the workers and in the main process."""

    def new() -> Any:
        pipe: Any = InMain(IterableWrapper(range(20)).shuffle().sharding_filter())
        return DataLoader2(pipe.shuffle(), reading_service=ShardReadingService(num_workers=2))

    loader, restored = new(), new()
    loader.seed(1)
    state = loader.state_dict() if begun < 0 else None
    items = iter(loader)
    head = [next(items) for _ in range(begun)]
    restored.load_state_dict(state or loader.state_dict())
    rest = list(items)
    assert sorted([*head, *rest]) == [*range(20)]
    assert list(restored) == rest
    loader.shutdown()
    restored.shutdown()


@pytest.mark.parametrize(
    "item",
    [
        1,
        2.5,
        None,
        "text",
        b"bytes",
        (1, 2),
        [1, [2]],
        {"a": torch.arange(3)},
        {"a": torch.arange(3.0)},
        torch.zeros(2, 3, dtype=torch.bfloat16),
        torch.zeros(3).to_sparse(),
        bytearray(3000),
        "x" * 3000,
        [*range(1000)],
    ],
)
def test_a_digest_depends_on_the_value(item: Any) -> None:
    number = digest_item(item)
    assert 0 <= number < 1 << 63
    assert digest_item(item) == number
    assert digest_item([item]) != number


class Arrays(IterDataPipe[Any]):
    """Yields lists of an array, a tensor and a buffer of bytes."""

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


def test_digests_of_arrays_depend_on_both_ends_in_any_memory_layout() -> None:
    array = np.arange(600).reshape(20, 30)
    changed = array.copy()
    changed[-1, -1] = 0
    number = digest_item(array)
    assert digest_item(np.asfortranarray(array)) == number
    assert digest_item(changed) != number
    assert digest_item(np.array([1, "a"], object)) == digest_item(np.array([1, "a"], object))
    assert digest_item(np.array([1, "a"], object)) != digest_item(np.array([1, "b"], object))
