"""`StatefulShards` under torchdata's ``StatefulDataLoader``, and under torch's ``DataLoader``."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from loader_kinds import Tracked, items_of
from pipeline_table import EXACT, STREAMS, all_keys, key_of, shards_of
from torch.utils.data import DataLoader, IterDataPipe
from torchdata.dataloader2 import DataLoader2
from torchdata.stateful_dataloader import StatefulDataLoader

from wds_datapipes import ShardList, ShardReadingService, Stage, StatefulShards
from wds_datapipes.errors import StateError

KEYS = all_keys(2)


shards = shards_of(2)
pipeline = EXACT["keys"]


def loader_of(workers: int, *, persistent: bool = False) -> StatefulDataLoader[Any]:
    # A list of keys is not collated to a tensor.
    return StatefulDataLoader(
        StatefulShards(pipeline()),
        batch_size=3,
        num_workers=workers,
        collate_fn=list,
        persistent_workers=persistent,
        multiprocessing_context="fork" if workers else None,
    )


def keys_of(batches: list[list[str]]) -> list[str]:
    return sorted(key for batch in batches for key in batch)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_all_workers_start_the_next_epoch_after_an_interrupted_loop(workers: int, persistent: bool) -> None:
    loader = loader_of(workers, persistent=persistent and workers > 0)
    for _ in range(3):
        next(iter(loader))
    assert keys_of(list(loader)) == KEYS


def test_an_epoch_of_the_dataset_draws_nothing_in_the_main_process() -> None:
    before = torch.get_rng_state()
    assert sorted(StatefulShards(pipeline())) == KEYS
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_that_one_worker_cannot_resume_is_refused() -> None:
    loader = loader_of(1)
    next(iter(loader))
    state = loader.state_dict()
    worker = state["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"]
    with pytest.raises(StateError, match="only the same worker"):
        StatefulShards(pipeline()).load_state_dict(worker)


def test_a_pipeline_without_a_state_is_refused() -> None:
    with pytest.raises(StateError, match="Shuffler has no position in the shards"):
        StatefulShards(pipeline().shuffle().with_epoch(9))
    with pytest.raises(ValueError, match="epoch must be at least 0, not -1"):
        StatefulShards(pipeline()).set_epoch(-1)


class FirstFour(Stage[Any]):
    """A user's stage that skips iterating its source when it needs nothing from it."""

    def __init__(self, source: IterDataPipe[Any]) -> None:
        self.source = source
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.count = state.get("count", 0)

    def __iter__(self) -> Iterator[Any]:
        if self.count < 4:
            for item in itertools.islice(self.source, 4 - self.count):
                self.count += 1
                yield item
        self.count = 0


def test_a_state_unused_by_any_stage_is_discarded_with_its_epoch() -> None:

    def new() -> IterDataPipe[Any]:
        gathered = ShardList("{0..4}.tar").sharding_filter().load_wds_shards().group_samples()
        return FirstFour(gathered.map(key_of))

    loader = StatefulDataLoader(StatefulShards(new()), batch_size=None)
    whole = list(loader)
    assert len(list(itertools.islice(loader, 4))) == 4
    state = loader.state_dict()
    loader = StatefulDataLoader(StatefulShards(new()), batch_size=None)
    loader.load_state_dict(state)
    assert [list(loader), list(loader)] == [[], whole]
    other: DataLoader2[Any] = DataLoader2(new(), reading_service=ShardReadingService(0))
    other.seed(0)
    other.reading_service.load_state_dict(state)
    with other:
        assert [list(other), list(other)] == [[], whole]


def pickled(data: Any) -> Any:
    return pickle.loads(pickle.dumps(data))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_the_workers_of_a_copy_begin_one_epoch_after_another(copied: Callable[[Any], Any]) -> None:
    run = Tracked(pipeline, 2)
    data = copied(StatefulShards(pipeline(), seed=run.data.seed))
    loader = DataLoader(data, batch_size=None, num_workers=2)
    assert [list(loader), list(loader)] == [items_of(run.epoch()), items_of(run.epoch())]


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_was_read_before_begins_anew(name: str) -> None:
    pipe = STREAMS[name]()
    next(iter(pipe))
    run, expected = Tracked(lambda: pipe, 0), Tracked(STREAMS[name], 0)
    for _ in range(2):
        assert items_of(run.epoch()) == items_of(expected.epoch())


def test_a_position_that_another_loop_has_moved_is_refused() -> None:
    pipe = pipeline()
    data, other = StatefulShards(pipe), StatefulShards(pipe.map(str))
    items = iter(data)
    next(items)
    data.state_dict()
    list(other)
    with pytest.raises(StateError, match="Build a pipeline of its own for each dataset"):
        data.state_dict()
    assert sorted(data) == KEYS
    state, following = data.state_dict(), list(other)
    data.load_state_dict(state)  # between two epochs, there is no position to lose
    assert sorted(data) == sorted(following)


def test_a_stream_that_another_loop_has_continued_is_refused() -> None:
    pipe = STREAMS["batches"]()
    data = StatefulShards(pipe)
    list(data)
    next(iter(pipe))
    for use in (data.state_dict, lambda: next(iter(data))):
        with pytest.raises(StateError, match="Build a pipeline of its own for each dataset"):
            use()
