"""`ShardReadingService` provides in ``DataLoader2`` what torchdata's own service promises."""

from __future__ import annotations

import inspect
import itertools
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterDataPipe, get_worker_info
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService, SequentialReadingService
from torchdata.dataloader2.adapter import Adapter, Shuffle
from torchdata.datapipes.iter import IterableWrapper
from torchdata.datapipes.map import SequenceWrapper
from users_stages import InMain, Unchanged

from wds_datapipes import ShardReadingService
from wds_datapipes.errors import StateError
from wds_datapipes.pipes.graph import PipelineGraph

Pipe = IterDataPipe[Any]
Item = tuple[int, int]


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


class Pids(Unchanged):
    """Adds the ID of its process."""

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            yield *item, os.getpid()


class Failing(IterDataPipe[Any]):
    """Creates the file ``told`` and raises an error instead of yielding an item, in the first ``epochs`` epochs."""

    def __init__(self, source: Pipe, at: Any, epochs: int, told: Path) -> None:
        self.source, self.at, self.epochs, self.told = source, at, epochs, told

    def __iter__(self) -> Iterator[Any]:
        self.epochs -= 1
        for item in self.source:
            if item == self.at and self.epochs >= 0:
                self.told.touch()
                raise LookupError(f"no such item: {item}")
            yield item


def numbers(count: int = 100) -> Pipe:
    pipe: Pipe = IterableWrapper(range(count))
    return pipe


def load(pipe: Any, workers: int = 2, worker: int = 10, main: int = 10, **options: Any) -> DataLoader2[Any]:
    return DataLoader2(pipe, reading_service=ShardReadingService(workers, "fork", worker, main, **options))


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


@pytest.mark.parametrize("workers", [0, 2])
def test_a_new_iterator_restarts_and_ends_the_previous_one(workers: int) -> None:
    with load(InMain(numbers(10).sharding_filter()).prefetch(2), workers) as loader:
        assert list(loader) == list(range(10))
        first = iter(loader)
        assert [next(first), next(first)] == [0, 1]
        second = iter(loader)
        assert [next(second), next(second)] == [0, 1]
        with pytest.raises(RuntimeError, match="iterator has been invalidated"):
            next(first)
        assert list(second) == list(range(2, 10))


def test_an_unused_iterator_is_used_by_the_next_loop() -> None:
    with load(Counts([2, 2])) as loader:
        assert loader.reading_service.report().epoch == 0
        for _ in range(3):
            iter(loader)
        assert list(loader) == round_robin([2, 2])
        assert loader.reading_service.report().epoch == 1


def test_a_service_can_be_used_by_many_loaders() -> None:
    service = ShardReadingService(2)
    with (
        DataLoader2(Counts([5, 3]), reading_service=service) as outer,
        DataLoader2(Counts([2, 3]), reading_service=service) as inner,
    ):
        pairs = [(one, list(inner)) for one in outer]
    assert pairs == [(one, round_robin([2, 3])) for one in round_robin([5, 3])]


@pytest.mark.parametrize("call", ["state_dict()", "load_state_dict(state)", "set_epoch(1)", "report()"])
def test_the_service_of_which_a_loader_has_a_copy_refuses_calls_that_would_do_nothing(call: str) -> None:
    service = ShardReadingService()
    for within in (service, SequentialReadingService(service)):
        with DataLoader2(Counts([2]), reading_service=within) as loader:
            state = loader.state_dict()
            with pytest.raises((StateError, RuntimeError), match=r"use loader\.reading_service"):
                eval(f"service.{call}", {"service": service, "state": state})
            if within is service:
                eval(f"service.{call}", {"service": loader.reading_service, "state": state})


def test_a_loader_keeps_the_service_that_another_loader_copies() -> None:
    with DataLoader2(Counts([2]), reading_service=ShardReadingService()) as one:
        with DataLoader2(Counts([3]), reading_service=one.reading_service) as other:
            assert [len(list(one)), len(list(other))] == [2, 3]
            assert [each.reading_service.report().items for each in (one, other)] == [2, 3]
        assert one.state_dict()


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


@pytest.mark.parametrize("workers", [0, 3])
def test_user_functions_are_called_in_each_worker(workers: int, tmp_path: Path) -> None:
    pipe = numbers(8).map(as_tuple).sharding_filter()
    path, number = tmp_path / "noted", max(workers, 1)
    options: dict[str, Any] = {"worker_init_fn": partial(note_init, path), "worker_reset_fn": partial(note_reset, path)}
    with load(pipe, workers, **options) as loader:
        for _ in range(3):
            items = list(loader)
            assert sorted(number for number, _ in items) == list(range(8))
            assert len({pid for _, pid in items}) == number
    assert sorted(path.read_text().splitlines()) == [
        *(f"init {worker} of {number} WorkerInfo ShardingFilterIterDataPipe" for worker in range(number)),
        *(f"reset {worker} of {number} SeedGenerator Pids" for worker in range(number) for _ in range(3)),
    ]


