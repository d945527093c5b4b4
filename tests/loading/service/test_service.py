"""`ShardReadingService` provides in ``DataLoader2`` what torchdata's own service promises."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import (
    DataLoader2,
    DistributedReadingService,
    MultiProcessingReadingService,
    SequentialReadingService,
)
from torchdata.dataloader2.adapter import Adapter, Shuffle
from torchdata.dataloader2.graph import list_dps, traverse_dps
from torchdata.datapipes.iter import IterableWrapper
from torchdata.datapipes.map import SequenceWrapper

from wds_datapipes import ShardReadingService
from wds_datapipes.loading.transport.protocol import Command, Kind, new_channel
from wds_datapipes.loading.transport.receiver import Receiver
from wds_datapipes.loading.transport.sender import Sender
from wds_datapipes.loading.workers.connection import WorkerConnection
from wds_datapipes.pipes.inspection import upstream

Pipe = IterDataPipe[Any]
Item = tuple[int, int]

#: In each worker, and in all workers together.
PREFETCHES = list(itertools.product((0, 10), (0, 10)))

#: By torchdata if one branch is longer, and by an interrupted dispatching process: rightly.
pytestmark = pytest.mark.filterwarnings("ignore:Some child DataPipes are not exhausted")


# pipelines


class Counts(IterDataPipe[Item]):
    """Yields ``(worker, number)``; each worker has its own count of numbers."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts
        self.worker = 0

    def apply_sharding(self, num_of_instances: int, instance_id: int, sharding_group: object = None) -> None:
        self.worker = instance_id

    def __iter__(self) -> Iterator[Item]:
        for number in range(self.counts[self.worker]):
            yield self.worker, number


