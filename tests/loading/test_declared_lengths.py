"""A declared length that does not come true: a warning on one rank, an error in place of a wait on several."""

from __future__ import annotations

import multiprocessing
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, IterDataPipe
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService

from wds_datapipes import ShardList, ShardReadingService, StatefulShards
from wds_datapipes.testing import build_shard

Pipe = IterDataPipe[Any]
SIZES = (5, 2, 4, 1)
TOTAL = sum(SIZES)


@pytest.fixture(autouse=True)
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for shard, size in enumerate(SIZES):
        build_shard(f"{shard}.tar", [{"__key__": f"{shard}-{number}", "cls": str(number)} for number in range(size)])


def samples() -> Pipe:
    pipe: Pipe = ShardList("{0..3}.tar").sharding_filter().load_wds_shards().group_samples().to_tuple("__key__")
    return pipe


def with_service(pipe: Pipe, workers: int, **options: Any) -> Iterator[Any]:
    with DataLoader2(pipe, reading_service=ShardReadingService(workers, **options)) as loader:
        loader.seed(1)
        yield from loader


def with_torchdatas_service(pipe: Pipe, workers: int) -> Iterator[Any]:
    service = MultiProcessingReadingService(workers)
    with DataLoader2(pipe, reading_service=service) as loader:
        yield from loader


def with_stateful_shards(pipe: Pipe, workers: int, **options: Any) -> Iterator[Any]:
    data = StatefulShards(pipe, **options)
    yield from data.tracked(DataLoader(data, batch_size=None, num_workers=workers))


LOADERS = [with_service, with_torchdatas_service, with_stateful_shards]
every_loader = pytest.mark.parametrize("loader", LOADERS)
workers_0_and_2 = pytest.mark.parametrize("workers", [0, 2])


@every_loader
@workers_0_and_2
@pytest.mark.parametrize("declared", [TOTAL - 3, TOTAL, TOTAL + 3])
def test_one_rank_warns_of_both_numbers(loader: Callable[..., Iterator[Any]], workers: int, declared: int) -> None:
    text = rf"\.with_length\(\) declares an epoch of {declared} items of the loader, but {TOTAL} came\. Use .with_epoch"
    with pytest.warns(UserWarning, match=text) if declared != TOTAL else nullcontext():
        assert len(list(loader(samples().with_length(declared), workers))) == TOTAL


@pytest.mark.parametrize("loader", [with_service, with_stateful_shards])
def test_derived_lengths_are_compared_where_they_are_exact(loader: Callable[..., Iterator[Any]]) -> None:
    with pytest.warns(UserWarning, match=r"an epoch of 8 items of the loader, but 6 came"):
        assert len(list(loader(samples().with_length(TOTAL + 4).batch(2), 0))) == TOTAL // 2
    # Each worker has a last batch of its own.
    assert len(list(loader(samples().with_length(TOTAL).batch(2), 2))) == TOTAL // 2 + 1
    assert len(list(loader(samples().with_length(9).batch(2), 0, distributed=(0, 2)))) == 5


@pytest.mark.parametrize("loader", [with_service, with_stateful_shards])
@workers_0_and_2
@pytest.mark.parametrize(
    ("rank", "declared", "found", "items"), [(0, 12, "9", 9), (1, 4, "3", 3), (0, 8, "more than 8", 8), (1, 3, "", 3)]
)
def test_several_ranks_stop_with_an_error(
    loader: Callable[..., Iterator[Any]], workers: int, rank: int, declared: int, found: str, items: int
) -> None:
    received = []
    text = f"declares an epoch of {declared} items of the loader of rank {rank} of 2, but {found} came, and the ranks"
    with pytest.raises(RuntimeError, match=re.escape(text)) if found else nullcontext():
        for item in loader(samples().with_length(declared), workers, distributed=(rank, 2)):
            received.append(item)  # noqa: PERF402  those before the error count
    assert len(received) == items


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rest_of_an_epoch_is_not_compared(workers: int) -> None:
    pipe = samples().with_length(TOTAL)
    service = ShardReadingService(workers)
    with DataLoader2(pipe, reading_service=service) as loader:
        loader.seed(1)
        items = iter(loader)
        begun = [next(items) for _ in range(5)]
        state = loader.state_dict()
    with DataLoader2(samples().with_length(TOTAL), reading_service=ShardReadingService(workers)) as loader:
        loader.load_state_dict(state)
        assert len(list(loader)) == TOTAL - len(begun)
        assert len(list(loader)) == TOTAL
    data = StatefulShards(samples().with_length(TOTAL), seed=1)
    tracked = DataLoader(data, batch_size=None, num_workers=workers)
    data.load_state_dict(state)
    assert len(list(data.tracked(tracked))) == TOTAL - len(begun)
    assert len(list(data.tracked(tracked))) == TOTAL


@pytest.mark.parametrize("loader", [with_service, with_stateful_shards])
def test_lengths_of_the_sources_of_a_mixture_are_not_compared(loader: Callable[..., Iterator[Any]]) -> None:
    def mixture() -> Pipe:
        pipe: Pipe = samples().with_length(40).mix_samples(samples().with_length(50), weights=[40, 50], stop="all")
        return pipe

    assert len(list(loader(mixture(), 0, distributed=(0, 2)))) == 18


def test_an_abandoned_epoch_is_not_compared() -> None:
    with DataLoader2(samples().with_length(TOTAL + 1), reading_service=ShardReadingService(2)) as loader:
        for _ in zip(range(3), loader, strict=False):
            pass


def train(rank: int, folder: Path, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    warnings.simplefilter("error")
    service = ShardReadingService(1, distributed=True, timeout_s=120)
    steps = [None, None]
    try:
        with DataLoader2(samples().with_length(6), reading_service=service) as loader:
            loader.seed(1)
            for number, _ in enumerate(loader):
                dist.all_gather_object(steps, number)  # every step waits for the other rank
    except RuntimeError as error:
        results.put((rank, str(error)))
    finally:
        results.close()
        results.join_thread()


def test_ranks_of_different_lengths_do_not_wait(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    processes = [context.Process(target=train, args=(rank, tmp_path, results)) for rank in range(2)]
    for process in processes:
        process.start()
    failed, text = results.get(timeout=120)
    assert failed == 1
    assert "declares an epoch of 6 items of the loader of rank 1 of 2, but 3 came" in text
    processes[1].join(120)
    results.get(timeout=120)  # the other rank has lost its partner, as torchrun would notice
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
