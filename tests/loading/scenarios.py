"""Faults of torchdata's reading service, one function each; run as a script, it prints their results as JSON.

A scenario that does not return in time is a "hang". The environment decides whether torchdata is patched, so that the
same scenarios prove the fault and the repair.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from wds_datapipes.loading.torchdata_patches import patches

patches.apply()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchdata.dataloader2 import DataLoader2, InProcessReadingService, MultiProcessingReadingService
    from torchdata.datapipes.iter import IterableWrapper
    from torchdata.datapipes.iter.util import prefetcher


PREFETCHES = [(0, 0), (0, 10), (10, 0), (10, 10)]


class Source(IterDataPipe[Any]):
    """Yields ``counts[worker]`` numbers in each worker, and the result of ``act`` in a worker before number ``at``."""

    def __init__(
        self, counts: list[int], act: Callable[[], object] | None = None, at: tuple[int, int] = (1, 5)
    ) -> None:
        self.counts, self.act, self.at, self.worker = counts, act, at, 0

    def apply_sharding(self, num_of_instances: int, instance_id: int, sharding_group: object = None) -> None:
        self.worker = instance_id

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.counts[self.worker]):
            if self.act is not None and self.at == (self.worker, number):
                yield self.act()
            yield self.worker * 1000 + number


class Refusing(Source):
    """Raises from ``apply_sharding``."""

    def apply_sharding(self, num_of_instances: int, instance_id: int, sharding_group: object = None) -> None:
        raise LookupError(f"no shard for worker {instance_id}")


class Eager(Source):
    """Raises from an ``__iter__`` that is not a generator."""

    def __iter__(self) -> Iterator[Any]:
        raise LookupError("raised by iter")


class Stubborn(Exception):
    """An error whose class cannot be pickled."""

    __module__ = "nowhere"


def loader(
    pipe: IterDataPipe[Any], workers: int = 2, main: int = 10, worker: int = 10, **options: Any
) -> DataLoader2[Any]:
    service = MultiProcessingReadingService(workers, main_prefetch_cnt=main, worker_prefetch_cnt=worker, **options)
    return DataLoader2(pipe, reading_service=service)


def worker_pids(loader: DataLoader2[Any]) -> list[int]:
    return [process.pid for process, _, _ in loader.reading_service._worker_processes]


def read(pipe: IterDataPipe[Any], **options: Any) -> list[Any]:
    with loader(pipe, **options) as dl:
        return list(dl)


# uneven workers


def uneven() -> list[Any]:
    return read(Source([2, 5, 0]), workers=3)


def uneven_shards() -> int:
    return len(read(Source([100, 50, 50]), workers=3))


# dead workers


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(main: int, worker: int) -> list[Any]:
    return read(Source([50, 50], kill), main=main, worker=worker)


def exits(main: int, worker: int) -> list[Any]:
    return read(Source([50, 50], exit_three), main=main, worker=worker)


def exit_three() -> None:
    sys.exit(3)


def exit_at_once() -> None:
    os._exit(7)


def exits_at_once() -> list[Any]:
    return read(Source([50, 50], exit_at_once))


def killed_between_epochs() -> list[Any]:
    with loader(Source([3, 3])) as dl:
        list(dl)
        os.kill(worker_pids(dl)[0], signal.SIGKILL)
        return list(dl)


def killed_then_paused() -> None:
    with loader(Source([50, 50], nap, at=(1, 0)), worker=0) as dl:
        next(iter(dl))
        os.kill(worker_pids(dl)[1], signal.SIGKILL)
        dl._pause()


def killed_then_limited() -> None:
    with loader(Source([50, 50])) as dl:
        iter(dl)
        os.kill(worker_pids(dl)[1], signal.SIGKILL)
        dl.reading_service._limit(3, no_limit)


def no_limit(pipe: Any, limit: int | None) -> Any:
    return pipe


def killed_then_shut_down() -> str:
    dl = loader(Source([50, 50], nap, at=(1, 0)), worker=0)
    next(iter(dl))
    os.kill(worker_pids(dl)[1], signal.SIGKILL)
    dl.shutdown()
    return "shut down"


def dispatched(pipe: IterDataPipe[Any]) -> IterDataPipe[Any]:
    rest: IterDataPipe[Any] = pipe.sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)
    return rest


def dispatcher_killed(main: int, worker: int) -> list[Any]:
    return read(dispatched(Source([50], kill, at=(0, 20))), main=main, worker=worker)


# lost errors


def lock() -> dict[str, object]:
    return {"jpg": b"", "meta": [1, threading.Lock()]}


def unpicklable() -> list[Any]:
    return read(Source([50, 50], lock))


def unpicklable_dispatched() -> list[Any]:
    return read(dispatched(Source([50], lock, at=(0, 20))))


def fail() -> None:
    raise Stubborn("cannot be imported")


def unpicklable_error() -> list[Any]:
    return read(Source([50, 50], fail))


def sharding_fails() -> list[Any]:
    return read(Refusing([3, 3]))


def init(pipe: Any, info: Any) -> Any:
    raise LookupError(f"no such disk in worker {info.worker_id}")


def init_fails() -> list[Any]:
    return read(Source([3, 3]), worker_init_fn=init)


def reset(pipe: Any, info: Any, seeds: Any) -> Any:
    raise LookupError(f"no such seed in worker {info.worker_id}")


def reset_fails() -> list[Any]:
    return read(Source([3, 3]), worker_reset_fn=reset)


def reset_fails_dispatched() -> list[Any]:
    return read(dispatched(Source([10])), worker_reset_fn=reset)


def iter_fails() -> list[Any]:
    return read(Eager([3, 3]))


# shutdown


def nap() -> None:
    time.sleep(60)


def shutdown_in_a_long_item() -> str:
    dl = loader(Source([50, 50], nap, at=(1, 0)), worker=0)
    next(iter(dl))
    dl.shutdown()
    return "shut down"


def shutdown_often() -> str:
    for cycle in range(50):
        dl = loader(Source([1000, 1000]), main=10 * (cycle % 2 == 0))
        iterator = iter(dl)
        next(iterator)
        next(iterator)
        if cycle % 3 == 0:
            del dl, iterator
        else:
            dl.shutdown()
    return "shut down"


def dispatched_epochs() -> int:
    with loader(dispatched(Source([700]))) as dl:
        for _ in range(5):
            iterator = iter(dl)
            next(iterator)
            next(iterator)
        return len(list(dl))


def break_and_iterate_again() -> set[int]:
    with loader(Source([60, 59])) as dl:
        lengths = set()
        for _ in range(5):
            next(iter(dl))
            lengths.add(len(list(dl)))
        return lengths


# pauses


def paused_at_the_end() -> str:
    """Pause twice during the last sleep of a prefetcher's thread, which is long enough for both."""
    prefetcher.PRODUCER_SLEEP_INTERVAL = 0.02  # the thread sleeps ten times as long
    for _ in range(5):
        with DataLoader2(IterableWrapper(range(3)).prefetch(), reading_service=InProcessReadingService()) as dl:
            next(iter(dl))
            time.sleep(0.05)  # the thread ends
            for _ in range(3):
                dl._pause()
                dl._resume()
    return "resumed"


