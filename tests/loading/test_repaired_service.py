"""The laws of torchdata's reading service once it is patched, with real worker processes."""

from __future__ import annotations

import gc
import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import (
    DataLoader2,
    DistributedReadingService,
    MultiProcessingReadingService,
    SequentialReadingService,
)
from torchdata.datapipes.iter import IterableWrapper

PREFETCHES = list(itertools.product((0, 10), (0, 10)))
#: Whether all combinations are tried; otherwise each half of the configurations is tried with all prefetches.
IS_WHOLE = bool(os.environ.get("WHOLE_SWEEPS"))

Item = tuple[int, int]


class Counts(IterDataPipe[Item]):
    """Yields ``(worker, number)``; each epoch and each worker has its own count of numbers."""

    def __init__(self, epochs: list[list[int]]) -> None:
        self.epochs = epochs
        self.epoch = -1
        self.worker = 0

    def apply_sharding(self, num_of_instances: int, instance_id: int, sharding_group: object = None) -> None:
        self.worker = instance_id

    def __iter__(self) -> Iterator[Item]:
        self.epoch += 1
        for number in range(self.epochs[self.epoch][self.worker]):
            yield self.worker, number


def round_robin(counts: list[int]) -> list[Item]:
    return [(name, turn) for turn in range(max(counts)) for name, count in enumerate(counts) if turn < count]


def load(pipe: IterDataPipe[Any], workers: int = 2, main: int = 10, worker: int = 10) -> DataLoader2[Any]:
    service = MultiProcessingReadingService(workers, "fork", main_prefetch_cnt=main, worker_prefetch_cnt=worker)
    return DataLoader2(pipe, reading_service=service)


CONFIGURATIONS = {
    1: [[count] for count in range(9)],
    2: [list(counts) for counts in itertools.product(range(9), repeat=2)],
    3: [list(counts) for counts in itertools.product(range(5), repeat=3)],
    4: [list(counts) for counts in itertools.product((0, 1, 2, 5), repeat=4)],
    8: [random.Random(seed).choices((0, 0, 1, 2, 7, 20), k=8) for seed in range(40)],
}


@pytest.mark.parametrize(("main", "worker"), PREFETCHES)
@pytest.mark.parametrize("workers", CONFIGURATIONS)
def test_every_configuration_of_uneven_workers(workers: int, main: int, worker: int) -> None:
    epochs = CONFIGURATIONS[workers] if IS_WHOLE else CONFIGURATIONS[workers][int(main == worker) :: 2]
    with load(Counts(epochs), workers, main, worker) as loader:
        wrong = [counts for counts in epochs if list(loader) != round_robin(counts)]
    assert wrong == []


def is_kept(number: int) -> bool:
    return number % 4 != 1 and not 40 < number < 60


@pytest.mark.filterwarnings("ignore:Some child DataPipes are not exhausted")  # by the dispatching process, rightly
@pytest.mark.parametrize(("main", "worker"), PREFETCHES)
def test_uneven_workers_after_a_dispatching_process(main: int, worker: int) -> None:
    pipe = IterableWrapper(range(100)).sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)
    with load(pipe.filter(is_kept), 3, main, worker) as loader:
        for _ in range(3):
            assert sorted(loader) == list(filter(is_kept, range(100)))
            next(iter(loader))


@pytest.mark.parametrize(("main", "worker"), PREFETCHES)
def test_interrupting_anywhere_and_iterating_again(main: int, worker: int) -> None:
    counts = [7, 3, 0]
    with load(Counts([counts] * 60), 3, main, worker) as loader:
        for taken in range(12):
            assert list(itertools.islice(loader, taken)) == round_robin(counts)[:taken]
            assert list(loader) == round_robin(counts)


@pytest.mark.parametrize("main", [0, 10])
def test_limit_and_resume_lose_nothing(main: int) -> None:
    with load(Counts([[9, 4]]), main=main) as loader:
        iterator = iter(loader)
        iterator.limit(3)
        items = list(iterator)
        assert len(items) == 3
        iterator.resume()
        items += list(iterator)
        assert len(items) == 6
        iterator.limit(None)
        iterator.resume()
        assert items + list(iterator) == round_robin([9, 4])


def test_the_first_epoch_of_a_seed_is_that_of_torchdata() -> None:
    """The order was recorded with unpatched torchdata 0.7.1 and 0.9.0."""
    with load(IterableWrapper(range(12)).shuffle().sharding_filter()) as loader:
        loader.seed(11)
        assert list(loader) == [10, 0, 11, 7, 5, 9, 2, 6, 1, 3, 4, 8]


