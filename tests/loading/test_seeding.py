"""The order of a seed is torchdata's; it differs between epochs and is the same in another run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loader_kinds import Service, Stateful, Tracked, items_of
from pipeline_table import EXACT, write_shards
from torch.utils.data import IterDataPipe
from torchdata.dataloader2 import DataLoader2
from torchdata.dataloader2.graph import list_dps, traverse_dps
from torchdata.dataloader2.random import SeedGenerator
from torchdata.dataloader2.utils import WorkerInfo, process_reset_fn
from torchdata.datapipes.iter import IterableWrapper, ShardingFilter

from wds_datapipes import ShardReadingService, StatefulShards
from wds_datapipes.loading.epoch_run import EpochRun, EpochStart
from wds_datapipes.pipes.state.seeding import seed_stages

Pipe = IterDataPipe[Any]

# stages


class Seeded(IterDataPipe[Any]):
    """Yields its items, and records its seeds."""

    def __init__(self, *sources: Pipe) -> None:
        self.sources = sources
        self.seeds: list[int] = []

    def set_seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def __iter__(self) -> Iterator[Any]:
        for source in self.sources:
            yield from source


class OwnFilter(ShardingFilter):  # type: ignore[misc]  # torchdata has no types
    """A sharding filter of another class."""


class Split(IterDataPipe[Any]):
    """Splits the data differently, into blocks."""

    def __init__(self, source: Pipe) -> None:
        self.source = source
        self.workers, self.worker = 1, 0

    def apply_sharding(self, num_of_instances: int, instance_id: int, sharding_group: object = None) -> None:
        self.workers, self.worker = num_of_instances, instance_id

    def __iter__(self) -> Iterator[Any]:
        items = list(self.source)
        share = -(-len(items) // self.workers)
        yield from items[self.worker * share : (self.worker + 1) * share]


def numbers(count: int = 40) -> Pipe:
    pipe: Pipe = IterableWrapper(range(count))
    return pipe


@pytest.fixture
def _generators_as_before() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


# the seed of each epoch


@pytest.mark.parametrize(("kind", "workers"), [(Service, 0), (Service, 2), (Tracked, 0), (Tracked, 2), (Stateful, 2)])
def test_one_rank_has_the_order_of_a_run_without_ranks(
    kind: Any, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each resumes from a state of the other, and yields the very next items."""
    monkeypatch.chdir(tmp_path)
    write_shards()
    orders, states = list[Any](), list[Any]()
    for options in ({}, {"distributed": (0, 1)}):
        with closing(kind(EXACT["a long chain"], workers, **options)) as run:
            orders.append([items_of(run.epoch()) for _ in range(2)])
            items = run.epoch()
            head = items_of(items, 3)
            states.append(run.state())
            orders[-1].append(head + items_of(items))
    assert orders[0] == orders[1]
    assert len({*map(str, orders[0])}) == 3
    for state, options in zip(states, ({"distributed": (0, 1)}, {}), strict=True):
        with closing(kind(EXACT["a long chain"], workers, state, **options)) as run:
            assert items_of(run.epoch()) == orders[0][2][3:]


def test_one_rank_needs_no_seed() -> None:
    with DataLoader2(numbers(), reading_service=ShardReadingService(distributed=(0, 1))) as loader:
        assert [*loader] == [*range(40)]


# the seed of each stage


@pytest.mark.parametrize("splitter", [ShardingFilter, OwnFilter, Split])
def test_stages_before_a_split_of_any_class_get_the_same_seed_on_all_workers(splitter: Callable[..., Pipe]) -> None:
    seeds = []
    for worker in range(3):
        before, after = Seeded(), Seeded()
        after.sources = (splitter(Seeded(before)),)
        seed_stages(after, SeedGenerator(1).spawn(worker))
        (second,) = (stage for stage in list_dps(traverse_dps(after)) if getattr(stage, "sources", None) == (before,))
        seeds.append((before.seeds, second.seeds, after.seeds))
    assert seeds[0][:2] == seeds[1][:2] == seeds[2][:2]
    assert len({str(each) for each in seeds[0]} | {str(worker[2]) for worker in seeds}) == 5


@pytest.mark.usefixtures("_generators_as_before")
def test_an_epoch_seeds_the_generators_as_torchdata_does() -> None:
    states = []
    for is_ours in (True, False):
        stage = Seeded(ShardingFilter(Seeded()))
        generator = SeedGenerator(8).spawn(2)
        if is_ours:
            assert EpochRun(stage, EpochStart(generator, owns_generators=True)).pipe is stage
        else:
            assert process_reset_fn(stage, WorkerInfo(3, 2), generator, distributed_shared_seed=False) is stage
        states.append(([random.random(), np.random.random(), torch.rand(()).item()], stage.seeds))
    assert states[0] == states[1]