# local functions


def add(number: int) -> IterDataPipe[Any]:
    return Source([3, 3]).map(lambda item: item + number)


def stage_of_a_local_class() -> IterDataPipe[Any]:
    class Local(IterDataPipe[Any]):
        def __init__(self, source: IterDataPipe[Any]) -> None:
            self.source = source

        def __iter__(self) -> Iterator[Any]:
            yield from self.source

    return Local(Source([3]))


def local_class() -> list[Any]:
    return list(DataLoader(stage_of_a_local_class(), batch_size=None))


def lambda_in_process() -> list[Any]:
    return list(DataLoader2(add(1)))


def lambda_in_a_spawned_worker() -> list[Any]:
    return read(add(1), multiprocessing_context="spawn")


def lambda_in_a_spawned_dispatcher() -> list[Any]:
    return read(dispatched(add(1)), multiprocessing_context="spawn")


def lambda_in_a_state() -> object:
    return DataLoader2(add(1)).state_dict()


# the end of the main process


def in_another_main(action: Callable[[int], None]) -> str:
    """Start a loader in a process with its own group; act on it; return the remaining processes of the group."""
    reader, writer = os.pipe()
    main = os.fork()
    if not main:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        dl = loader(Source([10**9, 10**9], nap, at=(1, 1)), worker=0)
        iterator = iter(dl)
        next(iterator)
        os.write(writer, json.dumps(worker_pids(dl)).encode())
        try:
            for _ in iterator:
                pass
        except KeyboardInterrupt:
            dl.shutdown()
        os._exit(0)
    workers = [psutil.Process(pid) for pid in json.loads(os.read(reader, 1000))]
    action(main)
    gone, left = psutil.wait_procs([psutil.Process(main), *workers], timeout=30)
    for process in left:
        process.kill()
    return f"{len(left)} left of {len(gone) + len(left)}"


def main_killed() -> str:
    return in_another_main(lambda pid: os.kill(pid, signal.SIGKILL))


def main_terminated() -> str:
    return in_another_main(lambda pid: os.kill(pid, signal.SIGTERM))


def interrupted() -> str:
    return in_another_main(lambda pid: os.killpg(pid, signal.SIGINT))


# order


def shuffled() -> IterDataPipe[int]:
    pipe: IterDataPipe[int] = IterableWrapper(range(100)).shuffle().sharding_filter()
    return pipe


