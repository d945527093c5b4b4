"""Epochs that continue where the last one stopped, declared lengths, and resampled shards, in loaders."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numbered_shards import write_numbered
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService
from torchdata.datapipes.iter import SampleMultiplexer
from users_stages import InMain

from wds_datapipes import ShardList, ShardReadingService, StatefulShards
from wds_datapipes.errors import EmptySourceError
from wds_datapipes.loading.splitting import split_by_worker
from wds_datapipes.testing import build_shard
from wds_datapipes.types import Instance

Pipe = IterDataPipe[Any]
WORKERS = (0, 3)
RANKS, OF_A_RANK = SHARDING_PRIORITIES.DISTRIBUTED, SHARDING_PRIORITIES.MULTIPROCESSING


def numbers(count: int) -> Pipe:
    pipe: Pipe = IterableWrapper(range(count))
    return pipe


def read2(pipe: Pipe, workers: int, epochs: int, seed: int | None = 7, service: Any = None) -> list[list[Any]]:
    """Read some epochs with DataLoader2."""
    service = ShardReadingService(workers, "fork") if service is None else service(workers, "fork")
    with DataLoader2(pipe, reading_service=service) as loader:
        if seed is not None:
            loader.seed(seed)
        return [list(loader) for _ in range(epochs)]


def read(pipe: Pipe, workers: int, epochs: int, seed: int | None = 7, persistent: bool = True) -> list[list[Any]]:
    """Read some epochs with torch's DataLoader."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    loader = DataLoader(
        pipe, batch_size=None, num_workers=workers, persistent_workers=persistent and workers > 0, generator=generator
    )
    return [list(loader) for _ in range(epochs)]


READERS = {"DataLoader2": read2, "DataLoader": read}
Reader = Callable[..., list[list[Any]]]


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> Reader:
    return READERS[request.param]


class Failing(IterDataPipe[int]):
    """Yields one number in the first pass, and fails in later ones."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield self.passes
        if self.passes == 1:
            raise OSError("no such disk")


# with_epoch


@given(st.integers(1, 7), st.integers(1, 20), st.integers(1, 5))
@example(3, 3, 50)  # each epoch ends with a pass
def test_epochs_are_segments_of_a_stream(size: int, n: int, epochs: int) -> None:
    pipe = numbers(size).with_epoch(n)
    stream = itertools.cycle(range(size))
    for _ in range(epochs):
        assert list(pipe) == list(itertools.islice(stream, n))


@given(st.integers(1, 7), st.lists(st.integers(0, 10), max_size=5))
def test_an_interrupted_epoch_continues_in_the_next(size: int, taken: list[int]) -> None:
    pipe = numbers(size).with_epoch(10)
    stream = itertools.cycle(range(size))
    for count in taken:
        assert list(itertools.islice(pipe, count)) == list(itertools.islice(stream, count))


@pytest.mark.parametrize("workers", WORKERS)
def test_each_pass_has_its_own_order_shared_by_all_workers(reader: Reader, workers: int) -> None:
    """Workers may reach a pass in different epochs, and torch would then shuffle it differently for each."""
    pipe = numbers(12).shuffle().enumerate().sharding_filter().with_epoch(30)
    items = list(itertools.chain(*reader(pipe, workers, 6)))
    assert len(items) == 180
    # The positions of numbers identify their pass: each worker has the same positions in each pass.
    seen: dict[int, list[int]] = {}
    for place, number in items:
        seen.setdefault(place, []).append(number)
    assert {place: len(numbers) for place, numbers in seen.items()} == dict.fromkeys(range(12), 15)
    passes = list(zip(*(seen[place] for place in range(12)), strict=True))
    assert all(sorted(each) == list(range(12)) for each in passes)
    assert len(set(passes)) == 15


def test_workers_are_counted_wherever_the_data_is_split() -> None:
    """torchdata's stages store several sources in lists and dictionaries."""
    pipe = SampleMultiplexer({numbers(8): 1.0, numbers(8).sharding_filter(): 3.0}, seed=5).with_epoch(6)
    assert [len(epoch) for epoch in read2(pipe, 2, 2)] == [6, 6]


def is_below_2(number: int) -> bool:
    return number < 2


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.sets(st.integers(0, 9), min_size=1), st.booleans(), st.integers(0, 99))
def test_each_pass_is_read_completely_as_shares_rotate(
    ranks: int, workers: int, full: set[int], shuffled: bool, seed: int
) -> None:
    passes: list[list[int]] = [[] for _ in range(4)]
    for rank, worker in itertools.product(range(ranks), range(workers)):
        shards = numbers(10).shuffle() if shuffled else numbers(10)
        source = Marked(shards.sharding_filter().filter(full.__contains__))
        pipe = source.with_epoch(10_000)
        apply_sharding(pipe, ranks, rank, RANKS)
        split_by_worker(pipe, Instance(worker=worker, workers=workers))
        apply_random_seed(pipe, torch.Generator().manual_seed(seed))
        for number, item in pipe:
            if number >= len(passes):
                break
            passes[number].append(item)
    assert [sorted(each) for each in passes] == [sorted(full)] * len(passes)