def shuffled() -> IterDataPipe[int]:
    pipe: IterDataPipe[int] = IterableWrapper(range(50)).shuffle().sharding_filter().shuffle()
    return pipe


def test_seeding_before_each_epoch_repeats_the_order() -> None:
    with load(shuffled()) as loader:
        epochs = []
        for _ in range(2):
            loader.seed(4)
            epochs.append(list(loader))
    assert epochs[0] == epochs[1]


def test_an_epoch_can_be_repeated_from_its_state() -> None:
    with load(shuffled()) as loader:
        loader.seed(4)
        list(loader)
        second = list(loader)
        state = loader.state_dict()
    with DataLoader2.from_state(state, MultiProcessingReadingService(2, "fork")) as again:
        again._restore_checkpoint_beginning_of_epoch()
        assert list(again) == second


def test_a_torch_seed_makes_an_unseeded_run_reproducible() -> None:
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with load(shuffled()) as loader:
            runs.append([list(loader), list(loader)])
    assert runs[0] == runs[1] != runs[2]


def test_after_a_distributed_service() -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        services = SequentialReadingService(DistributedReadingService(), MultiProcessingReadingService(2, "fork"))
        with DataLoader2(shuffled().filter(is_kept), reading_service=services) as loader:
            loader.seed(3)
            epochs = [list(loader) for _ in range(3)]
            next(iter(loader))
    finally:
        torch.distributed.destroy_process_group()
    assert all(sorted(epoch) == list(filter(is_kept, range(50))) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_shutdown_leaves_no_process_thread_or_descriptor() -> None:
    def cycle() -> None:
        loader = load(Counts([[100, 100]] * 2))
        next(iter(loader))
        loader.shutdown()

    cycle()  # descriptors that torch and multiprocessing open only once
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    children = psutil.Process().children()
    for _ in range(3):
        cycle()
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert psutil.Process().children() == children


def test_shutdown_twice_and_before_any_epoch() -> None:
    loader = load(Counts([[3, 3]]))
    loader.shutdown()
    loader.shutdown()
    with pytest.raises(RuntimeError, match="already been shut down"):
        iter(loader)


def test_a_copy_in_a_forked_process_does_not_end_the_workers() -> None:
    with load(Counts([[5, 5]])) as loader:
        iterator = iter(loader)
        items = [next(iterator)]
        child = os.fork()
        if not child:
            loader.shutdown()
            os._exit(0)
        os.waitpid(child, 0)
        assert items + list(iterator) == round_robin([5, 5])


def fail_in_worker_1(item: Item) -> Item:
    if item[0] == 1:
        raise LookupError(f"no such item: {item}")
    return item


@pytest.mark.parametrize(("main", "worker"), PREFETCHES)
def test_an_error_of_an_abandoned_item_is_raised_in_the_next_epoch(main: int, worker: int) -> None:
    with load(Counts([[5, 5]] * 2).map(fail_in_worker_1), main=main, worker=worker) as loader:
        assert next(iter(loader)) == (0, 0)
        with pytest.raises(LookupError, match="no such item"):
            list(loader)


def test_failed_initialization_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchdata.dataloader2 import communication

    def refuse(pipes: object) -> None:
        raise LookupError("refused")

    monkeypatch.setattr(communication.iter, "_IterateQueueDataPipes", refuse)
    loader = load(Counts([[5, 5]]))
    # multiprocessing has one that tracks resources, once a test has spawned a worker.
    children = psutil.Process().children()
    with pytest.raises(LookupError, match="refused"):
        iter(loader)
    assert psutil.Process().children() == children


SCRIPT = """
from wds_datapipes.loading.torchdata_patches.patches import apply
apply()
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService
from torchdata.datapipes.iter import IterableWrapper

loader = DataLoader2(IterableWrapper(range(1000)).sharding_filter(), reading_service=MultiProcessingReadingService(2))
iterator = iter(loader)
print(next(iterator), *[process.pid for process, _, _ in loader.reading_service._worker_processes])
"""


def test_the_end_of_the_interpreter_ends_the_workers() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=600
    )
    first, *workers = map(int, done.stdout.split())
    assert first == 0
    assert not any(psutil.pid_exists(pid) for pid in workers)
    assert done.stderr == ""


def test_spawned_workers_are_patched_too() -> None:
    script = Path(__file__).with_name("spawned.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.splitlines() == [
        "epochs: [0, 1000, 1001] [0, 1000, 1001]",
        "PicklingError: part 'meta' is an object of type _thread.lock",
        "WorkerDiedError: ended with exit code 1",
    ]
