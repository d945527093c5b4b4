"""``.sharding_round_robin_dispatch()``: one process runs the stages before it, and workers take its items in turn."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from error_facts import naming
from numbered_shards import write_numbered
from sweeps import WHOLE
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService
from torchdata.datapipes.iter import IterableWrapper
from torchdata.datapipes.map import SequenceWrapper
from users_stages import InMain, Unchanged

from wds_datapipes import ShardList, ShardReadingService, merge_states
from wds_datapipes.errors import StateError, WorkerDiedError, WorkerTimeoutError

Pipe = IterDataPipe[Any]

#: By torchdata if one branch is longer.
pytestmark = pytest.mark.filterwarnings("ignore:Some child DataPipes are not exhausted")

PREFETCHES = list(itertools.product((0, 10), (0, 10)))
#: Start methods and numbers of prefetched items; interpreters that start for a worker take seconds to import torch.
STARTS = [
    (method, *counts)
    for method, few in (("fork", PREFETCHES), ("spawn", [(0, 10)]), ("forkserver", [(10, 0)]))
    for counts in (PREFETCHES if WHOLE else few)
]


def numbers(count: int = 100) -> Pipe:
    pipe: Pipe = IterableWrapper(range(count))
    return pipe


def dispatch(pipe: Pipe) -> Pipe:
    rest: Pipe = pipe.sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)
    return rest


def load(
    pipe: Any, workers: int = 2, worker: int = 10, main: int = 10, method: str = "fork", **options: Any
) -> DataLoader2[Any]:
    return DataLoader2(pipe, reading_service=ShardReadingService(workers, method, worker, main, **options))


def plus_one(number: int) -> int:
    return number + 1


def as_tuple(number: int) -> tuple[int]:
    return (number,)


class Pids(Unchanged):
    """Adds the ID of its process."""

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            yield *item, os.getpid()


# which process runs what


def test_stages_before_the_dispatch_run_in_one_process() -> None:
    with load(Pids(dispatch(Pids(numbers(50).map(as_tuple)))), 3) as loader:
        items = list(loader)
        report = loader.reading_service.report()
    workers, dispatcher = [worker.pid for worker in report.workers], report.dispatcher
    assert items == [(number, dispatcher.pid, workers[number % 3]) for number in range(50)]
    assert len({os.getpid(), dispatcher.pid, *workers}) == 5
    assert (report.items, dispatcher.name, dispatcher.items) == (50, "The dispatching process", 50)
    assert dispatcher.bytes > 0


def branches_of_one_source() -> Pipe:
    one, other = numbers(25).fork(2)
    joined: Pipe = dispatch(one).zip(other.map(plus_one))
    return joined


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
    "two branches of one source": (branches_of_one_source, lambda _: [(number, number + 1) for number in range(25)]),
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
    "before a stage of the main process": (
        lambda: InMain(dispatch(numbers(25))).map(plus_one),
        lambda _: list(range(1, 26)),
    ),
    "a map-style source": (lambda: dispatch(SequenceWrapper(range(25)).to_iter_datapipe()), lambda _: list(range(25))),
}


@pytest.mark.parametrize(("worker", "main"), [(0, 0), (10, 10)])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("place", DISPATCHED)
def test_the_stage_can_be_anywhere(place: str, workers: int, worker: int, main: int) -> None:
    pipe, expected = DISPATCHED[place]
    with load(pipe(), workers, worker, main) as loader:
        for _ in range(2):
            assert list(loader) == expected(workers)
            assert list(itertools.islice(loader, 3)) == expected(workers)[:3]


def test_without_workers_everything_runs_in_the_main_process() -> None:
    with load(Pids(dispatch(Pids(numbers(9).map(as_tuple)))), 0) as loader:
        assert list(loader) == [(number, os.getpid(), os.getpid()) for number in range(9)]
        assert loader.reading_service.report().dispatcher is None


def tell(pipe: Any, info: Any, seeds: Any = None) -> Any:
    kind, stage = "init" if seeds is None else "reset", type(pipe).__name__
    with Path("told").open("a") as file:
        file.write(f"{kind} {info.worker_id} of {info.num_workers} {stage}\n")
    return pipe


def test_users_functions_in_the_dispatching_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torchdata, it calls only worker_reset_fn; its data is not split between workers, so it is the only one."""
    monkeypatch.chdir(tmp_path)
    with load(dispatch(numbers(8)).map(plus_one), worker_init_fn=tell, worker_reset_fn=tell) as loader:
        assert [list(loader) for _ in range(2)] == [list(range(1, 9))] * 2
    told = sorted(Path("told").read_text().splitlines())
    assert told == [
        *(f"init {worker} of 2 MapperIterDataPipe" for worker in range(2)),
        *["reset 0 of 1 ShardingRoundRobinDispatcherIterDataPipe"] * 2,
        *["reset 0 of 2 MapperIterDataPipe"] * 2,
        *["reset 1 of 2 MapperIterDataPipe"] * 2,
    ]