class Marked(IterDataPipe[tuple[int, int]]):
    """Marks each item with the number of the pass."""

    def __init__(self, source: Pipe) -> None:
        self.source = source
        self.passes = -1

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self.passes += 1
        for item in self.source:
            yield self.passes, item


def test_a_rarely_drawn_sample_is_not_an_error() -> None:
    """A pass without an item is not the end, because it can happen by chance."""
    torch.manual_seed(0)
    pipe = numbers(20).rsample(0.05).with_epoch(5)
    assert len(list(pipe)) == 5


def test_an_endless_mixture_reaches_the_data_of_all_workers() -> None:
    one, other = numbers(1).sharding_filter(), numbers(7).sharding_filter().filter(is_below_2)
    pipe = one.mix_samples(other, stop="never").with_epoch(12)
    assert [len(epoch) for epoch in read2(pipe, 3, 2)] == [12] * 2


def test_workers_that_end_with_each_epoch_restart() -> None:
    pipe = numbers(12).sharding_filter().with_epoch(4)
    assert read(pipe, 2, 3, persistent=False) == [[0, 1, 2, 3]] * 3
    assert read2(pipe, 2, 3, service=MultiProcessingReadingService) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_each_worker_counts_separately_without_a_split() -> None:
    epochs = read2(numbers(4).with_epoch(3), 2, 2)
    assert [sorted(epoch) for epoch in epochs] == [[0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 3, 3]]


def of_process(sample: dict[str, Any]) -> str:
    return f"{os.getpid()} {sample['__key__']}"


def by_process(items: list[str]) -> list[list[str]]:
    """Return the keys of each process, in the order of their first items."""
    found: dict[str, list[str]] = {}
    for item in items:
        process, key = item.split()
        found.setdefault(process, []).append(key)
    return list(found.values())


def keys_of(epochs: list[list[str]]) -> list[list[str]]:
    return [[item.split()[1] for item in epoch] for epoch in epochs]


@pytest.fixture(scope="module")
def long_shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("long")
    for name in "abcd":
        build_shard(folder / f"{name}.tar", [{"__key__": f"{name}{n:04}", "cls": "1"} for n in range(700)])
    return f"{folder}/{{a..d}}.tar"


#: The number of items after which the loop leaves each epoch.
LEFT_AFTER = (3, 1, 40, 7, 250, 12)


@pytest.mark.parametrize(("buffer", "workers"), [(5, 0), (1500, 0), (1500, 1), (5, 2)])
def test_the_next_epoch_begins_with_the_next_item_that_the_loop_has_not_received(
    workers: int, buffer: int, long_shards: str
) -> None:
    def pipe(n: int) -> Pipe:
        shards = ShardList(long_shards).shuffle().sharding_filter()
        stream: Pipe = shards.load_wds_shards().group_samples().shuffle_samples(buffer).with_epoch(n).map(of_process)
        return stream

    def load(n: int) -> Any:
        loader = DataLoader2(pipe(n), reading_service=ShardReadingService(workers))
        loader.seed(3)
        return loader

    with load(2000) as loader:
        uninterrupted = list(itertools.islice(loader, 1000))
    with load(500) as loader:
        left = [list(itertools.islice(loader, count)) for count in LEFT_AFTER]
        left.append(list(loader))
        state = loader.state_dict()
    data = StatefulShards(pipe(500), seed=3)
    tracked = [
        list(itertools.islice(data.tracked(DataLoader(data, batch_size=None, num_workers=workers)), count))
        for count in (*LEFT_AFTER, 500)
    ]
    assert keys_of(left) == keys_of(tracked)
    for found, whole in zip(by_process([*itertools.chain(*left)]), by_process(uninterrupted), strict=True):
        assert found[: len(whole)] == whole[: len(found)]
    with load(500) as loader:
        loader.load_state_dict(state)
        resumed = list(loader)
    assert len(resumed) == 500
    assert not {*keys_of([resumed])[0]} & {*keys_of(left)[-1]}