@pytest.mark.usefixtures("_generators_as_before")
def test_an_epoch_starts_with_the_functions_of_other_services_and_of_the_user() -> None:
    said: list[Any] = []

    def theirs(pipe: Pipe) -> Pipe:
        said.append(("theirs", pipe))
        return other

    def users(pipe: Pipe, info: Any, seeds: Any) -> Pipe:
        said.append(("users", pipe, info, seeds))
        return last

    stage, other, last = Seeded(), Seeded(), Seeded()
    info, generator = WorkerInfo(3, 2), SeedGenerator(8)
    assert EpochRun(stage, EpochStart(generator, iter_reset_fn=theirs, worker_reset_fn=users, info=info)).pipe is last
    assert said == [("theirs", stage), ("users", other, info, generator)]
    assert len(stage.seeds) == 1  # before the functions, which may draw additional numbers
    resets: dict[str, Any] = {"iter_reset_fn": lambda _: None, "worker_reset_fn": lambda *_: 5}
    for name, function in resets.items():
        with pytest.raises(TypeError, match=rf"{name} must return the pipeline, but returned (None|5)"):
            EpochRun(stage, EpochStart(generator, info=info, **{name: function}))


# whole runs


def read(
    pipe: Pipe, workers: int, seed: int | None = 7, service: type[Any] = ShardReadingService, epochs: int = 3
) -> list[list[Any]]:
    with DataLoader2(pipe, reading_service=service(workers, "fork")) as loader:
        if seed is not None:
            loader.seed(seed)
        return [list(loader) for _ in range(epochs)]


#: Items remain if one branch is longer.
pytestmark = pytest.mark.filterwarnings("ignore:Some child DataPipes are not exhausted")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_without_a_seed_follows_the_seed_of_torch(workers: int) -> None:
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(read(numbers().shuffle().sharding_filter().shuffle(), workers, seed=None))
    runs.append(read(numbers().shuffle().sharding_filter().shuffle(), workers, seed=None))
    assert runs[0] == runs[1]
    assert len({tuple(epoch) for run in runs for epoch in run}) == 9


def ask_for_seeds(pipe: Pipe, info: Any, seeds: Any) -> Pipe:
    own, shared = seeds.generate_seed(), seeds.generate_shared_seed()
    drawn_seeds: Pipe = IterableWrapper([(own, shared)])
    return drawn_seeds


@pytest.mark.parametrize("workers", [0, 3])
def test_a_reset_function_can_draw_seeds(workers: int) -> None:
    service = ShardReadingService(workers, "fork", worker_reset_fn=ask_for_seeds)
    with DataLoader2(numbers(), reading_service=service) as loader:
        loader.seed(2)
        epochs = [list(loader) for _ in range(3)]
    assert all(len({shared for _, shared in epoch}) == 1 for epoch in epochs)
    assert len({shared for epoch in epochs for _, shared in epoch}) == 3
    assert len({own for epoch in epochs for own, _ in epoch}) == 3 * max(workers, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_seeded_run_leaves_the_generators_of_the_main_process_alone(workers: int) -> None:
    loader = DataLoader2(numbers().shuffle().sharding_filter(), reading_service=ShardReadingService(workers))
    with loader:
        loader.seed(7)
        before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
        for _ in range(2):
            list(loader)
        assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == before


class FromSet(IterDataPipe[Any]):
    """Reads stages of a set, where only torch's traversal finds them."""

    def __init__(self, stage: Pipe) -> None:
        self.stages = {stage}

    def __iter__(self) -> Iterator[Any]:
        for stage in self.stages:
            yield from stage


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stage_that_cannot_be_seeded_or_told_its_share_is_an_error(workers: int) -> None:
    for hidden, fault in {
        FromSet(IterableWrapper(range(8)).shuffle()).sharding_filter(): "Shuffler.* draws random numbers",
        FromSet(IterableWrapper(range(8)).sharding_filter()): "ShardingFilter.* splits the data",
    }.items():
        message = f"{fault}, but a stage after it hides it from loaders"
        with pytest.raises(ValueError, match=message):
            list(DataLoader2(hidden, reading_service=ShardReadingService(num_workers=workers)))
        with pytest.raises(ValueError, match=message):
            StatefulShards(hidden)
    plain = FromSet(IterableWrapper(range(8))).sharding_filter()
    with DataLoader2(plain, reading_service=ShardReadingService(num_workers=workers)) as loader:
        assert sorted(loader) == list(range(8))