def as_tuple(number: int) -> tuple[int]:
    return (number,)


def forget_pipe(*_: Any) -> None:
    """Return nothing, by mistake."""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_that_forgets_to_return_the_pipeline_is_named(workers: int) -> None:
    with (
        load(numbers(), workers, worker_init_fn=forget_pipe) as loader,
        pytest.raises(TypeError, match="worker_init_fn must return the pipeline, but returned None"),
    ):
        list(loader)


def ask_torch(item: Any) -> Any:
    return item, get_worker_info(), torch.get_num_threads()


def test_worker_info_of_torch_is_that_of_torchdatas_workers() -> None:
    with load(numbers(4).sharding_filter().map(ask_torch)) as loader:
        assert list(loader) == [(number, None, 1) for number in range(4)]


# pause, resume and limit


def test_nothing_comes_after_a_pause() -> None:
    with load(numbers(10).sharding_filter(), 2) as loader:
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


@pytest.mark.parametrize(("worker", "main", "ahead"), [(0, 0, 1), (3, 5, 7)])
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
    """Multiplies numbers in the main process by a factor that its user may set at any time."""

    def __init__(self, source: Pipe) -> None:
        super().__init__(source)
        self.factor, self.yielded = 1, 0

    def set_factor(self, factor: int) -> None:
        self.factor = factor

    def __iter__(self) -> Iterator[Any]:
        for number in self.source:
            self.yielded += 1
            yield number * self.factor


def test_the_last_stage_of_the_main_process_is_the_users() -> None:
    pipe = Gain(numbers(20).shuffle().sharding_filter()).prefetch(2)
    with load(pipe, 2) as loader:
        torch.manual_seed(1)
        iterator = iter(loader)
        assert type(loader.datapipe) is type(pipe) is type(loader.reading_service._end_datapipe)
        first = [*iterator, *loader]
        torch.manual_seed(1)
        assert [*loader, *loader] == first
        (gain,) = [stage for stage in PipelineGraph(loader.datapipe).stages if type(stage) is Gain]
        assert gain.yielded == 80
        gain.set_factor(100)
        assert sorted(loader) == [100 * number for number in range(20)]


def test_a_source_in_the_main_process_can_join_items_of_workers() -> None:
    pipe = InMain(range(100, 200)).zip(numbers().sharding_filter().map(plus_one)).header(40)
    with load(pipe) as loader:
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


# errors of items


def test_an_unreached_error_does_not_affect_the_next_epoch(tmp_path: Path) -> None:
    source = Failing(numbers(40), 12, epochs=1, told=tmp_path / "told")
    with load(source.sharding_filter()) as loader:
        assert list(itertools.islice(loader, 3)) == [0, 1, 2]
        while not (tmp_path / "told").exists():  # the workers prefetch that far
            time.sleep(0.01)
        assert list(loader) == list(range(40))


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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_workers": -1}, ValueError, "num_workers must be at least 0, not -1"),
        ({"num_workers": "2"}, TypeError, "num_workers must be an integer, not '2'"),
        (
            {"multiprocessing_context": "thread"},
            ValueError,
            r"multiprocessing_context must be one of \[.*'fork'.*, not 'thr",
        ),
        ({"worker_prefetch_cnt": -1}, ValueError, "worker_prefetch_cnt must be at least 0, not -1"),
        ({"main_prefetch_cnt": [1]}, TypeError, r"main_prefetch_cnt must be an integer, not \[1\]"),
        ({"worker_init_fn": "f"}, TypeError, "worker_init_fn must be a function or None, not 'f'"),
        ({"pin_memory": "cuda:0"}, TypeError, "pin_memory must be True or False, not 'cuda:0'"),
        ({"distributed": "yes"}, TypeError, "distributed must be True, False, None, a ProcessGroup, .*, not 'yes'"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be a positive number of seconds or None, not 0"),
        ({"timeout_s": float("inf")}, ValueError, "timeout_s must be a positive number .*, not inf"),
        ({"on_report": 1}, TypeError, "on_report must be"),
        ({"report_every_s": 0}, ValueError, "report_every_s must be"),
        ({"report_every_s": None}, TypeError, "report_every_s must be a number, not None"),
        ({"timeout_s": "5"}, TypeError, "timeout_s must be a number or None, not '5'"),
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