@pytest.mark.filterwarnings("ignore:The loop has left an epoch of .with_epoch.* depends on timing")
@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupted_epoch_under_a_loader(workers: int) -> None:
    pipe = numbers(10_000).sharding_filter().with_epoch(1000)
    with DataLoader2(pipe, reading_service=ShardReadingService(workers)) as loader:
        first = list(itertools.islice(loader, 10))
        second = list(loader)
    assert first == list(range(10))
    assert len(second) == 1000
    assert min(second) > 9  # no item repeats
    assert workers or second == list(range(10, 1010))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_empty_source_is_an_error(workers: int) -> None:
    for pipe in (numbers(0), numbers(0).shuffle().sharding_filter(), numbers(4).sharding_filter().filter(is_none)):
        with pytest.raises(EmptySourceError, match=r"with_epoch needs \d more items?, but its source yielded none"):
            read2(pipe.with_epoch(5), workers, 1)
    with pytest.raises(EmptySourceError, match="resample_wds_shards has no shards to draw from"):
        read2(numbers(0).resample_wds_shards(), workers, 1)


def is_none(_: int) -> bool:
    return False


@pytest.mark.parametrize("service", [ShardReadingService, MultiProcessingReadingService])
def test_the_items_of_workers_are_not_a_stream(service: Any) -> None:
    """Their source restarts only when the loader starts an epoch, so a second pass would wait forever."""
    pipe: Any = InMain(numbers(4).sharding_filter())
    with pytest.raises(RuntimeError, match=r"(?s)with_epoch must be able to restart.*before the one that stays"):
        read2(pipe.with_epoch(3), 2, 1, service=service)


def test_an_error_ends_the_pass_and_the_next_epoch_starts_another() -> None:
    pipe = Failing().with_epoch(2)
    with pytest.raises(OSError, match="no such disk"):
        list(pipe)
    assert list(pipe) == [2, 3]


def test_a_copy_of_a_stream_starts_at_the_beginning() -> None:
    pipe = numbers(10).with_epoch(3)
    list(pipe)
    assert list(pickle.loads(pickle.dumps(pipe))) == [0, 1, 2]
    assert list(pipe) == [3, 4, 5]


def test_a_loaded_state_begins_an_epoch_unless_it_counts_its_items() -> None:
    pipe: Any = numbers(10).with_epoch(3)
    pipe.load_state_dict({"stream": None})
    assert pipe.snapshot() == {"yielded": 0, "stream": None}
    assert list(pipe) == [0, 1, 2]


def test_forked_workers_leave_the_stream_of_the_main_process_alone(tmp_path: Path) -> None:
    """Otherwise, they would continue to read at the shared offset of the same open file."""
    build_shard(tmp_path / "a.tar", [{"__key__": str(number), "bin": bytes(5000)} for number in range(100)])
    pipe = ShardList(str(tmp_path / "a.tar")).sharding_filter().load_wds_shards().group_samples().to_tuple("__key__")
    pipe = pipe.with_epoch(10)
    keys = [key for (key,) in pipe]
    forked = [key for (key,) in itertools.chain(*read(pipe, 1, 2))]
    keys += [key for (key,) in pipe]
    assert forked == keys == list(map(str, range(20)))


def test_a_stream_of_shards_leaves_no_file_open(tmp_path: Path) -> None:
    build_shard(tmp_path / "a.tar", [{"__key__": str(number), "bin": bytes(5000)} for number in range(100)])
    before = len(os.listdir("/proc/self/fd"))
    pipe = ShardList(str(tmp_path / "a.tar")).load_wds_shards().group_samples().with_epoch(3)
    list(pipe)
    assert len(os.listdir("/proc/self/fd")) > before
    del pipe
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_epoch_has_a_length() -> None:
    pipe = numbers(3).sharding_filter().with_epoch(10)
    loader = DataLoader(pipe, batch_size=None, num_workers=3)
    assert len(pipe) == len(loader) == len(list(loader)) == 10


# resample_wds_shards


def drawn(
    size: int = 10,
    count: int = 50,
    *,
    seed: int = 0,
    loader_seed: int | None = 3,
    groups: tuple[tuple[int, int, SHARDING_PRIORITIES], ...] = (),
) -> list[Any]:
    pipe = numbers(size).resample_wds_shards(seed=seed)
    for group in groups:
        apply_sharding(pipe, *group)
    if loader_seed is not None:
        apply_random_seed(pipe, torch.Generator().manual_seed(loader_seed))
    return list(itertools.islice(pipe, count))


def test_draws_depend_only_on_seed_rank_and_worker() -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"seed": 1},
        {"loader_seed": 4},
        {"groups": ((2, 1, RANKS),)},
        {"groups": ((2, 1, OF_A_RANK),)},
        {"groups": ((2, 1, RANKS), (2, 1, OF_A_RANK))},
        {"loader_seed": None},
        {"loader_seed": None},
    ]
    lists = [drawn(**variant) for variant in variants]
    assert [drawn(**variant) for variant in variants[:-2]] == lists[:-2]
    assert len(set(map(tuple, lists))) == len(variants)


