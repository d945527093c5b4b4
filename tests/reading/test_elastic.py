"""States that go on with another number of ranks or workers: every sample that is left comes exactly once."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed import destroy_process_group, init_process_group
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService, merge_states
from wds_datapipes.errors import StateError
from wds_datapipes.reading.elastic import deal_anew
from wds_datapipes.reading.resuming import Resumed
from wds_datapipes.reading.state import load_state, save_state
from wds_datapipes.testing import build_shard

SIZES = (7, 0, 13, 1, 9, 4, 11)
KEYS = sorted(f"{shard}-{number}" for shard, size in enumerate(SIZES) for number in range(size))


@pytest.fixture(autouse=True)
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for shard, size in enumerate(SIZES):
        samples = [
            {"__key__": f"{shard}-{number}", "cls": str(number), "txt": "x" * (137 * number % 1700)}
            for number in range(size)
        ]
        build_shard(f"{shard}.tar", samples)


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


def same(url: str) -> str:
    return url


def not_threefold(sample: dict[str, Any]) -> bool:
    return int(sample["cls"]) % 3 != 0


def pipeline(
    buffer_size: int = 5, *, filtered: bool = False, twice: bool = False, mapped: bool = False
) -> IterDataPipe[Any]:
    urls = ShardList("{0..6}.tar").shuffle().sharding_filter()
    urls = urls.map(same) if mapped else urls
    pipe: IterDataPipe[Any] = urls.load_wds_shards().group_samples().shuffle_samples(buffer_size)
    pipe = pipe.filter(not_threefold) if filtered else pipe
    pipe = pipe.shuffle_samples(3) if twice else pipe
    return pipe.map(key_of)


def instance(pipe: IterDataPipe[Any], ranks: int, workers: int, number: int) -> IterDataPipe[Any]:
    """Split a pipeline as services do, with one order of the shards for all."""
    apply_random_seed(pipe, torch.Generator().manual_seed(17))
    apply_sharding(pipe, ranks, number // workers, SHARDING_PRIORITIES.DISTRIBUTED)
    apply_sharding(pipe, workers, number % workers, SHARDING_PRIORITIES.MULTIPROCESSING)
    return pipe


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    after=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    cuts=st.lists(st.integers(0, 20), min_size=12, max_size=12),
    again=st.lists(st.integers(0, 12), min_size=12, max_size=12),
    buffer_size=st.sampled_from([1, 2, 6, 50]),
    kind=st.fixed_dictionaries({"filtered": st.booleans(), "twice": st.booleans(), "mapped": st.booleans()}),
)
@example((1, 1), (1, 1), [5] * 12, [3] * 12, 6, {"filtered": False, "twice": True, "mapped": False})
@example((2, 2), (1, 3), [9] * 12, [4] * 12, 50, {"filtered": True, "twice": True, "mapped": True})
def test_all_that_is_left_comes_once_on_others_and_once_more_from_there(
    before: tuple[int, int],
    after: tuple[int, int],
    cuts: list[int],
    again: list[int],
    buffer_size: int,
    kind: dict[str, bool],
) -> None:
    def new(topology: tuple[int, int], number: int) -> IterDataPipe[Any]:
        return instance(pipeline(buffer_size, **kind), *topology, number)

    wanted = [key for key in KEYS if not kind["filtered"] or int(key.split("-")[1]) % 3]
    came, states = list[str](), list[Any]()
    for number in range(before[0] * before[1]):
        pipe = new(before, number)
        iterator = iter(pipe)
        came += itertools.islice(iterator, cuts[number])
        states.append(as_json(save_state(pipe)) if cuts[number] else None)
    deals = deal_anew(states, after[0] * after[1])
    for number, deal in enumerate(deals):
        pipe = new(after, number)
        stages = [{"next": [0, 0], "dealt": as_json(deal.state_dict())}, *[None] * (1 + kind["twice"])]
        load_state(pipe, stages)
        iterator = iter(pipe)
        came += itertools.islice(iterator, again[number])
        state = as_json(save_state(pipe))
        rest = list(iterator)
        resumed = new(after, number)
        load_state(resumed, state)
        assert list(resumed) == rest
        came += rest
        # The epoch after it is split as ever.
        apply_random_seed(resumed, torch.Generator().manual_seed(17))
        assert list(resumed) == list(new(after, number))
    assert sorted(came) == wanted


def test_a_second_deal_in_one_epoch_is_refused() -> None:
    state = [{"next": [0, 0], "dealt": deal_anew([None], 2)[0].state_dict()}]
    with pytest.raises(StateError, match="as many ranks and workers"):
        deal_anew([state, None], 3)


def loader_of(pipe: IterDataPipe[Any], workers: int, *, distributed: bool = False) -> DataLoader2[Any]:
    return DataLoader2(pipe, reading_service=ShardReadingService(workers, distributed=distributed, timeout_s=60))


@pytest.mark.parametrize(
    ("before", "after", "cut"), [(2, 3, 17), (3, 0, 30), (0, 2, 11), (1, 0, 25), (2, 1, 0), (1, 2, 40)]
)
def test_workers_go_on_where_another_number_of_them_was(before: int, after: int, cut: int) -> None:
    with loader_of(pipeline(), before) as loader:
        loader.seed(5)
        iterator = iter(loader)
        came = list(itertools.islice(iterator, cut))
        state = loader.state_dict()
        next_epoch = (list(iterator), sorted(loader))[1]
    with loader_of(pipeline(), after) as loader:
        loader.load_state_dict(merge_states([state]))
        iterator = iter(loader)
        head = list(itertools.islice(iterator, 3))
        state = loader.state_dict()
        rest = list(iterator)
        assert sorted(came + head + rest) == KEYS
        assert sorted(loader) == next_epoch == KEYS
    with loader_of(pipeline(), after) as loader:
        loader.load_state_dict(state)
        assert list(loader) == rest


def test_what_a_worker_had_made_after_its_last_state_does_not_come_again() -> None:
    with loader_of(pipeline(), 2) as loader:
        loader.seed(5)
        came = list(itertools.islice(loader, 20))
        state = loader.state_dict()
    parts = [Resumed(**part) for part in json.loads(state["reading_service_state"])["parts"]]
    assert any(part.skip for part in parts)
    with loader_of(pipeline(), 1) as loader:
        before = torch.get_rng_state()
        loader.load_state_dict(state)
        assert sorted(came + list(loader)) == KEYS
        assert torch.equal(torch.get_rng_state(), before)


def read_as_rank(rank: int, folder: str, cut: int, saved: Sequence[dict[str, Any]], results: Any) -> None:
    """Be one of two ranks with 2 workers: go on, take some, save, and take the rest."""
    init_process_group("gloo", init_method=f"file://{folder}", rank=rank, world_size=2)
    try:
        with loader_of(pipeline(), 2, distributed=True) as loader:
            loader.seed(5)
            if saved:
                loader.load_state_dict(merge_states(saved))
            iterator = iter(loader)
            came = list(itertools.islice(iterator, cut))
            state = loader.state_dict()
            results.put((rank, came, state, list(iterator), list(loader)))
    finally:
        destroy_process_group()


def run_ranks(folder: Path, cut: int, saved: Sequence[dict[str, Any]] = ()) -> list[Any]:
    """Run two ranks, and return what they found, in the order of their numbers."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=read_as_rank, args=(rank, str(folder), cut, saved, results)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    found = sorted((results.get() for _ in processes), key=lambda result: result[0])
    for process in processes:
        process.join()
        assert process.exitcode == 0
        process.close()
    results.close()
    return found


