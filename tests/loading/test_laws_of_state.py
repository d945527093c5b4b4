"""The laws of order, O1 to O4, and of states, S1 to S4, over ranks, workers, prefetching and cuts.

Ranks are built as services build them: the pipeline is split among the ranks first, and the seed generator is that of
the rank. Worker processes are real. Runs with real ranks are in test_rank_epochs.py, test_checkpoint.py,
test_uneven_ranks.py and test_training_run.py.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import graph_settings
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.errors import StateError
from wds_datapipes.testing import build_shard

SCRIPT = Path(__file__).with_name("law_run.py")
STATE = "wds_datapipes"
SIZES = (7, 0, 13, 1, 9, 4)
KEYS = sorted(f"{shard}-{number}" for shard, size in enumerate(SIZES) for number in range(size))

Pipe = Any


@pytest.fixture(scope="module", autouse=True)
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("shards")
    for shard, size in enumerate(SIZES):
        samples = [{"__key__": f"{shard}-{number}", "cls": str(number)} for number in range(size)]
        build_shard(folder / f"{shard}.tar", samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


class RankOf(ShardReadingService):
    """A `ShardReadingService` on one of several ranks, which share a seed; it replaces a process group."""

    def __init__(self, rank: int, ranks: int, workers: int, prefetch: int) -> None:
        super().__init__(workers, worker_prefetch_cnt=prefetch, main_prefetch_cnt=prefetch)
        self.rank, self.ranks = rank, ranks

    def initialize(self, datapipe: Pipe) -> Pipe:
        graph_settings.apply_sharding(datapipe, self.ranks, self.rank, SHARDING_PRIORITIES.DISTRIBUTED)
        return super().initialize(datapipe)

    def initialize_iteration(self, seed_generator: Any, iter_reset_fn: Any = None) -> Any:
        seed_generator.seed(seed_generator.generate_shared_seed())
        seed_generator.spawn(self.rank, inplace=True)
        return super().initialize_iteration(seed_generator, iter_reset_fn)


class Case(NamedTuple):
    """A run: its numbers of ranks and of workers per rank, and the pipeline."""

    ranks: int
    workers: int
    prefetch: int
    buffer_size: int
    batch_size: int
    seed: int


def with_url(sample: dict[str, Any]) -> tuple[str, str]:
    return sample["__key__"], sample["__url__"]


def pipeline(case: Case) -> Pipe:
    pipe = ShardList("{0..5}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()
    pipe = pipe.shuffle_samples(case.buffer_size) if case.buffer_size else pipe
    pipe = pipe.map(with_url)
    return pipe.batch(case.batch_size) if case.batch_size else pipe


def loader_of(case: Case, rank: int) -> Any:
    loader: DataLoader2[Any] = DataLoader2(
        pipeline(case), reading_service=RankOf(rank, case.ranks, case.workers, case.prefetch)
    )
    loader.seed(case.seed)
    return loader


def keys_of(items: list[Any]) -> list[str]:
    return [pair[0] for item in items for pair in (item if isinstance(item, list) else [item])]


CASES = st.builds(
    Case,
    ranks=st.integers(1, 3),
    workers=st.sampled_from([0, 0, 1, 2, 3]),
    prefetch=st.sampled_from([0, 1, 10]),
    buffer_size=st.sampled_from([0, 2, 5, 100]),
    batch_size=st.sampled_from([0, 2, 5]),
    seed=st.integers(0, 2**64 - 1),
)
few = partial(
    settings, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def check_is_plain(value: Any) -> None:
    """Check that a value contains only JSON types: no class of ours, and no number that JSON would change."""
    assert type(value) in (dict, list, str, int, bool, type(None)), type(value)
    for each in [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []:
        check_is_plain(each)


@few(max_examples=12)
@given(case=CASES, cuts=st.lists(st.integers(0, 40), min_size=1, max_size=3), data=st.data())
@example(Case(2, 3, 10, 5, 5, 1), [0, 40], None)  # before the first and after the last; workers without a shard
@example(Case(3, 2, 0, 100, 2, 2), [1, 1, 1], None)
@example(Case(1, 2, 10, 0, 0, 3), [17, 3, 40], None)
def test_ranks_read_everything_once_and_resume_exactly_at_any_cuts(case: Case, cuts: list[int], data: Any) -> None:
    """Laws O2, O3, S1, S2: an item that was prefetched but not delivered comes once, and the next epoch is the same."""
    wholes = []
    for rank in range(case.ranks):
        with loader_of(case, rank) as loader:
            wholes.append([list(loader) for _ in range(3)])
    for epoch in range(3):
        assert sorted(keys_of([item for whole in wholes for item in whole[epoch]])) == KEYS
    rank = case.ranks - 1 if data is None else data.draw(st.integers(0, case.ranks - 1), label="rank")
    whole = wholes[rank]
    taken: list[Any] = []
    with loader_of(case, rank) as loader:
        list(loader)
        items = iter(loader)
        taken += itertools.islice(items, cuts[0])
        is_over = cuts[0] > len(whole[1])
        state = loader.state_dict()
    for more in [*cuts[1:], None]:
        check_is_plain(json.loads(state[STATE]))
        waiting = case.buffer_size * max(case.workers, 1)
        assert len(state[STATE]) <= 1024 * max(case.workers, 1) + 50 * waiting + 1024
        with loader_of(case, rank) as loader:
            loader.load_state_dict(state)
            if is_over:
                break
            items = iter(loader)
            found = list(items) if more is None else list(itertools.islice(items, more))
            taken += found
            is_over = more is not None and len(found) < more
            state = loader.state_dict()
            if more is None:
                assert list(loader) == whole[2]
    assert taken == whole[1][: len(taken)]
    assert len(taken) == len(whole[1])


def numbered(number: int, item: Any) -> tuple[int, Any]:
    return number, item


def number_items(pipe: Pipe, info: Any) -> Pipe:
    return pipe.map(partial(numbered, info.worker_id))


@few(max_examples=8)
@given(
    seed=st.integers(0, 2**64 - 1),
    readers=st.tuples(st.integers(1, 3), st.sampled_from([0, 1, 2])),
    others=st.tuples(st.integers(1, 3), st.sampled_from([0, 0, 3])),
)
def test_shards_are_split_from_one_order_for_any_number_of_readers(
    seed: int, readers: tuple[int, int], others: tuple[int, int]
) -> None:
    """Law O1: shards are dealt round robin to all readers from one order, which follows from the seed and the epoch."""
    orders = orders_of(seed, *readers)
    assert orders == orders_of(seed, *others)
    assert all(sorted(order) == ["0.tar", "2.tar", "3.tar", "4.tar", "5.tar"] for order in orders)


def orders_of(seed: int, ranks: int, workers: int) -> list[list[str]]:
    """Merge the shards of all readers of each epoch, as they were dealt."""
    hands = [dict[int, list[str]]() for _ in range(3)]
    for rank in range(ranks):
        service = RankOf(rank, ranks, workers, 10)
        service.worker_init_fn = number_items
        pipe: Pipe = ShardList("{0,2,3,4,5}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()
        loader: Any = DataLoader2(pipe.map(with_url), reading_service=service)
        loader.seed(seed)
        with loader:
            for hand in hands:
                for worker, (_, url) in loader:
                    own = hand.setdefault(worker * ranks + rank, [])
                    if url not in own:
                        own.append(url)
    instances = ranks * max(workers, 1)
    return [[hand[index % instances][index // instances] for index in range(5)] for hand in hands]


@pytest.mark.parametrize("workers", [2, 3])
def test_shards_move_between_workers_from_epoch_to_epoch(workers: int) -> None:
    case = Case(1, workers, 10, 0, 0, 4)
    service = ShardReadingService(workers, worker_init_fn=number_items)
    readers: dict[str, set[int]] = {}
    with DataLoader2(pipeline(case), reading_service=service) as loader:
        loader.seed(4)
        orders = []
        for _ in range(6):
            order = []
            for worker, (_, url) in loader:
                readers.setdefault(url, set()).add(worker)
                order.append(url)
            orders.append(tuple(order))
    assert len(set(orders)) == 6
    assert all(len(workers_of) > 1 for workers_of in readers.values())
    assert set().union(*readers.values()) == set(range(workers))


@pytest.mark.parametrize("workers", [1, 3])
def test_random_draws_after_the_split_differ_by_rank_worker_and_epoch(workers: int) -> None:
    """Law O3. All readers have the same items here, so that only random draws can make their orders differ."""
    orders = []
    for rank in range(2):
        service = RankOf(rank, 2, workers, 10)
        pipe = ShardList("5.tar").map(str).load_wds_shards().group_samples().shuffle_samples(10).map(with_url)
        service.worker_init_fn = number_items
        loader: Any = DataLoader2(pipe, reading_service=service)
        loader.seed(8)
        with loader:
            for _ in range(2):
                by_worker: dict[int, list[str]] = {}
                for worker, (key, _) in loader:
                    by_worker.setdefault(worker, []).append(key)
                orders += [tuple(keys) for keys in by_worker.values()]
    assert len(orders) == 4 * workers
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len(set(orders)) > 2 * workers  # of 24 orders; without different draws, at most 4 or `workers`


#: The first items, by the number of workers.
GOLDEN = {
    0: [["2-2", "2-6", "2-7"], ["2-4", "2-5", "2-8"], ["2-1", "2-10", "2-9"], ["5-2", "2-12", "5-0"]],
    2: [["2-3", "2-4", "2-7"], ["4-2", "4-0", "4-5"], ["2-2", "2-6", "2-0"], ["4-4", "4-1", "4-8"]],
}
#: The numbers drawn for one of these samples, in any reader.
GOLDEN_DRAW = {"2-7": 0.5506134113243866}


def run(folder: Path, hash_seed: int, workers: int, argument: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, SCRIPT, str(workers), str(argument)],
        cwd=folder,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_resumes_in_a_process_with_another_hash_seed(workers: int, shards: Path, tmp_path: Path) -> None:
    """Laws O3 and S1; the golden values must stay the same in every release, because states are kept for long."""
    saved = run(shards, 1, workers, 4)
    file = tmp_path / "state.json"
    file.write_text(json.dumps(saved["state"]))
    resumed = run(shards, 2, workers, file)
    assert resumed["epochs"] == [[], *saved["epochs"][1:]]
    first = [[key for key, _ in batch] for batch in saved["epochs"][0]]
    assert first == GOLDEN[workers]
    drawn = dict(pair for batch in saved["epochs"][0] for pair in batch)
    assert {key: drawn[key] for key in GOLDEN_DRAW} == GOLDEN_DRAW


def test_a_state_of_a_later_version_is_refused() -> None:
    with loader_of(Case(1, 0, 10, 2, 0, 1), 0) as loader:
        next(iter(loader))
        state = loader.state_dict()
    found = json.loads(state[STATE])
    state[STATE] = json.dumps({**found, "version": found["version"] + 1})
    with (
        loader_of(Case(1, 0, 10, 2, 0, 1), 0) as loader,
        pytest.raises(
            StateError, match=f"version {found['version'] + 1}, but this release .* reads .*{found['version']}"
        ),
    ):
        loader.load_state_dict(state)