# whole epochs, partial epochs and the end


@pytest.fixture
def _started() -> None:
    """Start the processes that multiprocessing starts once, and which keep running."""
    resource_tracker.ensure_running()
    forkserver.ensure_running()


@pytest.mark.usefixtures("_started", "nothing_left")
@pytest.mark.parametrize(("method", "worker", "main"), STARTS)
def test_an_epoch_can_be_abandoned_or_read_with_every_prefetch_count(method: str, worker: int, main: int) -> None:
    def epochs(loader: DataLoader2[Any]) -> list[list[Any]]:
        loader.seed(5)
        return [list(itertools.islice(loader, 10)), list(loader)]

    pipe = dispatch(numbers(1000).shuffle()).map(plus_one).batch(16)
    loader = load(pipe, 2, worker, main, method)
    batches, whole = epochs(loader)
    assert len({number for batch in batches for number in batch}) == sum(map(len, batches))
    assert sorted(number for batch in whole for number in batch) == list(range(1, 1001))
    next(iter(loader))
    loader.shutdown()
    if method != "fork":  # a seed determines the order, in whichever way workers start
        with load(pipe) as forking:
            assert epochs(forking) == [batches, whole]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_there_may_be_more_workers_than_items(count: int) -> None:
    with load(dispatch(numbers(count)), 3) as loader:
        assert [list(loader) for _ in range(3)] == [list(range(count))] * 3


class Slow(Unchanged):
    """Waits a little before every third item."""

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            if item % 3 == 0:
                time.sleep(0.003)
            yield item


@pytest.mark.parametrize(("worker", "main"), PREFETCHES)
def test_an_epoch_can_begin_while_another_is_read(worker: int, main: int) -> None:
    with load(Slow(dispatch(Slow(numbers(40)))), 3, worker, main) as loader:
        for taken in (1, 2, 3, 5, 8, 13, 1, 1, 0, 1):
            assert list(itertools.islice(loader, taken)) == list(range(taken))
        assert list(loader) == list(range(40))


def large(number: int) -> Any:
    return {"array": np.full((200, 300), number), "tensor": torch.full((3, 100, 100), number), "key": number}


def test_hundreds_of_epochs_can_begin_without_being_read() -> None:
    with load(dispatch(numbers(400).map(large)), 3) as loader:
        next(iter(loader))
        for _ in range(300):
            loader.reading_service.initialize_iteration(loader._seed_generator)
        assert [item["key"] for item in loader] == list(range(400))


def test_many_items_and_large_items() -> None:
    with load(dispatch(numbers(20_000)), 3) as loader:
        assert list(loader) == list(range(20_000))
    with load(dispatch(numbers(60).map(large)).map(dict), 2) as loader:
        items = list(loader)
    assert [item["key"] for item in items] == list(range(60))
    assert all((item["array"] == item["key"]).all() and (item["tensor"] == item["key"]).all() for item in items)


def is_kept(number: int) -> bool:
    return number % 4 != 1 and not 40 < number < 60


