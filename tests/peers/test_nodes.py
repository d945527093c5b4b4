"""`PipelineNode` and `StatefulShards` with a release of torchdata that has nodes but no DataLoader2."""

from __future__ import annotations

import gc
import json
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torchdata.nodes as tn
from error_facts import naming
from numbered_shards import key_of, numbered_shards
from page_runs import PAGES_OF_PEERS, run_script
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from wds_datapipes import ShardList, StatefulShards, merge_states
from wds_datapipes.errors import StateError
from wds_datapipes.integrations.nodes import PipelineNode

#: The number of samples of an epoch.
SAMPLES = 30
#: Warnings of torch and torchdata about each other, and of Python about processes forked in threads.
pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated", "ignore:.*multi-threaded:DeprecationWarning"
)

State = dict[str, Any]


def fail_at_5(key: str) -> str:
    if key.endswith("5"):
        raise ValueError("this is 5")
    return key


def double(key: str) -> str:
    return 2 * key


shards = numbered_shards([5, 10, 7, 8])


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collect abandoned loaders in this thread: torchdata's threads cannot wait for themselves."""
    yield
    gc.collect()


def pipeline(shards: str = "{0..3}.tar") -> Any:
    pipe = ShardList(shards).shuffle().sharding_filter().load_wds_shards().group_samples()
    return pipe.shuffle_samples(4).map(key_of)


def node_of(shards: str = "{0..3}.tar", num_workers: int = 0, **options: Any) -> PipelineNode:
    return PipelineNode(pipeline(shards), seed=7, num_workers=num_workers, **options)


def mixed(criterion: str) -> Any:
    sources = {"left": node_of("{0..1}.tar"), "right": node_of("{2..3}.tar")}
    return tn.MultiNodeWeightedSampler(sources, {"left": 0.7, "right": 0.3}, stop_criteria=criterion, seed=3)


#: Programs with nodes, and the number of steps in their epochs.
GRAPHS: dict[str, Callable[[], Any]] = {
    "node": node_of,
    "two workers": lambda: node_of(num_workers=2),
    "Batcher": lambda: tn.Batcher(node_of(), batch_size=4, drop_last=False),
    "Unbatcher": lambda: tn.Unbatcher(tn.Batcher(node_of(), batch_size=4, drop_last=False)),
    "Mapper": lambda: tn.Mapper(node_of(), double),
    "ParallelMapper": lambda: tn.ParallelMapper(node_of(), double, num_workers=2),
    "processes": lambda: tn.ParallelMapper(node_of(), double, num_workers=1, method="process"),
    "Prefetcher of workers": lambda: tn.Prefetcher(node_of(num_workers=2), prefetch_factor=3),
    "rare snapshots": lambda: tn.Prefetcher(node_of(), prefetch_factor=3, snapshot_frequency=4),
    "first": lambda: mixed(tn.StopCriteria.FIRST_DATASET_EXHAUSTED),
    "all": lambda: mixed(tn.StopCriteria.ALL_DATASETS_EXHAUSTED),
    "cycle": lambda: mixed(tn.StopCriteria.CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED),
}


def epochs_after(loader: Any, count: int = 3) -> list[list[Any]]:
    return [list(loader) for _ in range(count)]


