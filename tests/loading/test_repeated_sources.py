"""A source that is split and read several times in an epoch yields every sample once each time, with any loader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from random import Random
from typing import Any

import pytest
import torch
from data_parallel_pipelines import open_service
from numbered_shards import key_of, numbered_shards
from torch.utils.data import DataLoader, IterDataPipe, graph_settings
from torch.utils.data.datapipes.iter import IterableWrapper, Shuffler
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService

from wds_datapipes import ShardList, Stage, StatefulShards
from wds_datapipes.testing import check_coverage

SIZES = (7, 3, 12, 1, 9, 6, 8)
KEYS = [f"{shard}-{number}" for shard, size in enumerate(SIZES) for number in range(size)]


shards = numbered_shards(SIZES)


class Twice(Stage[Any]):
    """A user's stage that iterates its source twice."""

    def __init__(self, source: IterDataPipe[Any]) -> None:
        super().__init__()
        self.source = source
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        while self.passes < 2:
            yield from self.source
            self.passes += 1
        self.passes = 0

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.passes = state.get("passes", 0)


class OwnShuffler(IterDataPipe[Any]):
    """A user's stage that shuffles, written like torch's."""

    def __init__(self, source: IterDataPipe[Any]) -> None:
        super().__init__()
        self.source = source
        self.seed: int | None = None
        self.random = Random()

    def set_seed(self, seed: int) -> None:
        self.seed = seed

    def reset(self) -> None:
        self.random.seed(self.seed)  # from the system without a seed
        self.seed = None

    def __iter__(self) -> Iterator[Any]:
        items = list(self.source)
        self.random.shuffle(items)
        yield from items


class DerivedShuffler(Shuffler[Any]):
    """A user's class that is derived from torch's, and calls its methods."""

    def reset(self) -> None:
        super().reset()


def split(first: int = 0, last: int = 6) -> Any:
    return ShardList(f"{{{first}..{last}}}.tar").shuffle().sharding_filter()


def samples(urls: Any) -> Any:
    return urls.load_wds_shards().group_samples().map(key_of)


def cycled() -> Any:
    return samples(split()).cycle(2)


def iterated_twice() -> Any:
    return Twice(samples(split()))


def shuffled_by_a_user() -> Any:
    return samples(OwnShuffler(ShardList("{0..6}.tar")).sharding_filter()).cycle(2)


def shuffled_by_a_derived_class() -> Any:
    return samples(DerivedShuffler(ShardList("{0..6}.tar")).sharding_filter()).cycle(2)


def two_copies() -> Any:
    return samples(split()).mix_samples(samples(split()), stop="all").cycle(2)


PIPELINES = [cycled, iterated_twice, shuffled_by_a_user, shuffled_by_a_derived_class, two_copies]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 3), (2, 2)])
@pytest.mark.parametrize("make_pipe", PIPELINES)
def test_each_pass_yields_every_sample_once_on_all_ranks(
    make_pipe: Callable[[], Any], ranks: int, workers: int
) -> None:
    check_coverage(make_pipe, ranks=ranks, workers=workers, seed=3)


def by_our_service(pipe: Any, workers: int) -> Iterator[Any]:
    with open_service(pipe, workers) as loader:
        yield from ([*loader] for _ in range(2))


def by_torchdatas_service(pipe: Any, workers: int) -> Iterator[Any]:
    service = MultiProcessingReadingService(workers, multiprocessing_context="fork")
    loader: Any = DataLoader2(pipe, reading_service=service)
    loader.seed(5)
    try:
        yield from ([*loader] for _ in range(2))
    finally:
        loader.shutdown()


def by_torch(pipe: Any, workers: int) -> Iterator[Any]:
    torch.manual_seed(5)
    loader: Any = DataLoader(pipe, batch_size=None, num_workers=workers)
    yield from ([*loader] for _ in range(2))


def by_stateful_shards(pipe: Any, workers: int) -> Iterator[Any]:
    data = StatefulShards(pipe, seed=5)
    loader: Any = DataLoader(data, batch_size=None, num_workers=workers)
    yield from ([*data.tracked(loader)] for _ in range(2))


@pytest.mark.parametrize("read_by", [by_our_service, by_torchdatas_service, by_torch, by_stateful_shards])
@pytest.mark.parametrize("make_pipe", [iterated_twice, shuffled_by_a_user])
def test_each_pass_yields_every_sample_once_in_every_loader(
    read_by: Callable[[Any, int], Iterator[Any]], make_pipe: Callable[[], Any]
) -> None:
    for read in read_by(make_pipe(), 2):
        assert Counter(read) == dict.fromkeys(KEYS, 2)


@pytest.mark.parametrize("read_by", [by_our_service, by_torch, by_stateful_shards])
def test_passes_differ_in_their_order_and_repeat_with_the_seed(read_by: Callable[[Any, int], Iterator[Any]]) -> None:
    epochs = list(read_by(iterated_twice(), 0))
    orders = [epoch[half : half + len(KEYS)] for epoch in epochs for half in (0, len(KEYS))]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == sorted(KEYS) for order in orders)
    assert list(read_by(iterated_twice(), 0)) == epochs


def test_an_endless_mixture_restarts_the_same_after_different_numbers_of_passes() -> None:
    again = list[int]()
    for instance, count in enumerate([40, 10]):
        pipe: Any = IterableWrapper(range(8)).shuffle().sharding_filter()
        pipe = pipe.mix_samples(IterableWrapper(range(8, 16)).shuffle().sharding_filter(), stop="never")
        graph_settings.apply_sharding(pipe, 2, instance)
        graph_settings.apply_random_seed(pipe, torch.Generator().manual_seed(3))
        assert len(list(islice(pipe, count))) == count
        again += islice(pipe, 8)
    assert sorted(again) == list(range(16))


def test_without_a_loader_each_pass_draws_from_torchs_generator() -> None:
    pipe = IterableWrapper(range(20)).shuffle()
    orders = []
    for _ in range(2):
        torch.manual_seed(1)
        orders.append(list(pipe))
    assert orders[0] == orders[1]