@pytest.mark.parametrize(("worker", "main"), PREFETCHES)
def test_workers_may_drop_items(worker: int, main: int) -> None:
    lines = [list(filter(is_kept, range(line, 100, 3))) for line in range(3)]
    wanted = [line[turn] for turn in range(34) for line in lines if turn < len(line)]
    with load(dispatch(numbers()).filter(is_kept), 3, worker, main) as loader:
        for _ in range(3):
            assert list(loader) == wanted
            next(iter(loader))


def is_odd(number: int) -> bool:
    return number % 2 == 1


def test_the_items_kept_for_a_worker_that_has_enough_are_limited() -> None:
    with (
        load(dispatch(numbers(10**6)).filter(is_odd)) as loader,
        pytest.raises(BufferError, match=naming("Worker 1", "10000 items")),
    ):
        list(loader)


def test_items_are_read_once_in_an_epoch() -> None:
    with (
        load(dispatch(numbers(4)).cycle(2)) as loader,
        pytest.raises(RuntimeError, match=r"once in an epoch.*\n?.*Put the stage that reads them repeatedly before"),
    ):
        list(loader)
    with load(dispatch(numbers(4)).with_epoch(3)) as loader, pytest.raises(RuntimeError, match=naming("restart")):
        list(loader)


# seeds


def test_a_seed_determines_the_order() -> None:
    pipe = dispatch(numbers(101).shuffle()).batch(2)

    def read(seed: int) -> list[Any]:
        loader.seed(seed)
        return [list(loader) for _ in range(2)]

    with load(pipe) as loader:
        first, second = read(123)
        assert first != second
        assert read(123) == [first, second]
        assert read(321) != [first, second]


def test_the_order_before_the_dispatch_does_not_depend_on_the_number_of_workers() -> None:
    orders = []
    for workers in (1, 2, 3):
        with load(dispatch(numbers(50).shuffle()), workers) as loader:
            loader.seed(5)
            orders.append(list(loader))
    assert orders[0] == orders[1] == orders[2] != list(range(50))


