"""`ShardReadingService` provides in ``DataLoader2`` what torchdata's own service promises."""

from __future__ import annotations

import gc
import inspect
import itertools
import os
import pickle
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
from torchdata.datapipes.iter import IterableWrapper
from torchdata.datapipes.map import SequenceWrapper

from wds_datapipes import ShardReadingService
from wds_datapipes.pipes.inspection import upstream

Pipe = IterDataPipe[Any]
Item = tuple[int, int]

#: In each worker, and in all workers together.
PREFETCHES = [(0, 0), (10, 10)]

#: By torchdata if one branch is longer.
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


def load(
    pipe: Any, workers: int = 2, worker: int = 10, main: int = 10, service: Any = ShardReadingService, **options: Any
) -> DataLoader2[Any]:
    return DataLoader2(pipe, reading_service=service(workers, "fork", worker, main, **options))


def round_robin(counts: list[int]) -> list[Item]:
    return [(name, turn) for turn in range(max(counts)) for name, count in enumerate(counts) if turn < count]


def plus_one(number: int) -> int:
    return number + 1


# whole epochs, partial epochs and the end


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


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("name", ["split", "main process"])
def test_a_new_iterator_restarts_and_ends_the_previous_one(name: str, workers: int) -> None:
    split = numbers(10).sharding_filter()
    with load(split if name == "split" else InMain(split).prefetch(2), workers) as loader:
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


def test_an_abandoned_iterator_takes_nothing_of_the_next_epoch() -> None:
    with load(numbers(30).sharding_filter(), 3, 0, 0) as loader:
        iterator = iter(loader)
        left = loader.reading_service._items._pool.workers[0].items()  # as a thread of the main process does
        assert next(left) == 0
        next(iterator)
        iterator = iter(loader)
        assert list(left) == []
        assert list(iterator) == list(range(30))


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("in_main", [False, True])
def test_an_empty_pipeline(in_main: bool, workers: int) -> None:
    pipe = numbers(0).sharding_filter()
    with load(InMain(pipe) if in_main else pipe, workers) as loader:
        assert [list(loader), list(loader)] == [[], []]
        with pytest.raises(StopIteration):
            next(iter(loader))


def test_a_service_can_be_used_by_many_loaders() -> None:
    service = ShardReadingService(2)
    with (
        DataLoader2(Counts([5, 3]), reading_service=service) as outer,
        DataLoader2(Counts([2, 3]), reading_service=service) as inner,
    ):
        pairs = [(one, list(inner)) for one in outer]
    assert pairs == [(one, round_robin([2, 3])) for one in round_robin([5, 3])]


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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("in_main", [False, True])
def test_a_limit_loses_nothing(in_main: bool, workers: int) -> None:
    pipe = numbers(10).shuffle().sharding_filter()
    with load(InMain(pipe).prefetch(4) if in_main else pipe, workers) as loader:
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


# prefetching


def one_message(number: int) -> bytes:
    return bytes([number]) * 600_000


@pytest.mark.parametrize(("worker", "main", "ahead"), [(0, 0, 1), (0, 4, 3), (3, 5, 7)])
def test_workers_prefetch_up_to_the_limit(worker: int, main: int, ahead: int) -> None:
    with load(numbers(60).sharding_filter().map(one_message), 2, worker, main) as loader:
        iterator = iter(loader)

        def made() -> list[int]:
            return [worker.items for worker in loader.reading_service.report().workers]

        for taken in range(0, 20, 5):
            while sum(made()) < 2 * (taken + ahead):
                time.sleep(0.01)
            assert made() == [taken + ahead] * 2
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
        workers = [worker.pid for worker in loader.reading_service.report().workers]
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
def test_the_last_stage_of_the_main_process_is_the_users(last: Callable[[Pipe], Pipe]) -> None:
    pipe = last(numbers(20).shuffle().sharding_filter())
    with load(pipe, 2) as loader:
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


def dispatched() -> Pipe:
    pipe: Pipe = numbers(9).sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)
    return pipe


def test_no_process_dispatches_items() -> None:
    with load(dispatched(), 0) as loader:
        assert list(loader) == list(range(9))
    with (
        load(dispatched().map(plus_one)) as loader,
        pytest.raises(ValueError, match=r"Put \.sharding_filter\(\) there, .* or set WDS_DATAPIPES_PATCHES=0"),
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


def is_kept(number: int) -> bool:
    return number % 4 != 1 and not 40 < number < 60


@pytest.mark.parametrize("workers", [0, 2])
def test_after_a_distributed_service(workers: int) -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        pipe = numbers(50).shuffle().sharding_filter().filter(is_kept)
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


@pytest.mark.parametrize(("worker", "main"), PREFETCHES)
def test_an_unreached_error_does_not_affect_the_next_epoch(worker: int, main: int, tmp_path: Path) -> None:
    source = Failing(numbers(40), 12, epochs=1, told=tmp_path / "told")
    with load(source.sharding_filter(), 2, worker, main) as loader:
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