def orders(service: Any, seed: int | None = None) -> list[list[int]]:
    dl = DataLoader2(shuffled(), reading_service=service)
    if seed is not None:
        dl.seed(seed)
    with dl:
        epochs = [list(dl) for _ in range(4)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    return epochs


def describe(make: Callable[[], Any], seed: int | None = None) -> str:
    """Return how many different orders 4 epochs have, and whether another run has the same ones.

    A loader's own seed must determine the order, and without one so must torch's.
    """
    torch.manual_seed(5)
    first = orders(make(), seed)
    torch.manual_seed(5 if seed is None else 6)
    second = orders(make(), seed)
    return f"{len(set(map(tuple, first)))} orders, the same in another run: {first == second}"


def two_workers() -> Any:
    return MultiProcessingReadingService(2)


def nothing() -> None:
    return None


# These scenarios end with and without the patches.
ENDING: dict[str, Callable[[], object]] = {
    "uneven": uneven,
    "uneven shards": uneven_shards,
    "break, iterate again": break_and_iterate_again,
    "main killed": main_killed,
    "main terminated": main_terminated,
    "Ctrl-C": interrupted,
    "order, workers, seed": lambda: describe(two_workers, 7),
    "order, workers, no seed": lambda: describe(two_workers),
    "order, in process, seed": lambda: describe(InProcessReadingService, 7),
    "order, in process, no seed": lambda: describe(InProcessReadingService),
    "order, no service, seed": lambda: describe(nothing, 7),
    "order, no service, no seed": lambda: describe(nothing),
    "local class": local_class,
    "lambda, no workers": lambda_in_process,
    "lambda, forked": lambda: read(add(1)),
    "lambda, spawned": lambda_in_a_spawned_worker,
    "lambda, spawned dispatcher": lambda_in_a_spawned_dispatcher,
    "lambda, state": lambda_in_a_state,
}

# These scenarios do not end without the patches.
HANGING: dict[str, Callable[[], object]] = {
    **{f"killed, {main}/{worker}": partial(killed, main, worker) for main, worker in PREFETCHES},
    **{f"exit, {main}/{worker}": partial(exits, main, worker) for main, worker in PREFETCHES},
    "exit at once": exits_at_once,
    "killed between epochs": killed_between_epochs,
    "killed, then paused": killed_then_paused,
    "killed, then limited": killed_then_limited,
    "killed, then shut down": killed_then_shut_down,
    **{f"dispatcher killed, {main}/{worker}": partial(dispatcher_killed, main, worker) for main, worker in PREFETCHES},
    "item cannot be pickled": unpicklable,
    "dispatched item cannot be pickled": unpicklable_dispatched,
    "error cannot be pickled": unpicklable_error,
    "apply_sharding raises": sharding_fails,
    "worker_init_fn raises": init_fails,
    "worker_reset_fn raises": reset_fails,
    "worker_reset_fn raises, dispatched": reset_fails_dispatched,
    "iter raises": iter_fails,
    "shutdown in a long item": shutdown_in_a_long_item,
    "50 loaders": shutdown_often,
    "paused at the end": paused_at_the_end,
    "dispatched epochs": dispatched_epochs,
}


def result_of(scenario: Callable[[], object]) -> str:
    """Run a scenario; return its result or error, and whether it left a worker behind."""
    try:
        outcome = str(scenario())
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    tracker = vars(resource_tracker._resource_tracker)["_pid"]  # multiprocessing's own, started once in a program
    children = [process for process in psutil.Process().children() if process.pid != tracker]
    left = [process for process in children if process.status() != psutil.STATUS_ZOMBIE]
    return outcome + (f" ({len(left)} workers left)" if left else "")


def run(scenarios: dict[str, Callable[[], object]], limit: float) -> dict[str, str]:
    """Run scenarios at the same time, each in a separate process; return the result of each within the limit."""
    selector = selectors.DefaultSelector()
    pids = []
    gc.freeze()  # skip collecting imported modules in each process
    for name, scenario in scenarios.items():
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.setpgid(0, 0)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.write(writer, result_of(scenario)[-4000:].encode())
            os._exit(0)
        os.close(writer)
        pids.append(pid)
        selector.register(reader, selectors.EVENT_READ, name)
    outcomes = dict.fromkeys(scenarios, "hang")
    deadline = time.monotonic() + limit
    while selector.get_map() and (left := deadline - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            outcomes[key.data] = os.read(key.fd, 4000).decode(errors="replace")
            selector.unregister(key.fd)
    for pid in pids:
        os.killpg(pid, signal.SIGKILL)
    return outcomes


if __name__ == "__main__":
    print(json.dumps(run(ENDING, 60) | run(HANGING, float(sys.argv[1]))))
