"""torchdata's ``.cycle()``: an instance without a shard ends at once, and only a run without items is an error."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from numbered_shards import numbered_shards
from torch.utils.data import DataLoader, IterDataPipe, graph_settings
from torch.utils.data.datapipes.iter import FileLister, IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService

from wds_datapipes import DirectoryShards, IndexedSamples, ShardList, ShardReadingService, StatefulShards
from wds_datapipes.errors import EmptySourceError

Pipe = IterDataPipe[Any]
SHARDS, SAMPLES = 2, 3
ITEMS = 20


shards = numbered_shards([SAMPLES] * SHARDS)


def keys(urls: Pipe) -> Pipe:
    pipe: Pipe = urls.load_wds_shards().group_samples().to_tuple("__key__")
    return pipe


def listed() -> Pipe:
    pipe: Pipe = ShardList(f"{{0..{SHARDS - 1}}}.tar").shuffle().sharding_filter()
    return pipe


PLACES: dict[str, Callable[[Pipe], Pipe]] = {
    "samples": lambda urls: keys(urls).cycle(),
    "batches": lambda urls: keys(urls).batch(2).cycle().unbatch(),
    "shards": lambda urls: keys(urls.cycle()),
}


def with_service(pipe: Pipe, workers: int, **options: Any) -> Iterator[Any]:
    with DataLoader2(pipe, reading_service=ShardReadingService(workers, **options)) as loader:
        loader.seed(3)
        yield from itertools.islice(loader, ITEMS)


def with_torchdatas_service(pipe: Pipe, workers: int) -> Iterator[Any]:
    with DataLoader2(pipe, reading_service=MultiProcessingReadingService(workers)) as loader:
        yield from itertools.islice(loader, ITEMS)


def with_torchs_loader(pipe: Pipe, workers: int) -> Iterator[Any]:
    yield from itertools.islice(DataLoader(pipe, batch_size=None, num_workers=workers), ITEMS)


def with_stateful_shards(pipe: Pipe, workers: int) -> Iterator[Any]:
    yield from with_torchs_loader(StatefulShards(pipe), workers)  # type: ignore[arg-type]  # it is a dataset, too


LOADERS = [with_service, with_torchdatas_service, with_torchs_loader, with_stateful_shards]


@pytest.mark.parametrize(("loader", "place"), [*zip(LOADERS, itertools.cycle(PLACES), strict=False)])
def test_a_worker_without_a_shard_yields_nothing_and_ends(loader: Any, place: str) -> None:
    found = Counter(key for (key,) in loader(PLACES[place](listed()), SHARDS + 1))
    assert found.total() == ITEMS
    assert found.keys() == {f"{number}-{n}" for number in range(SHARDS) for n in range(SAMPLES)}


@pytest.mark.parametrize(("place", "workers"), [("samples", 0), ("batches", 2), ("shards", 2)])
def test_a_rank_without_a_shard_is_an_error(place: str, workers: int) -> None:
    pipe = PLACES[place](listed())
    with pytest.raises(EmptySourceError, match=r"Rank 2 of 3 has none of the 2 shards.*cycle\(\)"):
        list(with_service(pipe, workers, distributed=(2, 3)))
    assert len(list(with_service(PLACES[place](listed()), workers, distributed=(1, 3)))) == ITEMS


@pytest.mark.parametrize("place", PLACES)
def test_no_shards_at_all_are_an_error(place: str) -> None:
    os.mkdir("empty")
    pipe = PLACES[place](FileLister("empty").sharding_filter())
    with pytest.raises(EmptySourceError, match=r"yielded nothing"):
        list(pipe)
    with pytest.raises(EmptySourceError, match=r"yielded nothing"):
        list(with_service(PLACES[place](FileLister("empty").sharding_filter()), 2))


def test_sources_that_split_themselves_end_too() -> None:
    found = list(with_torchs_loader(IndexedSamples("0.tar", global_batch_size=SAMPLES).to_tuple("__key__").cycle(), 2))
    assert len(found) == ITEMS
    os.mkdir("inbox")
    assert list(DirectoryShards("inbox", timeout_s=0).cycle()) == []


class EveryThird(IterDataPipe[int]):
    """Yields items only in every third pass."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        if self.passes % 3 == 0:
            yield self.passes


def test_a_source_may_be_empty_for_a_while() -> None:
    assert list(itertools.islice(EveryThird().cycle(), 4)) == [3, 6, 9, 12]
    assert list(EveryThird().cycle(7)) == [3, 6]


@pytest.mark.parametrize("count", [0, 3])
def test_a_given_number_of_passes_is_made(count: int) -> None:
    pipe = IterableWrapper(range(4)).cycle(count)
    assert list(pipe) == [*range(4)] * count
    assert len(pipe) == 4 * count
    assert len(list(keys(listed()).cycle(count))) == count * SHARDS * SAMPLES
    split = listed()
    graph_settings.apply_sharding(split, 3, 2, SHARDING_PRIORITIES.MULTIPROCESSING)
    assert list(split.cycle(count)) == []