# errors


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
def test_an_error_before_the_dispatch_follows_the_items_before_it(
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
    # Worker 1 drops all its items, so most items are kept for worker 0.
    with load(dispatch(numbers(3000).map(lock_at_2000)).filter(is_even), 2, 0, 0) as loader:
        items: list[int] = []
        with pytest.raises(pickle.PicklingError, match=r"an object of type _thread\.lock"):
            items.extend(loader)
    assert items == list(range(0, 2000, 2))


class FailsInTheFirstEpoch(Unchanged):
    """Raises an error instead of item 4, in the first epoch."""

    epochs = 0

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        for item in self.source:
            if item == 4 and self.epochs == 1:
                Path("told").touch()
                raise LookupError("no such item")
            yield item


def test_an_error_that_the_loop_has_not_reached_does_not_affect_the_next_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with load(dispatch(FailsInTheFirstEpoch(numbers(10)))) as loader:
        assert next(iter(loader)) == 0
        while not Path("told").exists():
            time.sleep(0.01)
        assert list(loader) == list(range(10))


class OfOneProcess(Unchanged):
    """Cannot be unpickled in another process."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.pid = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["pid"] != os.getpid():
            raise LookupError("not in another process")
        self.__dict__.update(state)


def refuse(pipe: Any, info: Any, seeds: Any) -> Any:
    raise LookupError(f"no such seed in worker {info.worker_id} of {info.num_workers}")


def test_errors_at_the_start_of_the_dispatching_process() -> None:
    with (
        load(dispatch(numbers()), worker_reset_fn=refuse) as loader,
        pytest.raises(LookupError, match=r"no such seed in worker"),
    ):
        list(loader)
    with (
        load(dispatch(OfOneProcess(numbers())), method="spawn") as loader,
        pytest.raises(LookupError, match=r"(?s)Caught LookupError in dispatching process.*not in another process"),
    ):
        list(loader)


class Naps(Unchanged):
    """Does not yield item 7."""

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            if item == 7:
                time.sleep(600)
            yield item


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", ["dispatcher", "worker"])
@pytest.mark.parametrize(("worker", "main"), [(0, 0), (10, 10)])
def test_the_end_of_a_process_is_reported(name: str, worker: int, main: int) -> None:
    loader = load(dispatch(Naps(numbers())), 2, worker, main)
    items = iter(loader)
    assert next(items) == 0
    report = loader.reading_service.report()
    victim = report.dispatcher if name == "dispatcher" else report.workers[1]
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=rf"^{victim.name} \(pid {victim.pid}\) was killed by signal 9"):
        list(items)
    loader.shutdown()


class Leaves(Unchanged):
    """Ends its process."""

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(self.source, 7)
        raise SystemExit(3)


@pytest.mark.usefixtures("nothing_left")
def test_an_exit_of_the_dispatching_process_is_reported() -> None:
    loader = load(dispatch(Leaves(numbers())))
    with pytest.raises(WorkerDiedError, match=r"^The dispatching process .* ended with exit code 3"):
        list(loader)
    loader.shutdown()


@pytest.fixture
def shards(tmp_path: Path) -> str:
    return write_numbered(tmp_path, [8] * 6)


class NapsAt(Unchanged):
    """Yields keys, but not 2-3."""

    def __iter__(self) -> Iterator[Any]:
        for sample in self.source:
            if sample["__key__"] == "2-3":
                time.sleep(600)
            yield sample["__key__"]


@pytest.mark.usefixtures("nothing_left")
def test_a_timeout_names_the_shard_of_the_dispatching_process(shards: str) -> None:
    pipe = dispatch(NapsAt(ShardList(shards).sharding_filter().load_wds_shards().group_samples()))
    loader = load(pipe, timeout_s=4)
    items = []
    with pytest.raises(
        WorkerTimeoutError, match=r"items of the dispatching process\. The last shard that it opened is \S+2\.tar"
    ):
        items.extend(loader)
    assert items == [f"{shard}-{n}" for shard in range(3) for n in range(8)][: len(items)]
    assert len(items) == 19
    loader.shutdown()


class PausesAtTheEnd(Unchanged):
    """Yields items slowly; then creates a file, and waits for another one before it ends."""

    def __init__(self, source: Pipe, folder: Path) -> None:
        super().__init__(source)
        self.folder = folder

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            time.sleep(0.001)  # so that each is a message of its own
            yield item
        (self.folder / "paused").touch()
        wait_for(self.folder / "received")


class TakesEvenItemsDuringThePause(PausesAtTheEnd):
    """Yields the items, but even ones only during the pause."""

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            if item % 2 == 0:
                wait_for(self.folder / "paused")
            yield item


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.001)


@pytest.mark.usefixtures("nothing_left")
def test_no_item_waits_in_the_dispatching_process_while_the_source_pauses(tmp_path: Path) -> None:
    pipe = TakesEvenItemsDuringThePause(dispatch(PausesAtTheEnd(numbers(30), tmp_path)), tmp_path)
    with load(pipe, timeout_s=30) as loader:
        items = iter(loader)
        assert list(itertools.islice(items, 30)) == list(range(30))
        (tmp_path / "received").touch()
        assert list(items) == []


def fail_at_even(number: int) -> int:
    if number % 2 == 0:
        raise ValueError(f"{number} is even")
    return number


@pytest.mark.filterwarnings("ignore:.*is even")
def test_what_the_dispatching_process_skips_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    pipe = dispatch(numbers(600).map_samples(fail_at_even, on_error="skip"))
    with load(pipe) as loader:
        for epoch in (1, 2):
            assert list(loader) == list(range(1, 600, 2))
            report = loader.reading_service.report()
            assert report.skipped.total == report.dispatcher.skipped.total == 300 * epoch
            assert report.as_dict()["skipped"] == 300 * epoch
            assert f"epoch {epoch}: skipped 300 items" in caplog.text


# several ranks


def test_dispatching_before_ranks_are_split() -> None:
    pipe = dispatch(numbers(50).shuffle().sharding_filter())
    epochs = []
    for rank in range(2):
        with load(pipe, 2, distributed=(rank, 2)) as loader:
            loader.seed(3)
            epochs.append([list(loader) for _ in range(2)])
    for first, second in zip(*epochs, strict=True):
        assert len(first) == len(second) == 25
        assert sorted([*first, *second]) == list(range(50))


# states


STATES: dict[str, Callable[[str], Pipe]] = {
    "numbers": lambda _: dispatch(numbers(48).shuffle()).map(plus_one),
    "batches of numbers": lambda _: dispatch(numbers(96).shuffle()).batch(2),
    "a filter that drops items": lambda _: dispatch(numbers(96).shuffle()).filter(is_kept),
    "samples": lambda urls: dispatch(
        ShardList(urls).shuffle().sharding_filter().load_wds_shards().group_samples().shuffle_samples(7)
    ).to_tuple("__key__"),
    "shards": lambda urls: (
        dispatch(ShardList(urls)).load_wds_shards().group_samples().shuffle_samples(5).to_tuple("__key__")
    ),
}

#: The numbers of items that are taken before a state is saved.
TAKEN = (0, 1, 7, 30)


@pytest.mark.parametrize(
    ("name", "taken", "method"),
    [
        *itertools.product(STATES, TAKEN, ["fork"]),
        *(itertools.product(STATES, TAKEN, ["spawn"]) if WHOLE else [("samples", 7, "spawn")]),
    ],
)
def test_a_state_resumes_at_the_very_next_item(name: str, taken: int, method: str, shards: str) -> None:
    with load(STATES[name](shards)) as loader:
        loader.seed(7)
        first = [str(item) for item in loader]
        second = [str(item) for item in loader]
    with load(STATES[name](shards)) as loader:
        loader.seed(7)
        assert [str(item) for item in loader] == first
        assert [str(item) for item in itertools.islice(loader, taken)] == second[:taken]
        state = loader.state_dict()
    with load(STATES[name](shards), 2, 0, 0, method) as loader:
        loader.load_state_dict(state)
        resumed = [str(item) for item in loader]
    assert resumed == (second[taken:] if taken else second)


def test_a_state_is_refused_if_the_items_cannot_be_made_again(shards: str) -> None:
    spanning = dispatch(numbers(20).with_epoch(15))
    with load(spanning) as loader:
        assert len(list(itertools.islice(loader, 5))) == 5
        with pytest.raises(StateError, match=naming("sharding_round_robin_dispatch()", "replayed")):
            loader.state_dict()


def test_items_of_a_stream_that_a_loop_has_not_received_are_not_lost_silently() -> None:
    with load(dispatch(numbers(20).with_epoch(15))) as loader:
        assert len(list(loader)) == len(list(loader)) == 15
        assert len(list(itertools.islice(loader, 5))) == 5
        with pytest.warns(UserWarning, match=r"left an epoch of \.with_epoch\(\) .*_dispatch\(\) has no position"):
            assert len(list(itertools.islice(loader, 5))) == 5


@pytest.mark.parametrize("name", ["samples", "shards"])
def test_a_state_requires_as_many_workers(name: str, shards: str) -> None:
    with load(STATES[name](shards)) as loader:
        loader.seed(7)
        assert len(list(itertools.islice(loader, 9))) == 9
        state = merge_states([loader.state_dict()])
    with load(STATES[name](shards), 3) as loader:
        loader.load_state_dict(state)
        with pytest.raises(StateError, match=r"(different number of|as many) ranks (or|and) workers"):
            list(loader)


# other loaders


def test_torchdatas_service_dispatches_on_these_workers() -> None:
    pipe = dispatch(numbers(20).shuffle()).map(plus_one)
    with DataLoader2(pipe, reading_service=MultiProcessingReadingService(2, "spawn", 4)) as loader:
        assert isinstance(loader.reading_service, ShardReadingService)
        assert sorted(loader) == list(range(1, 21))
