"""``process_shards``: pipelines of shards on other processes, in order, exactly once, and resumed exactly."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import distributed
import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.errors import DecodeError, StateError, WorkerDiedError
from wds_datapipes.loading.report import count_skipped
from wds_datapipes.testing import build_shard

SHARDS, SAMPLES = 7, 5


@pytest.fixture
def pattern(tmp_path: Path) -> str:
    for shard in range(SHARDS):
        build_shard(tmp_path / f"{shard}.tar", [{"__key__": f"{shard}-{n}", "cls": f"{n}"} for n in range(SAMPLES)])
    return f"{tmp_path}/{{0..{SHARDS - 1}}}.tar"


@pytest.fixture
def threads() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def batches(urls: list[str]) -> Any:
    pipe: Any = ShardList(urls).load_wds_shards().group_samples().wds_decode()
    return pipe.to_tuple("__key__", "cls").batch(2).collate()


def draw(sample: dict[str, Any], rng: Random) -> tuple[str, float]:
    return sample["__key__"], rng.random()


def random_numbers(urls: list[str]) -> Any:
    pipe: Any = ShardList(urls).load_wds_shards().group_samples().shuffle_samples(3)
    return pipe.map_samples_with_rng(draw)


def dividing(urls: list[str], on_error: Any = "raise") -> Any:
    return ShardList(urls).load_wds_shards().group_samples().wds_decode(cls=divide, on_error=on_error)


def divide(data: bytes) -> float:
    return 1 / int(data)


def die(urls: list[str]) -> Any:
    if urls[0].endswith("3.tar"):
        os.kill(os.getpid(), signal.SIGKILL)
    return batches(urls)


def noted(urls: list[str]) -> Any:
    """Note the process in the name of a file."""
    Path(urls[0]).with_suffix(f".{os.getpid()}").touch()
    return batches(urls)


def keys(items: Any) -> list[str]:
    return [key for batch in items for key in batch[0]]


def all_keys() -> list[str]:
    return [f"{shard}-{n}" for shard in range(SHARDS) for n in range(SAMPLES)]


@pytest.mark.parametrize("prefetch", [0, 4])
def test_the_items_are_those_of_each_shard_in_order(pattern: str, threads: Executor, prefetch: int) -> None:
    pipe = ShardList(pattern).process_shards(batches, executor=threads, prefetch_shards=prefetch)
    for _ in range(2):
        assert keys(pipe) == all_keys()


class CountingExecutor(Executor):
    """Runs nothing until it is asked for a result, and counts the tasks."""

    submitted = 0

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.submitted += 1
        done: Future[Any] = Future()
        done.set_result(function(*args, **kwargs))
        return done


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_slow_loop_holds_the_cluster_back(pattern: str, prefetch: int) -> None:
    executor = CountingExecutor()
    items = iter(ShardList(pattern).process_shards(batches, executor=executor, prefetch_shards=prefetch))
    for batch in range(3 * SHARDS):
        next(items)
        assert executor.submitted == min(SHARDS, batch // 3 + 1 + prefetch)


def loader(pattern: str, build: Any, executor: Executor) -> DataLoader2[Any]:
    pipe = ShardList(pattern).shuffle().sharding_filter().process_shards(build, executor=executor, prefetch_shards=2)
    loader: DataLoader2[Any] = DataLoader2(pipe, reading_service=ShardReadingService(num_workers=0))
    loader.seed(3)
    return loader


@pytest.mark.parametrize("build", [batches, random_numbers])
def test_a_resumed_run_continues_with_the_next_item(pattern: str, threads: Executor, build: Any) -> None:
    with loader(pattern, build, threads) as whole:
        epochs = [[repr(item) for item in whole] for _ in range(2)]
    assert epochs[0] != epochs[1]
    for cut in (0, 2, 7, len(epochs[0]) - 1):
        with loader(pattern, build, threads) as first:
            items = iter(first)
            head = [repr(next(items)) for _ in range(cut)]
            state = first.state_dict()
        with loader(pattern, build, threads) as second:
            second.load_state_dict(state)
            assert head + [repr(item) for item in second] == epochs[0]
            assert [repr(item) for item in second] == epochs[1]


def test_errors_are_raised_and_skipped_samples_counted(pattern: str, threads: Executor) -> None:
    with pytest.raises(DecodeError, match=r"'0-0' in shard '\S+/0\.tar'"):
        list(ShardList(pattern).process_shards(dividing, executor=threads))
    pipe = ShardList(pattern).process_shards(partial(dividing, on_error="skip"), executor=threads)
    assert len(list(pipe)) == SHARDS * (SAMPLES - 1)
    assert count_skipped(pipe).counts == {"wds_decode: DecodeError": SHARDS}


def test_a_process_that_dies_is_an_error_if_the_executor_does_not_replace_it(pattern: str) -> None:
    with ProcessPoolExecutor(2, get_context("fork")) as executor:
        items = iter(ShardList(pattern).process_shards(die, executor=executor))
        with pytest.raises(WorkerDiedError, match=r"without a result for \S+\.tar"):
            list(items)


def test_wrong_arguments_are_errors(threads: Executor, pattern: str) -> None:
    wrong: Any = "tcp://scheduler:8786"
    with pytest.raises(TypeError, match=r"not 'tcp://scheduler:8786'; for Dask, pass client\.get_executor"):
        ShardList(pattern).process_shards(batches, executor=wrong)
    with pytest.raises(ValueError, match="prefetch_shards must be at least 0, not -1"):
        ShardList(pattern).process_shards(batches, executor=threads, prefetch_shards=-1)
    with pytest.raises(TypeError, match="needs a function that returns a pipeline, not list"):
        list(ShardList(pattern).process_shards(list, executor=threads))


def test_dask_replaces_a_process_that_is_killed(pattern: str, tmp_path: Path) -> None:
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        distributed.LocalCluster(**options) as cluster,
        distributed.Client(cluster) as client,
        client.get_executor() as executor,
    ):
        items = iter(ShardList(pattern).process_shards(noted, executor=executor, prefetch_shards=3))
        found = [next(items)]
        os.kill(int(next(tmp_path.glob("0.[0-9]*")).suffix[1:]), signal.SIGKILL)
        found += items
    assert keys(found) == all_keys()
    assert threading.active_count() < 100
    processes = {path.suffix for path in tmp_path.glob("*.[0-9]*")}
    assert len(processes) >= 2
    assert torch.stack([batch[1].sum() for batch in found]).sum() == SHARDS * sum(range(SAMPLES))


def test_a_shard_that_is_shorter_than_in_the_state_is_an_error(tmp_path: Path, threads: Executor) -> None:
    def pipeline(shards: int, samples: int) -> Any:
        urls = [f"{tmp_path}/{shard}.tar" for shard in range(shards)]
        for url in urls:
            build_shard(url, [{"__key__": f"{n}", "cls": f"{n}"} for n in range(samples)])
        return IterableWrapper(urls).process_shards(batches, executor=threads)

    first = pipeline(SHARDS, SAMPLES)
    items = iter(first)
    for _ in range(2 * 3 + 2):
        next(items)
    state = first.state_dict()
    fewer_items = r"after 2 items of \S+/2\.tar, which yields only 1 now"
    for shards, samples, text in (1, SAMPLES, "after 2 shards .* only 1 now"), (SHARDS, 1, fewer_items):
        second = pipeline(shards, samples)
        second.load_state_dict(state)
        with pytest.raises(StateError, match=text):
            list(second)