class InMain(IterDataPipe[Any]):
    """Stays in the main process."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def is_replicable(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


class Pids(IterDataPipe[Any]):
    """Adds the id of the process that it runs in."""

    def __init__(self, source: Pipe) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            yield *item, os.getpid()


class Slow(IterDataPipe[Any]):
    """Yields some items slowly."""

    def __init__(self, source: Pipe, seconds: float, remainder: int, divisor: int = 3) -> None:
        self.source = source
        self.seconds = seconds
        self.remainder, self.divisor = remainder, divisor

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            if item % self.divisor == self.remainder:
                time.sleep(self.seconds)
            yield item


class Pausable(IterDataPipe[Any]):
    """Adds how often it was paused and resumed."""

    def __init__(self, source: Pipe) -> None:
        self.source = source
        self.said: list[str] = []

    def pause(self) -> None:
        self.said.append("pause")

    def resume(self) -> None:
        self.said.append("resume")

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            yield (*item, " ".join(self.said)) if isinstance(item, tuple) else (item, " ".join(self.said))


class Failing(IterDataPipe[Any]):
    """Raises instead of yielding an item, in the first ``epochs`` epochs, and creates the file ``told`` before."""

    def __init__(self, source: Pipe, at: Any, epochs: int = 10**6, told: Path | None = None) -> None:
        self.source = source
        self.at = at
        self.epochs = epochs
        self.told = told

    def __iter__(self) -> Iterator[Any]:
        self.epochs -= 1
        for item in self.source:
            if item == self.at and self.epochs >= 0:
                if self.told is not None:
                    self.told.touch()
                raise LookupError(f"no such item: {item}")
            yield item


def numbers(count: int = 100) -> Pipe:
    pipe: Pipe = IterableWrapper(range(count))
    return pipe


def dispatch(pipe: Pipe) -> Pipe:
    rest: Pipe = pipe.sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)
    return rest


def load(
    pipe: Any, workers: int = 2, worker: int = 10, main: int = 10, service: Any = ShardReadingService, **options: Any
) -> DataLoader2[Any]:
    return DataLoader2(pipe, reading_service=service(workers, "fork", worker, main, **options))


def round_robin(counts: list[int]) -> list[Item]:
    return [(name, turn) for turn in range(max(counts)) for name, count in enumerate(counts) if turn < count]


def plus_one(number: int) -> int:
    return number + 1


SPLIT_OR_DISPATCHED: dict[str, Callable[[], Pipe]] = {
    "split": lambda: numbers(1000).shuffle().sharding_filter().map(plus_one).batch(8),
    "dispatched": lambda: dispatch(numbers(1000).shuffle().prefetch(20)).map(plus_one).batch(16),
}

# whole epochs, partial epochs and the end


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(("worker", "main"), PREFETCHES)
@pytest.mark.parametrize("name", SPLIT_OR_DISPATCHED)
def test_an_epoch_can_be_abandoned_and_the_loader_shut_down(name: str, worker: int, main: int) -> None:
    loader = load(SPLIT_OR_DISPATCHED[name](), 2, worker, main)
    batches = list(itertools.islice(loader, 10))
    assert len({number for batch in batches for number in batch}) == sum(map(len, batches))
    loader.shutdown()
    loader = load(SPLIT_OR_DISPATCHED[name](), 2, worker, main)
    assert sorted(number for batch in loader for number in batch) == list(range(1, 1001))
    loader.shutdown()


def test_shutdown_leaves_no_process_thread_or_descriptor() -> None:
    def cycle(forget: bool) -> None:
        loader = load(InMain(dispatch(numbers())).prefetch(3))
        next(iter(loader))
        if not forget:
            loader.shutdown()

    cycle(False)  # descriptors that torch and multiprocessing open only once
    gc.collect()
    children = psutil.Process().children()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for forget in (False, True, False):
        cycle(forget)
    gc.collect()
    assert psutil.Process().children() == children
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


@pytest.mark.parametrize("workers", [0, 2])
def test_shutdown_twice_and_before_any_epoch(workers: int) -> None:
    loader = load(numbers(), workers)
    loader.shutdown()
    loader.shutdown()
    with pytest.raises(RuntimeError, match="already been shut down"):
        iter(loader)
    with load(numbers(), workers) as loader:
        list(loader)
        loader.shutdown()
    loader.reading_service.finalize()


def test_an_iterator_ends_with_its_loader() -> None:
    loader = load(Slow(numbers().sharding_filter(), 0.1, 2), 3)
    iterator = iter(loader)
    next(iterator)
    loader.shutdown()
    with pytest.raises(RuntimeError, match=r"The connection to Worker . was shut down during a read"):
        list(iterator)


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("worker", [0, 10])
def test_a_loader_can_be_read_repeatedly(workers: int, worker: int) -> None:
    with load(numbers(10).sharding_filter(), workers, worker) as loader:
        assert [list(loader) for _ in range(3)] == [list(range(10))] * 3
        assert [item for _ in range(2) for item in loader] == [*range(10), *range(10)]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("name", ["split", "dispatched", "main process"])
def test_a_new_iterator_restarts_and_ends_the_previous_one(name: str, workers: int) -> None:
    pipes = {
        "split": numbers(10).sharding_filter(),
        "dispatched": dispatch(numbers(10)),
        "main process": InMain(numbers(10).sharding_filter()).prefetch(2),
    }
    with load(pipes[name], workers) as loader:
        assert list(loader) == list(range(10))
        first = iter(loader)
        assert [next(first), next(first)] == [0, 1]
        second = iter(loader)
        assert [next(second), next(second)] == [0, 1]
        with pytest.raises(RuntimeError, match="iterator has been invalidated"):
            next(first)
        assert list(second) == list(range(2, 10))


def test_an_unused_iterator_is_used_by_the_next_loop() -> None:
    with load(Counts([2, 2]), worker_reset_fn=count_resets) as loader:
        assert loader.reading_service.report().epoch == 0
        for _ in range(3):
            iter(loader)
        assert list(loader) == round_robin([2, 2])
        assert loader.reading_service.report().epoch == 1


def count_resets(pipe: Pipe, info: Any, seeds: Any) -> Pipe:
    return pipe


@pytest.mark.parametrize("workers", [0, 2])
def test_a_partial_and_a_whole_epoch_equal_those_without_a_service(workers: int) -> None:
    pipe = numbers().batch(2).sharding_filter().collate(list)
    runs = []
    for service in (None, ShardReadingService(workers)):
        loader = DataLoader2(pipe, reading_service=service)
        runs.append([*(batch for batch, _ in zip(loader, range(10), strict=False)), *loader])
        loader.shutdown()
    assert runs[0] == runs[1]
    assert len(runs[0]) == 60


@pytest.mark.parametrize(("worker", "main"), PREFETCHES)
def test_an_epoch_can_start_while_workers_are_busy_with_another(worker: int, main: int) -> None:
    pipe = Slow(dispatch(Slow(numbers(40), 0.005, 1, 5)), 0.005, 2)
    with load(pipe, 3, worker, main) as loader:
        for taken in (1, 2, 3, 5, 8, 13, 1, 1):
            assert list(itertools.islice(loader, taken)) == list(range(taken))
        assert list(loader) == list(range(40))


def test_an_abandoned_iterator_takes_nothing_of_the_next_epoch() -> None:
    with load(numbers(30).sharding_filter(), 3, 0, 0) as loader:
        iterator = iter(loader)
        left = loader.reading_service._pool.items()  # as a thread of the main process does
        assert next(left) == 0
        next(iterator)
        iterator = iter(loader)
        assert list(left) == []
        assert list(iterator) == list(range(30))


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("name", ["split", "dispatched", "main process"])
def test_an_empty_pipeline(name: str, workers: int) -> None:
    pipes = {
        "split": numbers(0).sharding_filter(),
        "dispatched": dispatch(numbers(0)),
        "main process": InMain(numbers(0).sharding_filter()),
    }
    with load(pipes[name], workers) as loader:
        assert [list(loader), list(loader)] == [[], []]
        with pytest.raises(StopIteration):
            next(iter(loader))


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_there_may_be_more_workers_than_items(count: int) -> None:
    with load(numbers(count).sharding_filter(), 4) as loader:
        assert [list(loader), list(loader)] == [list(range(count))] * 2


UNEVEN = [[0, 0, 9], [9, 0, 0], [1, 300, 2], [0, 1, 0], [3, 2, 1], [40, 41, 41]]


@pytest.mark.parametrize(("worker", "main"), PREFETCHES)
@pytest.mark.parametrize("counts", UNEVEN, ids=str)
def test_uneven_workers(counts: list[int], worker: int, main: int) -> None:
    with load(Counts(counts), 3, worker, main) as loader:
        assert [list(loader), list(loader)] == [round_robin(counts)] * 2


def test_a_service_can_be_used_by_many_loaders() -> None:
    service = ShardReadingService(2)
    with (
        DataLoader2(Counts([5, 3]), reading_service=service) as outer,
        DataLoader2(Counts([2, 3]), reading_service=service) as inner,
    ):
        pairs = [(one, list(inner)) for one in outer]
    assert pairs == [(one, round_robin([2, 3])) for one in round_robin([5, 3])]


def test_a_copy_in_a_forked_process_does_not_end_the_workers() -> None:
    with load(dispatch(numbers(10))) as loader:
        iterator = iter(loader)
        items = [next(iterator)]
        child = os.fork()
        if not child:
            loader.shutdown()
            os._exit(0)
        os.waitpid(child, 0)
        assert items + list(iterator) == list(range(10))
        assert list(loader) == list(range(10))


SCRIPT = """
from wds_datapipes import ShardReadingService
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper
import psutil