@pytest.mark.parametrize("workers", WORKERS)
def test_workers_draw_separately_in_each_epoch(reader: Reader, workers: int) -> None:
    pipe = numbers(1000).resample_wds_shards(31)
    assert len(pipe) == 31
    runs = [reader(pipe, workers, 3, seed) for seed in (7, 7, None)]
    assert runs[0] == runs[1]
    assert all(len(epoch) == 31 for run in runs for epoch in run)
    instances = max(workers, 1)
    streams = [tuple(epoch[worker::instances]) for run in runs[1:] for epoch in run for worker in range(instances)]
    assert len(set(streams)) == 2 * 3 * instances


def test_a_count_is_that_of_a_rank() -> None:
    for rank in range(2):
        pipe = numbers(4).resample_wds_shards(5)
        apply_sharding(pipe, 2, rank, RANKS)
        apply_sharding(pipe, 2, 1, OF_A_RANK)
        assert len(pipe) == len(list(pipe)) == 2
    with pytest.raises(TypeError, match="endlessly"):
        len(numbers(4).resample_wds_shards())


@pytest.mark.parametrize("workers", [0, 2])
def test_resampling_cannot_be_split_again(workers: int) -> None:
    with pytest.raises(RuntimeError, match="Sharding twice"):
        read2(numbers(4).resample_wds_shards(5).sharding_filter(), workers, 1)
    with pytest.raises(RuntimeError, match="Sharding twice"):
        read2(numbers(4).sharding_filter().resample_wds_shards(5), workers, 1)


def test_sharding_groups_are_kept_as_torch_keeps_them() -> None:
    pipe = numbers(4).resample_wds_shards()
    ours, theirs = pipe, numbers(4).sharding_filter()
    for stage in (ours, theirs):
        stage.apply_sharding(3, 2, RANKS)
        stage.apply_sharding(2, 1, OF_A_RANK)
        with pytest.raises(RuntimeError, match="cannot mix DEFAULT and"):
            stage.apply_sharding(2, 1)
        with pytest.raises(ValueError, match=r"2.*2"):
            stage.apply_sharding(2, 2, RANKS)
    assert ours.groups == theirs.groups


# Streams that yield nothing


@pytest.fixture
def urls(tmp_path: Path) -> str:
    return write_numbered(tmp_path, [4] * 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda shards: samples_of(shards.resample_wds_shards()).filter(is_none).map(str).with_epoch(3),
        lambda shards: samples_of(shards.resample_wds_shards()).shuffle_samples(50).filter(is_none).batch(3),
        lambda shards: samples_of(shards.sharding_filter()).filter(is_none).cycle().batch(2).with_epoch(2),
    ],
    ids=["drawn and cut", "behind a buffer", "repeated and cut"],
)
def test_a_stream_whose_items_are_all_dropped_is_an_error(make: Callable[[Any], Pipe], urls: str) -> None:
    for load in (iter, lambda pipe: iter(DataLoader(pipe, batch_size=None))):
        with pytest.raises(EmptySourceError, match=r"gone through all of its shards|source has ended without any"):
            next(load(make(ShardList(urls))))
    with pytest.raises(EmptySourceError):
        read2(make(ShardList(urls)), 2, 1)


@pytest.mark.parametrize("workers", WORKERS)
def test_an_epoch_of_many_passes_over_split_samples_is_not_an_error(workers: int, urls: str) -> None:
    split = samples_of(ShardList(urls)).sharding_filter().with_epoch(500)
    (epoch,) = read2(split, workers, 1)
    assert len(epoch) == 500
    with pytest.raises(EmptySourceError, match="gone through all of its shards"):
        read2(samples_of(ShardList(urls)).sharding_filter().filter(is_none).cycle().batch(2).with_epoch(2), workers, 1)


def samples_of(shards: Any) -> Any:
    return shards.load_wds_shards().group_samples()


class KeepsLate:
    """Drops the first 20 items."""

    count = 0

    def __call__(self, item: object) -> bool:
        self.count += 1
        return self.count > 20


def test_a_filter_after_a_buffer_waits_until_it_is_full(urls: str) -> None:
    drawn = samples_of(ShardList(urls).resample_wds_shards()).shuffle_samples(500, initial=500)
    assert next(iter(drawn.filter(KeepsLate())))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_unbatched_in_many_short_passes_are_not_an_empty_stream(urls: str, workers: int) -> None:
    """The stages before .unbatch_samples() are copied for each pass; copies must not be mistaken for each other."""
    shards = ShardList(urls).slice_samples(1).sharding_filter()
    pipe = samples_of(shards).to_tuple("__key__").batch(2).collate().unbatch_samples().with_epoch(100)
    assert [len(epoch) for epoch in read2(pipe, workers, 2)] == [100, 100]