@pytest.mark.parametrize("name", GRAPHS)
def test_a_loader_of_nodes_resumes_with_the_rest_and_the_same_epochs(name: str) -> None:
    whole = epochs_after(tn.Loader(GRAPHS[name]()), 4)
    if name not in ("first", "cycle"):
        assert [sum(len(each) if name == "Batcher" else 1 for each in epoch) for epoch in whole] == [SAMPLES] * 4
    assert whole[0] != whole[1]
    length = len(whole[1])
    for cut in (0, 1, length // 3, length - 1, length):
        loader = tn.Loader(GRAPHS[name]())
        list(loader)
        items = iter(loader)
        head = list(islice(items, cut))
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        del items
        resumed = tn.Loader(GRAPHS[name]())
        resumed.load_state_dict(state)
        # torchdata begins the next epoch if no items are left.
        rest = [whole[1][cut:]] if cut < length else []
        assert head == whole[1][:cut]
        assert epochs_after(resumed, len(rest) + 2) == [*rest, *whole[2:4]], cut


@pytest.mark.parametrize("name", GRAPHS)
def test_a_loader_that_has_resumed_from_the_end_of_an_epoch_resumes_again(name: str) -> None:
    loader = tn.Loader(GRAPHS[name]())
    list(loader)
    for _ in range(2):
        state = loader.state_dict()
        loader = tn.Loader(GRAPHS[name]())
        loader.load_state_dict(state)
        items = iter(loader)
        list(islice(items, 3))
        state = loader.state_dict()
        rest = list(items)
        resumed = tn.Loader(GRAPHS[name]())
        resumed.load_state_dict(state)
        assert list(resumed) == rest


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_that_is_broken_off_is_over_even_before_the_next_one_has_an_item(num_workers: int) -> None:
    whole = epochs_after(tn.Loader(node_of(num_workers=num_workers)), 3)
    node = node_of(num_workers=num_workers)
    node.reset()
    assert [next(node) for _ in range(5)] == whole[0][:5]
    interrupted = node.state_dict()
    node.reset()
    state = node.state_dict()
    assert list(node) == whole[1]
    for loaded, expected in ((state, whole[1]), (interrupted, whole[0][5:])):
        other = node_of(num_workers=num_workers)
        other.reset(loaded)
        assert list(other) == expected
    other = node_of(num_workers=num_workers)
    other.reset(interrupted)
    other.reset()
    assert list(other) == whole[1]


def test_the_workers_of_an_abandoned_loader_end_by_themselves() -> None:
    loader: Any = tn.Loader(node_of(num_workers=2))
    next(iter(loader))
    workers = multiprocessing.active_children()
    del loader
    gc.collect()
    assert [worker.exitcode for worker in workers] == [0, 0]  # torch terminates those that it cannot reach


def test_an_error_does_not_end_the_epoch() -> None:
    node = PipelineNode(pipeline().map(fail_at_5), seed=7)
    with pytest.raises(ValueError, match="this is 5"):
        list(node)
    assert not node.state_dict()["is_exhausted"]
    with pytest.raises(ValueError, match="this is 5"):
        list(tn.Loader(tn.Prefetcher(PipelineNode(pipeline().map(fail_at_5), seed=7), prefetch_factor=2)))


def dataset(state: State | None = None) -> StatefulShards:
    data = StatefulShards(pipeline(), seed=7)
    if state is not None:
        data.load_state_dict(state)
    return data


def saved_by_tracked(cut: int) -> tuple[list[str], State]:
    data = dataset()
    items = data.tracked(DataLoader(data, batch_size=None, num_workers=2))
    return list(islice(items, cut)), data.state_dict()


def saved_by_stateful(cut: int) -> tuple[list[str], State]:
    loader: Any = StatefulDataLoader(dataset(), batch_size=None, num_workers=2)
    items = iter(loader)
    return list(islice(items, cut)), loader.state_dict()


def saved_by_nodes(cut: int) -> tuple[list[str], State]:
    loader: Any = tn.Loader(tn.Mapper(tn.Prefetcher(node_of(num_workers=2), prefetch_factor=3), str))
    items = iter(loader)
    return list(islice(items, cut)), loader.state_dict()


def resumed_by_tracked(state: State, num_workers: int = 2) -> list[str]:
    data = dataset(state)
    return list(data.tracked(DataLoader(data, batch_size=None, num_workers=num_workers)))


def resumed_by_stateful(state: State, num_workers: int = 2) -> list[str]:
    return list(StatefulDataLoader(dataset(state), batch_size=None, num_workers=num_workers))


def resumed_by_nodes(state: State, num_workers: int = 2) -> list[str]:
    node = node_of(num_workers=num_workers)
    node.data.load_state_dict(state)
    return list(tn.Loader(tn.Prefetcher(node, prefetch_factor=2)))


@pytest.mark.parametrize("save", [saved_by_tracked, saved_by_stateful, saved_by_nodes])
@pytest.mark.parametrize("resume", [resumed_by_tracked, resumed_by_stateful, resumed_by_nodes])
def test_each_loader_resumes_from_the_state_of_each(
    save: Callable[[int], tuple[list[str], State]], resume: Callable[..., list[str]]
) -> None:
    whole = resumed_by_tracked(dataset().state_dict())
    head, state = save(11)
    assert head + resume(state) == whole
    merged = merge_states([json.loads(json.dumps(state))])
    for num_workers in (0, 1):
        assert sorted(head + resume(merged, num_workers)) == sorted(whole)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_stateful_data_loader_of_this_release_resumes(num_workers: int) -> None:
    def loader_of() -> Any:
        return StatefulDataLoader(dataset(), batch_size=4, num_workers=num_workers, snapshot_every_n_steps=2)

    whole = epochs_after(loader_of(), 3)
    for cut in (0, 1, 4, len(whole[0])):
        loader = loader_of()
        items = iter(loader)
        assert list(islice(items, cut)) == whole[0][:cut]
        state = loader.state_dict()
        resumed = loader_of()
        resumed.load_state_dict(state)
        assert epochs_after(resumed, 2) == [whole[0][cut:], whole[1]], cut


def test_states_that_cannot_be_loaded_say_why() -> None:
    def state_after(node: Any, count: int = 3) -> State:
        loader: Any = tn.Loader(node)
        items = iter(loader)
        list(islice(items, count))
        state: State = loader.state_dict()
        return state

    for node in (
        tn.Prefetcher(node_of(), prefetch_factor=2, snapshot_frequency=4),
        tn.Unbatcher(tn.Batcher(node_of(), batch_size=4)),
    ):
        with pytest.raises(StateError, match=r"saved some items after .*snapshot_frequency=1, and without Unbatcher"):
            dataset(state_after(node))
    with pytest.raises(StateError, match=r"This is not the state of a loader, .*dataset_node_states"):
        dataset(state_after(mixed(tn.StopCriteria.ALL_DATASETS_EXHAUSTED)))
    with pytest.raises(StateError, match=naming("seed 7", "seed here is 8")):
        PipelineNode(pipeline(), seed=8).reset(node_of().state_dict())


@pytest.mark.parametrize("script", PAGES_OF_PEERS["nodes"])
def test_a_page_runs(script: str, tmp_path: Path) -> None:
    run_script(script, tmp_path)