def test_two_ranks_become_one_and_two_again(tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path / "first", 8)
    came = [key for _, head, _, _, _ in ranks for key in head]
    states = [state for _, _, state, _, _ in ranks]
    # As many ranks and workers as before go on exactly.
    same_again = run_ranks(tmp_path / "second", 0, states[::-1])
    assert [result[3:] for result in same_again] == [result[3:] for result in ranks]
    with loader_of(pipeline(), 3) as loader:
        loader.load_state_dict(states[1])
        with pytest.raises(StateError, match="merge_states"):
            next(iter(loader))
    with loader_of(pipeline(), 3) as loader:
        loader.load_state_dict(merge_states(states))
        assert sorted(came + list(loader)) == KEYS
        assert sorted(loader) == KEYS
    with loader_of(pipeline(), 3) as loader:
        came = list(itertools.islice(loader, 20))
        state = loader.state_dict()
    two = run_ranks(tmp_path / "third", 5, [state])
    assert sorted(came + [key for _, head, _, rest, _ in two for key in head + rest]) == KEYS
    assert sorted(key for *_, epoch in two for key in epoch) == KEYS


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda states: states[:1], "one of each rank"),
        (lambda states: states[:1] * 2, "one of each rank"),
        (lambda states: [], "no states"),
    ],
)
def test_what_is_not_the_state_of_all_ranks_is_refused(spoil: Any, text: str) -> None:
    with loader_of(pipeline(), 0) as loader:
        next(iter(loader))
        found = json.loads(loader.state_dict()["reading_service_state"])
    states = [json.dumps({**found, "ranks": 2, "rank": rank}).encode() for rank in range(2)]
    assert merge_states(states)
    with pytest.raises(StateError, match=text):
        merge_states(spoil(states))
    with pytest.raises(StateError, match="not of one epoch"):
        merge_states([states[0], json.dumps({**found, "ranks": 2, "rank": 1, "epoch": 7}).encode()])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda urls: urls.load_wds_shards().group_samples(), "Put .sharding_filter"),
        (lambda urls: urls.sharding_filter().filter(bool).load_wds_shards().group_samples(), "from Filter"),
        (lambda urls: urls.sharding_filter().load_wds_shards().group_samples().rsample(0.5), "SampleThinner counts"),
    ],
)
def test_a_pipeline_that_cannot_be_dealt_anew_is_named(make: Any, text: str) -> None:
    pipe = make(ShardList("{0..6}.tar"))
    with loader_of(pipe, 0) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with loader_of(pipe, 2) as loader:
        loader.load_state_dict(state)
        with pytest.raises(StateError, match=text):
            next(iter(loader))