loader = DataLoader2(IterableWrapper(range(1000)).sharding_filter(){stage}, reading_service=ShardReadingService(2))
iterator = iter(loader)
print(next(iterator), *[process.pid for process in psutil.Process().children()])
"""


@pytest.mark.parametrize("stage", ["", ".prefetch(5)"])
def test_the_end_of_the_interpreter_ends_the_workers(stage: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT.format(stage=stage)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    first, *workers = map(int, done.stdout.split())
    assert (first, len(workers)) == (0, 2)
    assert not any(psutil.pid_exists(pid) for pid in workers)
    assert done.stderr == ""


class Refusing(IterDataPipe[Any]):
    """Can be copied by a loader, but not sent to a spawned worker."""

    refuses = False

    def __iter__(self) -> Iterator[Any]:
        yield 1

    def __getstate__(self) -> Any:
        if Refusing.refuses:
            raise LookupError("refused")
        return self.__dict__


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failed_start_leaves_nothing(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader2(Refusing(), reading_service=ShardReadingService(workers, "spawn"))
    monkeypatch.setattr(Refusing, "refuses", True)
    descriptors = len(os.listdir("/proc/self/fd"))
    children = psutil.Process().children()
    with pytest.raises(LookupError, match="refused"):
        iter(loader)
    loader.shutdown()
    # multiprocessing's process that tracks resources may have been started by this.
    left = [child for child in psutil.Process().children() if child not in children]
    assert all("resource_tracker" in " ".join(child.cmdline()) for child in left)
    del loader
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors + len(left)


# arguments of user functions


def note_init(path: Path, pipe: Pipe, info: Any) -> Pipe:
    write(path, f"init {info.worker_id} of {info.num_workers} {type(info).__name__} {type(pipe).__name__}")
    return Pids(pipe)


def note_reset(path: Path, pipe: Pipe, info: Any, seeds: Any) -> Pipe:
    write(path, f"reset {info.worker_id} of {info.num_workers} {type(seeds).__name__} {type(pipe).__name__}")
    return pipe


def write(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


def noted(path: Path, workers: int, service: Any, pipe: Pipe) -> list[str]:
    options: dict[str, Any] = {"worker_init_fn": partial(note_init, path), "worker_reset_fn": partial(note_reset, path)}
    with load(pipe, workers, service=service, **options) as loader:
        for _ in range(3):
            items = list(loader)
            assert sorted(number for number, _ in items) == list(range(8))
            assert len({pid for _, pid in items}) == max(workers, 1)
    lines = sorted(path.read_text().splitlines())
    path.unlink()
    return lines


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_user_functions_are_called_in_each_worker(workers: int, tmp_path: Path) -> None:
    pipe = numbers(8).map(as_tuple).sharding_filter()
    lines = noted(tmp_path / "noted", workers, ShardReadingService, pipe)
    number = max(workers, 1)
    assert lines == [
        *(f"init {worker} of {number} WorkerInfo ShardingFilterIterDataPipe" for worker in range(number)),
        *(f"reset {worker} of {number} SeedGenerator Pids" for worker in range(number) for _ in range(3)),
    ]


def as_tuple(number: int) -> tuple[int]:
    return (number,)


def test_the_dispatching_process_is_reset_as_in_torchdata(tmp_path: Path) -> None:
    pipe = dispatch(numbers(8).map(as_tuple))
    ours = noted(tmp_path / "noted", 3, ShardReadingService, pipe)
    place = "reset 0 of 3 SeedGenerator ShardingRoundRobinDispatcherIterDataPipe"
    assert ours.count(place) == 3
    assert len([line for line in ours if line.startswith("reset")]) == 12
    assert [line for line in ours if line.startswith("init")] == [
        f"init {worker} of 3 WorkerInfo DispatchedItems" for worker in range(3)
    ]


def shard(pipe: Pipe, info: Any) -> Pipe:
    split: Pipe = pipe.sharding_filter()
    torch.utils.data.graph_settings.apply_sharding(
        split, info.num_workers, info.worker_id, SHARDING_PRIORITIES.MULTIPROCESSING
    )
    return split


def reseed(pipe: Pipe, info: Any, seeds: Any) -> Pipe:
    pipe.source_datapipe.set_seed(123)
    return pipe


def test_user_functions_can_split_and_seed() -> None:
    with load(numbers().batch(2).shuffle(), worker_init_fn=shard, worker_reset_fn=reseed) as loader:
        epochs = [list(loader) for _ in range(2)]
    assert epochs[0] == epochs[1]
    assert sorted(number for batch in epochs[0] for number in batch) == list(range(100))


def forget_pipe(*_: Any) -> None:
    """Return nothing, an easy mistake."""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["worker_init_fn", "worker_reset_fn"])
def test_a_function_that_forgets_to_return_the_pipeline_is_named(name: str, workers: int) -> None:
    with (
        load(numbers(), workers, **dict[str, Any]({name: forget_pipe})) as loader,
        pytest.raises(TypeError, match=f"{name} must return the pipeline, but returned None"),
    ):
        list(loader)


def ask_torch(item: Any) -> Any:
    return item, get_worker_info(), torch.get_num_threads()


def test_worker_info_of_torch_is_that_of_torchdatas_workers() -> None:
    with load(numbers(4).sharding_filter().map(ask_torch)) as loader:
        assert list(loader) == [(number, None, 1) for number in range(4)]


# pause, resume and limit

TWICE_PREFETCHED = "with stages that pause"
PAUSED: dict[str, Callable[[], Pipe]] = {
    "plain": lambda: numbers(10).shuffle().sharding_filter(),
    TWICE_PREFETCHED: lambda: numbers(10).shuffle().sharding_filter().prefetch().prefetch(),
    "dispatched": lambda: dispatch(numbers(10).shuffle().prefetch(3)).prefetch(2),
    "main process": lambda: InMain(numbers(10).shuffle().sharding_filter()).prefetch(4),
}
COUNTS = [(0, 10, 10), (1, 0, 0), (1, 0, 2), (2, 0, 0), (2, 2, 0), (2, 0, 2), (2, 2, 2), (3, 10, 10)]


@pytest.mark.parametrize(("workers", "worker", "main"), COUNTS)
@pytest.mark.parametrize("name", PAUSED)
def test_a_pause_loses_nothing(name: str, workers: int, worker: int, main: int) -> None:
    with load(PAUSED[name](), workers, worker, main) as loader:
        loader.seed(1)
        for _ in range(2):
            items = []
            for number, item in enumerate(loader):
                items.append(item)
                if number in (2, 8):
                    loader._pause()
                    loader._resume()
            assert sorted(items) == list(range(10))


@pytest.mark.parametrize(("workers", "worker", "main"), COUNTS)
@pytest.mark.parametrize("name", PAUSED)
def test_limits(name: str, workers: int, worker: int, main: int) -> None:
    with load(PAUSED[name](), workers, worker, main) as loader:
        iterator = iter(loader)
        iterator.limit(3)
        first = list(iterator)
        assert len(first) == 3
        with pytest.raises(StopIteration):
            next(iterator)
        iterator.resume()
        second = list(iterator)
        assert len(second) == 3  # a limit remains in effect
        iterator.limit(None)
        iterator.resume()
        assert sorted(first + second + list(iterator)) == list(range(10))

        iterator = iter(loader)
        iterator.limit(3)
        items = list(iterator)
        iterator.limit(4)
        iterator.resume()
        items += list(iterator)
        iterator.resume()
        iterator.limit(2)
        items += list(iterator)
        assert len(items) == len(set(items)) == 9


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_comes_after_a_pause(workers: int) -> None:
    with load(numbers(10).sharding_filter(), workers) as loader:
        items = []
        for item in loader:
            items.append(item)
            if len(items) == 3:
                loader._pause()
        assert items == [0, 1, 2]
        loader._resume()
        with pytest.warns(UserWarning, match="Resume is called when `DataLoader2` is not paused"):
            loader._resume()
        assert list(loader) == list(range(10))


def test_an_epoch_can_start_during_a_pause() -> None:
    with load(dispatch(numbers(10))) as loader:
        iterator = iter(loader)
        iterator.limit(3)
        assert list(iterator) == [0, 1, 2]
        iterator = iter(loader)
        assert list(iterator) == []
        loader._resume()
        assert list(iterator) == list(range(10))


def test_workers_make_nothing_during_a_pause() -> None:
    # Ten messages of one item each, which take long enough to make.
    with load(Slow(dispatch(Slow(numbers(4000), 0.002, 0, 1)), 0.002, 0, 1), 2, 1000, 0) as loader:
        next(iter(loader))
        loader._pause()
        made = [worker.items for worker in report_of(loader)]
        for _ in range(5):
            loader._pause()  # all answer, between items if they make some
        assert [worker.items for worker in report_of(loader)] == made
        loader._resume()
        while [worker.items for worker in report_of(loader)] == made:
            time.sleep(0.01)


def report_of(loader: DataLoader2[Any]) -> list[Any]:
    report = loader.reading_service.report()
    return [*report.workers, *([report.dispatcher] if report.dispatcher is not None else [])]


def test_stages_are_paused_and_resumed_wherever_they_are() -> None:
    pipe = Pausable(InMain(Pausable(dispatch(Pausable(numbers(3000))))))
    with load(pipe, 2, 0, 0) as loader:
        iterator = iter(loader)
        assert next(iterator) == (0, "", "", "")
        loader._pause()
        loader._resume()
        once = "pause resume"
        rest = list(iterator)
        # Some items were on their way. After them, each stage has been paused once and resumed once.
        assert rest[0][3] == rest[-1][3] == once
        assert rest[-1] == (2999, once, once, once)


def test_a_pause_leaves_an_error_in_its_position(tmp_path: Path) -> None:
    with load(Failing(numbers().sharding_filter(), 11, told=tmp_path / "told")) as loader:
        iterator = iter(loader)
        items = [next(iterator)]
        while not (tmp_path / "told").exists():
            time.sleep(0.01)
        for limit in (1, 4):
            iterator.limit(limit)
            items += list(iterator)
            iterator.resume()
        iterator.limit(None)
        with pytest.raises(LookupError, match="no such item: 11"):
            items.extend(iterator)
    assert items == list(range(11))


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("first", ["answer", "items"])
def test_items_and_answers_are_not_mixed_up(first: str) -> None:
    near, far = new_channel()
    link, outlet = WorkerConnection("Worker 0", Receiver(near, window=9)), Sender(far, window=9, together=1)
    outlet.begin(1)
    link.expect(1)
    for command in (Command.PAUSE, Command.RESUME):
        link.send_command(command, None)
    outlet.put(0)
    for number in (1, 2):
        outlet.send(Kind.DONE)
        outlet.put(number)
    outlet.send(Kind.END)
    if first == "answer":
        link.wait_for_response()
    assert list(link.items()) == [0, 1, 2]  # not every paused stage stops its thread
    link.wait_for_response()
    link.cut()
    link.close()
    far.close()
    del link, outlet


def fail_to_pause(pipe: Pipe) -> Pipe:
    raise LookupError("cannot pause")


def test_an_error_of_a_pause_is_raised() -> None:
    with load(numbers(100_000).sharding_filter()) as loader:
        iterator = iter(loader)
        next(iterator)
        loader.reading_service._pause(fail_to_pause)
        loader.reading_service._resume()
        with pytest.raises(LookupError, match="cannot pause"):
            list(iterator)


def test_an_error_of_a_pause_after_the_last_item_of_the_workers_is_raised_at_once() -> None:
    with load(numbers(20).sharding_filter(), worker=10, main=0) as loader:
        iterator = iter(loader)
        found = [next(iterator)]
        loader.reading_service._pause()  # the workers answer this in turn
        loader.reading_service._resume()
        found += itertools.islice(iterator, 18)
        for _ in range(2):
            # of the first worker that had reached its end before the pause
            with pytest.raises(LookupError, match=r"(?s)in worker process [01].*cannot pause"):
                loader.reading_service._pause(fail_to_pause)
        loader.reading_service._resume()
        # The other worker's error comes among its items if the worker had not reached its end before the pause.
        with contextlib.suppress(LookupError):
            found += iterator
            assert found == list(range(20))
            assert list(loader) == list(range(20))  # an error in the loop would have shut the loader down


def limit_to(pipe: Pipe, count: int | None) -> Pipe:
    for stage in list_dps(traverse_dps(pipe)):
        if isinstance(stage, Limited):
            stage.limit = count
    return pipe


class Limited(IterDataPipe[Any]):
    """Yields the limit that it was given by the function of another reading service."""

    def __init__(self, source: Pipe) -> None:
        self.source = source
        self.limit: int | None = -1

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            yield item, self.limit


@pytest.mark.parametrize("dispatched", [False, True])
def test_a_limit_function_is_passed_on(dispatched: bool) -> None:
    pipe = InMain(Limited(dispatch(Limited(numbers(60))) if dispatched else Limited(numbers(60)).sharding_filter()))
    with load(Limited(pipe), 2, 0, 0) as loader:
        iterator = iter(loader)
        next(iterator)
        loader.reading_service._limit(7, limit_to)
        items = list(iterator)
    # As in torchdata: one number per process if one dispatches, and none otherwise.
    assert {item[-1] for item in items} == {7 if dispatched else None}
    assert [item[0][-1] for item in items[-2:]] == ([4, 3] if dispatched else [None, None])
    assert items[-1][0][0][-1] == (7 if dispatched else None)


# prefetching


def one_message(number: int) -> bytes:
    return bytes([number]) * 600_000


@pytest.mark.parametrize(("worker", "main", "ahead"), [(0, 0, 1), (3, 0, 4), (0, 4, 3), (3, 5, 7)])
def test_workers_prefetch_up_to_the_limit(worker: int, main: int, ahead: int) -> None:
    with load(numbers(60).sharding_filter().map(one_message), 2, worker, main) as loader:
        iterator = iter(loader)
        for taken in range(0, 20, 5):
            while sum(worker.items for worker in report_of(loader)) < 2 * (taken + ahead):
                time.sleep(0.01)
            loader._pause()  # a worker that may make more does so before or after it answers
            loader._resume()
            loader._pause()
            loader._resume()
            assert [worker.items for worker in report_of(loader)] == [taken + ahead] * 2
            items = [next(iterator)[0] for _ in range(10)]
            assert items == list(range(2 * taken, 2 * taken + 10))


# stages that stay in the main process


def test_a_stage_that_cannot_be_copied_stays_in_the_main_process() -> None:
    pipe = Pids(InMain(Pids(numbers(10).map(as_tuple).sharding_filter())))
    with load(pipe, 2) as loader:
        items = list(loader)
        in_main = loader.datapipe
        assert type(in_main) is Pids
        assert in_main is loader.reading_service._end_datapipe
        assert type(in_main.source) is InMain
        workers = [worker.pid for worker in report_of(loader)]
    assert items == [(number, workers[number % 2], os.getpid()) for number in range(10)]


class Gain(InMain):
    """Multiplies numbers in the main process, by a factor that its user may set at any time."""

    def __init__(self, source: Pipe) -> None:
        super().__init__(source)
        self.factor, self.yielded = 1, 0

    def set_factor(self, factor: int) -> None:
        self.factor = factor

    def __iter__(self) -> Iterator[Any]:
        for number in self.source:
            self.yielded += 1
            yield number * self.factor


@pytest.mark.parametrize("last", [Gain, lambda pipe: Gain(pipe).prefetch(2)], ids=["replayed", "prefetched"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_last_stage_of_the_main_process_is_the_users(method: str, last: Callable[[Pipe], Pipe]) -> None:
    pipe = last(numbers(20).shuffle().sharding_filter())
    with DataLoader2(pipe, reading_service=ShardReadingService(2, method)) as loader:
        torch.manual_seed(1)
        iterator = iter(loader)
        assert type(loader.datapipe) is type(pipe) is type(loader.reading_service._end_datapipe)
        first = [*iterator, *loader]
        torch.manual_seed(1)
        assert [*loader, *loader] == first
        (gain,) = [stage for stage in upstream(loader.datapipe) if type(stage) is Gain]
        assert gain.yielded == 80
        gain.set_factor(100)
        assert sorted(loader) == [100 * number for number in range(20)]


def test_the_last_stage_without_workers_is_the_users() -> None:
    with load(Gain(numbers(5)), 0) as loader:
        assert list(loader) == list(range(5))
        loader.datapipe.set_factor(2)
        assert list(loader) == list(range(0, 10, 2))
        assert (type(loader.datapipe), loader.datapipe.yielded) == (Gain, 10)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_items_of_a_later_epoch_are_counted_after_the_users_last_stage(workers: int) -> None:
    pipe = Gain(numbers(20).shuffle().sharding_filter())
    with load(pipe, workers) as loader:
        loader.seed(3)
        list(loader)
        iterator = iter(loader)
        for _ in range(7):
            next(iterator)
        state = loader.state_dict()
        rest = list(iterator)
    with load(pipe, workers) as again:
        again.load_state_dict(state)
        assert list(again) == rest


@pytest.mark.parametrize("workers", [1, 2])
def test_a_source_in_the_main_process_can_join_items_of_workers(workers: int) -> None:
    pipe = InMain(range(100, 200)).zip(numbers().sharding_filter().map(plus_one)).header(40)
    with load(pipe, workers) as loader:
        for _ in range(2):
            assert list(loader) == [(100 + number, number + 1) for number in range(40)]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("pipe", "branches"),
    [
        (lambda: InMain(numbers()).zip(numbers()), 2),
        (lambda: InMain(numbers()).zip(InMain(numbers()), numbers()), 3),
        (lambda: InMain(dispatch(numbers())).zip(numbers()), 2),
        (lambda: InMain(range(3)).map(plus_one), 0),
    ],
)
def test_workers_can_run_a_single_branch(pipe: Callable[[], Pipe], branches: int) -> None:
    loader = load(pipe())
    with pytest.raises(ValueError, match=f"The pipeline has {branches} branches that workers could run"):
        iter(loader)
    loader.shutdown()


def test_stages_in_the_main_process_can_buffer_and_prefetch() -> None:
    pipe = InMain(numbers().sharding_filter()).prefetch(7).batch(3).prefetch(1)
    with load(pipe, 3) as loader:
        batches = [list(range(first, min(first + 3, 100))) for first in range(0, 100, 3)]
        for taken in (1, 5, 34, 2, 40):
            assert list(itertools.islice(loader, taken)) == batches[:taken]


def test_a_thread_of_the_main_process_takes_nothing_of_the_next_epoch() -> None:
    with load(InMain(Slow(numbers(30).sharding_filter(), 0.05, 1)).prefetch(5), 3) as loader:
        for _ in range(3):
            assert next(iter(loader)) == 0
        assert list(loader) == list(range(30))


# dispatching


def test_stages_before_the_dispatch_run_in_one_process() -> None:
    pipe = Pids(dispatch(Pids(numbers(50).map(as_tuple))))
    with load(pipe, 3) as loader:
        items = list(loader)
        *workers, dispatcher = [worker.pid for worker in report_of(loader)]
    assert items == [(number, dispatcher, workers[number % 3]) for number in range(50)]
    assert len({os.getpid(), dispatcher, *workers}) == 5


DISPATCHED: dict[str, tuple[Callable[[], Pipe], Callable[[int], list[Any]]]] = {
    "at once": (lambda: dispatch(numbers(25)), lambda _: list(range(25))),
    "in the middle": (lambda: dispatch(numbers(25).map(plus_one)).map(plus_one), lambda _: list(range(2, 27))),
    "at the end": (lambda: dispatch(numbers(25).map(plus_one).map(plus_one)), lambda _: list(range(2, 27))),
    "twice": (lambda: dispatch(dispatch(numbers(25)).map(plus_one)), lambda _: list(range(1, 26))),
    "split before": (lambda: dispatch(numbers(25).sharding_filter()), lambda _: list(range(25))),
    "split after": (lambda: dispatch(numbers(25)).sharding_filter(), lambda _: list(range(25))),
    "two branches": (
        lambda: dispatch(numbers(25)).zip(dispatch(numbers(25).map(plus_one))),
        lambda _: [(number, number + 1) for number in range(25)],
    ),
    "two branches of one source": (
        lambda: branches_of_one_source(),
        lambda _: [(number, number + 1) for number in range(25)],
    ),
    "one branch of two": (
        lambda: dispatch(numbers(25)).zip(numbers(25).sharding_filter()),
        lambda _: [(number, number) for number in range(25)],
    ),
    "one branch of two, the other not split": (
        lambda: dispatch(numbers(25)).zip(numbers(25)),
        lambda workers: [(number, number // workers) for number in range(25)],
    ),
    "batches": (
        lambda: dispatch(numbers(24)).batch(2),
        lambda workers: [
            [first + offset, first + offset + workers]
            for first in range(0, 24, 2 * workers)
            for offset in range(workers)
        ],
    ),
    "a map-style source": (lambda: dispatch(SequenceWrapper(range(25)).to_iter_datapipe()), lambda _: list(range(25))),
}


def branches_of_one_source() -> Pipe:
    one, other = numbers(25).fork(2)
    joined: Pipe = dispatch(one).zip(other.map(plus_one))
    return joined


@pytest.mark.parametrize(("worker", "main"), [(0, 0), (10, 10)])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("place", DISPATCHED)
def test_dispatching_anywhere(place: str, workers: int, worker: int, main: int) -> None:
    pipe, expected = DISPATCHED[place]
    with load(pipe(), workers, worker, main) as loader:
        for _ in range(2):
            assert list(loader) == expected(workers)
            assert list(itertools.islice(loader, 3)) == expected(workers)[:3]


def test_without_workers_nothing_is_dispatched() -> None:
    with load(Pids(dispatch(Pids(numbers(9).map(as_tuple)))), 0) as loader:
        assert list(loader) == [(number, os.getpid(), os.getpid()) for number in range(9)]


def is_kept(number: int) -> bool:
    return number % 4 != 1 and not 40 < number < 60


@pytest.mark.parametrize(("worker", "main"), PREFETCHES)
def test_uneven_workers_after_a_dispatching_process(worker: int, main: int) -> None:
    lines = [list(filter(is_kept, range(line, 100, 3))) for line in range(3)]
    wanted = [line[turn] for turn in range(34) for line in lines if turn < len(line)]
    with load(dispatch(numbers()).filter(is_kept), 3, worker, main) as loader:
        for _ in range(3):
            assert list(loader) == wanted
            next(iter(loader))


def test_many_items_and_a_slow_worker_after_a_dispatching_process() -> None:
    with load(dispatch(numbers(20_000)), 3) as loader:
        assert list(loader) == list(range(20_000))
    with load(Slow(dispatch(numbers(300)), 0.005, 1), 3) as loader:
        assert list(loader) == list(range(300))


def big(number: int) -> Any:
    return {"array": np.full((200, 300), number), "tensor": torch.full((3, 100, 100), number), "key": str(number)}


def test_large_items_after_a_dispatching_process() -> None:
    with load(dispatch(numbers(60).map(big)).map(dict), 2) as loader:
        items = list(loader)
    assert [item["key"] for item in items] == list(map(str, range(60)))
    assert all((item["array"] == int(item["key"])).all() for item in items)
    assert all((item["tensor"] == int(item["key"])).all() for item in items)


def fail_from_30(number: int) -> int:
    if number >= 30:
        raise LookupError(f"no such item: {number}")
    return number


def lock_from_30(number: int) -> Any:
    return threading.Lock() if number >= 30 else number


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(("worker", "main"), [(0, 0), (10, 10)])
@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (fail_from_30, LookupError, "no such item: 30"),
        (lock_from_30, pickle.PicklingError, "an object of type _thread"),
    ],
)
def test_an_error_before_the_dispatch_comes_after_the_items_before_it(
    function: Any, error: Any, message: str, workers: int, worker: int, main: int
) -> None:
    with load(dispatch(numbers(40).map(function)), workers, worker, main) as loader:
        items: list[Any] = []
        with pytest.raises(error, match=f"Caught {error.__name__} in dispatching process(.|\n)*{message}"):
            items.extend(loader)
    assert items == list(range(30))


def lock_at_2000(number: int) -> Any:
    return threading.Lock() if number == 2000 else number


def is_even(number: int) -> bool:
    return number % 2 == 0


def test_an_item_that_cannot_be_dispatched_leaves_no_gap() -> None:
    # Worker 1 drops all its items, so most items are kept for worker 0, up to the limit.
    with load(dispatch(numbers(3000).map(lock_at_2000)).filter(is_even), 2, 0, 0) as loader:
        items: list[int] = []
        with pytest.raises(pickle.PicklingError, match=r"an object of type _thread\.lock"):
            items.extend(loader)
    assert items == list(range(0, 2000, 2))


def is_odd(number: int) -> bool:
    return number % 2 == 1


def test_items_kept_for_a_slow_worker_are_limited() -> None:
    with (
        load(dispatch(numbers(10**6)).filter(is_odd)) as loader,
        pytest.raises(
            BufferError, match=r"Worker 1 has not taken 10000 items .* drop too unevenly. Put them before it"
        ),
    ):
        list(loader)


# sources, adapters and state


@pytest.mark.parametrize("workers", [0, 2])
def test_map_style_sources(workers: int) -> None:
    with load(SequenceWrapper(range(9)), workers) as loader:  # DataLoader2 turns these into a stream that is not split
        assert sorted(loader) == sorted([*range(9)] * max(workers, 1))
    words = SequenceWrapper([f"word {number}" for number in range(9)]).map(len)
    with load(words.zip(SequenceWrapper(range(9))).shuffle().sharding_filter(), workers) as loader:
        assert sorted(loader) == [(6, number) for number in range(9)]


class Added(Adapter):  # type: ignore[misc]  # torchdata has no types
    """Adds a stage."""

    def __call__(self, pipe: Pipe) -> Pipe:
        added: Pipe = pipe.map(plus_one)
        return added


@pytest.mark.parametrize("workers", [0, 2])
def test_adapters(workers: int) -> None:
    pipe = numbers(20).shuffle().sharding_filter()
    service = ShardReadingService(workers)
    with DataLoader2(pipe, [Shuffle(False)], service) as loader:
        assert list(loader) == list(range(20))
    still = numbers(20).shuffle().set_shuffle(False).sharding_filter()
    with DataLoader2(still, reading_service=service) as loader:
        assert list(loader) == list(range(20))
    with DataLoader2(still, Shuffle(True), service) as loader:
        loader.seed(1)
        assert sorted(loader) == list(range(20)) != list(loader)
    with DataLoader2(pipe, [Shuffle(False), Added()], service) as loader:
        assert list(loader) == list(range(1, 21))


# after another service


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dispatched", [False, True])
def test_after_a_distributed_service(dispatched: bool, workers: int) -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        source = numbers(50).shuffle().sharding_filter()
        pipe = (dispatch(source) if dispatched else source).filter(is_kept)
        services = SequentialReadingService(DistributedReadingService(), ShardReadingService(workers))
        with DataLoader2(pipe, reading_service=services) as loader:
            loader.seed(3)
            epochs = [list(loader) for _ in range(3)]
            next(iter(loader))
            iterator = iter(loader)
            iterator.limit(4)
            parts = [list(iterator)]
            while len(parts[-1]) == 4:
                iterator.resume()
                parts.append(list(iterator))
            epochs.append([item for part in parts for item in part])
            loader.seed(3)
            again = [list(loader) for _ in range(3)]
    finally:
        torch.distributed.destroy_process_group()
    assert all(sorted(epoch) == list(filter(is_kept, range(50))) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert again == epochs[:3]


# errors of items


@pytest.mark.parametrize("worker", [0, 5, 10])
@pytest.mark.parametrize("workers", [0, 1, 4])
def test_an_error_comes_after_the_items_before_it(workers: int, worker: int) -> None:
    at = 7 * max(workers, 1)
    loader = load(Failing(numbers().sharding_filter(), at), workers, worker)
    items: list[Any] = []
    with pytest.raises(LookupError, match=f"no such item: {at}") as caught:
        items.extend(loader)
    assert items == list(range(at))
    if workers:
        assert "Caught LookupError in worker process 0" in str(caught.value)
        assert "Original Traceback" in str(caught.value)
    with pytest.raises(RuntimeError, match="already been shut down"):
        iter(loader)


@pytest.mark.parametrize(("worker", "main"), PREFETCHES)
@pytest.mark.parametrize("dispatched", [False, True])
def test_an_unreached_error_does_not_affect_the_next_epoch(
    dispatched: bool, worker: int, main: int, tmp_path: Path
) -> None:
    source = Failing(numbers(40), 12, epochs=1, told=tmp_path / "told")
    with load(dispatch(source) if dispatched else source.sharding_filter(), 2, worker, main) as loader:
        assert list(itertools.islice(loader, 3)) == [0, 1, 2]
        while (worker or main) and not (tmp_path / "told").exists():  # the workers prefetch that far
            time.sleep(0.01)
        assert list(loader) == list(range(40))


@pytest.mark.parametrize(("worker", "main"), PREFETCHES)
def test_an_error_is_raised_in_every_epoch_that_reaches_it(worker: int, main: int) -> None:
    with load(Failing(numbers(40).sharding_filter(), 12), 2, worker, main) as loader:
        for _ in range(3):
            assert list(itertools.islice(loader, 12)) == list(range(12))
        with pytest.raises(LookupError, match="no such item: 12"):
            list(loader)


# arguments


def test_it_accepts_the_arguments_of_torchdatas_service() -> None:
    arguments: Sequence[Any] = (2, "fork", 3, 4, note_init, note_reset)
    ours = ShardReadingService(*arguments)
    assert isinstance(ours, MultiProcessingReadingService)
    names = list(inspect.signature(MultiProcessingReadingService.__init__).parameters)[1:]
    given = dict(zip(names, arguments, strict=True))
    assert given == {name: getattr(ours, name) for name in given}
    named = ShardReadingService(**given, pin_memory=False, timeout_s=2.5, distributed=False)
    assert pickle.loads(pickle.dumps(named)).timeout_s == 2.5
    assert {name: getattr(named, name) for name in given} == given


def test_it_accepts_integers_of_numpy() -> None:
    service = ShardReadingService(np.int64(2), None, np.int32(1), np.uint8(3))
    with DataLoader2(numbers(20).sharding_filter(), reading_service=service) as loader:
        assert list(loader) == list(range(20))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_workers": -1}, ValueError, "num_workers must be at least 0, not -1"),
        ({"num_workers": "2"}, TypeError, "num_workers must be an integer, not '2'"),
        ({"num_workers": 2.0}, TypeError, r"num_workers must be an integer, not 2\.0"),
        ({"num_workers": None}, TypeError, "num_workers must be an integer, not None"),
        (
            {"multiprocessing_context": "thread"},
            ValueError,
            r"multiprocessing_context must be one of \[.*'fork'.*, not 'thr",
        ),
        ({"multiprocessing_context": 5}, ValueError, r"multiprocessing_context must be one of \[.*\], not 5"),
        ({"worker_prefetch_cnt": -1}, ValueError, "worker_prefetch_cnt must be at least 0, not -1"),
        ({"worker_prefetch_cnt": None}, TypeError, "worker_prefetch_cnt must be an integer, not None"),
        ({"main_prefetch_cnt": -2}, ValueError, "main_prefetch_cnt must be at least 0, not -2"),
        ({"main_prefetch_cnt": [1]}, TypeError, r"main_prefetch_cnt must be an integer, not \[1\]"),
        ({"worker_init_fn": "f"}, TypeError, "worker_init_fn must be a function or None, not 'f'"),
        ({"worker_reset_fn": 1}, TypeError, "worker_reset_fn must be a function or None, not 1"),
        ({"pin_memory": "cuda:0"}, TypeError, "pin_memory must be True or False, not 'cuda:0'"),
        ({"distributed": "yes"}, TypeError, "distributed must be True, False, None, a ProcessGroup, .*, not 'yes'"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be a positive number of seconds or None, not 0"),
        ({"timeout_s": -1.5}, ValueError, r"timeout_s must be a positive number .*, not -1\.5"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s must be a positive number .*, not nan"),
        ({"timeout_s": float("inf")}, ValueError, "timeout_s must be a positive number .*, not inf"),
        ({"timeout_s": "5"}, ValueError, "timeout_s must be a positive number .*, not '5'"),
    ],
    ids=str,
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ShardReadingService(**options)


def test_distributed_reading_requires_a_process_group() -> None:
    loader = DataLoader2(numbers(), reading_service=ShardReadingService(distributed=True))
    with pytest.raises(
        RuntimeError, match=r"requires a process group: first call torch\.distributed\.init_process_group"
    ):
        iter(loader)


def start_nothing(pipe: Any, _: Any, *, token: str = "") -> Any:
    return pipe


@pytest.mark.parametrize(
    ("service", "text"),
    [
        (ShardReadingService(), "ShardReadingService(num_workers=0)"),
        (
            ShardReadingService(2, "spawn", worker_init_fn=start_nothing),
            "ShardReadingService(num_workers=2, multiprocessing_context='spawn', worker_init_fn=start_nothing)",
        ),
        (
            ShardReadingService(1, distributed=(1, 4), pin_memory=True),
            "ShardReadingService(num_workers=1, pin_memory=True, distributed=(1, 4))",
        ),
        (ShardReadingService(distributed=True), "ShardReadingService(num_workers=0, distributed=True)"),
        (ShardReadingService(distributed=False), "ShardReadingService(num_workers=0, distributed=False)"),
    ],
)
def test_a_service_is_shown_by_its_arguments(service: ShardReadingService, text: str) -> None:
    assert repr(service) == text
    with DataLoader2(IterableWrapper([1, 2]), reading_service=ShardReadingService()) as loader:
        assert list(loader) == [1, 2]
        assert repr(loader.reading_service) == "ShardReadingService(num_workers=0)"


def test_a_service_is_shown_without_credentials() -> None:
    assert "planted" not in repr(ShardReadingService(worker_init_fn=partial(start_nothing, token="planted")))
