"""Pipelines with lambdas, local functions and local classes in ``DataLoader2``."""

import pickle
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

import pytest
from numbered_shards import numbered_shards
from torch.utils.data import IterDataPipe
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService
from torchdata.datapipes.iter import IterableWrapper

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.errors import StateError
from wds_datapipes.pipes.graph import graph_of

#: torch warns about lambdas when they are passed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is not supported by pickle:UserWarning")


def with_lambda(factor: int) -> IterDataPipe[int]:
    pipe: IterDataPipe[int] = IterableWrapper(range(6)).sharding_filter().map(lambda number: number * factor)
    return pipe


def with_local_class(factor: int) -> IterDataPipe[int]:
    class Multiplied(IterDataPipe[int]):
        def __init__(self, source: IterDataPipe[int], factors: dict[str, Callable[[int], int]]) -> None:
            self.source, self.factors = source, factors

        def __iter__(self) -> Iterator[int]:
            return map(self.factors["all"], self.source)

    return Multiplied(IterableWrapper(range(6)).sharding_filter(), {"all": lambda number: number * factor})


SERVICES: dict[str, Callable[[], Any]] = {
    "torchdata, 2 workers": lambda: MultiProcessingReadingService(2, "fork"),
    "0 workers": ShardReadingService,
    "2 workers": lambda: ShardReadingService(2),
}


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("make", [with_lambda, with_local_class])
def test_local_functions_run_without_workers_and_in_forked_ones(
    make: Callable[[int], IterDataPipe[int]], service: str
) -> None:
    with DataLoader2(make(3), reading_service=SERVICES[service]()) as loader:
        assert list(loader) == list(loader) == [0, 3, 6, 9, 12, 15]


def test_a_loader_has_its_own_copy_of_what_a_pipeline_holds() -> None:
    pipe = with_lambda(1)
    numbers: Any = next(stage for stage in graph_of(pipe).stages if isinstance(stage, IterableWrapper))
    numbers.iterable = numbers_of_user = [1, 2]
    loader = DataLoader2(pipe, reading_service=ShardReadingService())
    numbers_of_user.append(3)
    assert list(loader) == [1, 2]


def samples_of(field: str) -> IterDataPipe[Any]:
    shards = ShardList("{0,1}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()
    pipe: IterDataPipe[Any] = shards.map(lambda sample: sample[field])
    return pipe


shards = numbered_shards([5, 5])


def test_a_lambda_that_has_changed_since_is_another_pipeline() -> None:
    state = DataLoader2(samples_of("__key__"), reading_service=ShardReadingService()).state_dict()
    loader = DataLoader2(samples_of("cls"), reading_service=ShardReadingService())
    with pytest.raises(StateError, match="Mapper"):
        loader.load_state_dict(state)


@pytest.fixture
def tracker() -> None:
    """Start multiprocessing's resource tracker, which spawned workers share, and which keeps running."""
    resource_tracker.ensure_running()


@pytest.mark.usefixtures("tracker", "nothing_left")
@pytest.mark.parametrize(
    ("make", "options", "culprit"),
    [
        (with_lambda, {}, r"with_lambda.<locals>.<lambda>"),
        (with_local_class, {}, r"with_local_class.<locals>.Multiplied"),
        (lambda _: IterableWrapper([1]), {"worker_init_fn": lambda pipe, info: pipe}, "<lambda>"),
    ],
    ids=["lambda", "class", "worker_init_fn"],
)
def test_workers_that_are_not_forked_refuse_local_functions(
    make: Callable[[int], IterDataPipe[Any]], options: dict[str, Any], culprit: str
) -> None:
    with (
        DataLoader2(make(3), reading_service=ShardReadingService(1, "spawn", **options)) as loader,
        pytest.raises(
            pickle.PicklingError,
            match=rf"started with 'spawn' .*{culprit}.* at the top level of a module, .*partial .*the package dill, "
            r'.*multiprocessing_context="fork"',
        ),
    ):
        iter(loader)
