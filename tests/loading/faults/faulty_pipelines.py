"""Pipelines and loaders that meet faults."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import psutil
from torch.utils.data import IterDataPipe

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.loading.service.pinning import MemoryPinner
from wds_datapipes.testing import build_shard

from torchdata.dataloader2 import DataLoader2  # isort: skip  # its banner is silenced by the imports above

if os.environ.get("FAULTS_WORKER") == "dies":
    os.kill(os.getpid(), signal.SIGKILL)  # in a worker that imports this

#: The folder and names of the shards, and the number of samples in each.
FOLDER = Path(os.environ.get("FAULTS_FOLDER", "."))
SHARDS = "abcdef"
SAMPLES = 10

#: Called instead of yielding a sample.
Act = Callable[[], object]


def build_shards() -> None:
    for shard in SHARDS:
        keys = [f"{shard}{number}" for number in range(SAMPLES)]
        build_shard(FOLDER / f"{shard}.tar", [{"__key__": key, "txt": b""} for key in keys])


# pipelines


class Acting(IterDataPipe[Any]):
    """Yields the keys of samples, and the result of ``act`` in place of ``at``."""

    def __init__(self, source: IterDataPipe[Any], act: Act, at: str) -> None:
        self.source, self.act, self.at = source, act, at

    def __iter__(self) -> Iterator[Any]:
        for sample in self.source:
            key = sample["__key__"]
            yield self.act() if key == self.at else key


class Large(Acting):
    """Yields large arrays."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(50):
            yield np.full(200_000, number)


class Kept(IterDataPipe[Any]):
    """Stays in the main process."""

    def __init__(self, source: IterDataPipe[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yield from self.source

    def is_replicable(self) -> bool:
        return False


def same(item: Any) -> Any:
    return item


def pinned(pipe: IterDataPipe[Any]) -> IterDataPipe[Any]:
    return MemoryPinner(pipe, same)


def prefetched(pipe: IterDataPipe[Any]) -> IterDataPipe[Any]:
    rest: IterDataPipe[Any] = Kept(pipe).prefetch(2)
    return rest


#: The stage in the main process: none, or a prefetching thread.
TOPS: dict[str, Callable[[IterDataPipe[Any]], IterDataPipe[Any]]] = {
    "bare": same,
    "pinned": pinned,
    "prefetched": prefetched,
}


def samples(shards: str = SHARDS) -> IterDataPipe[Any]:
    pipe = ShardList([f"{FOLDER / name}.tar" for name in shards]).sharding_filter()
    rest: IterDataPipe[Any] = pipe.load_wds_shards().group_samples()
    return rest


def acting(act: Act, at: str = "b5") -> IterDataPipe[Any]:
    return Acting(samples(), act, at)


def plain(stage: type[Acting] = Acting) -> IterDataPipe[Any]:
    """Return a pipeline without faults, so that only the behaviour of the stage counts."""
    return stage(samples(), nap, "")


def expected(workers: int) -> list[str]:
    """Return all keys in their expected order."""
    workers = max(workers, 1)
    parts = [
        [f"{shard}{number}" for shard in SHARDS[first::workers] for number in range(SAMPLES)]
        for first in range(workers)
    ]
    return [part[turn] for turn in range(max(map(len, parts))) for part in parts if turn < len(part)]


# loaders


def loader(
    pipe: IterDataPipe[Any],
    workers: int = 2,
    prefetch: int = 10,
    top: str = "bare",
    method: str | None = None,
    **options: Any,
) -> DataLoader2[Any]:
    service = ShardReadingService(workers, method, worker_prefetch_cnt=prefetch, main_prefetch_cnt=prefetch, **options)
    return DataLoader2(TOPS[top](pipe), reading_service=service)


def pids(dl: DataLoader2[Any]) -> list[int]:
    """Return the process ids of the workers."""
    return [worker.pid for worker in dl.reading_service.report().workers]


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def take(dl: DataLoader2[Any], workers: int, items: Any = None) -> str:
    """Read an epoch; return the number of items, whether they were in order, and how the epoch ended."""
    taken: list[Any] = []
    try:
        for item in iter(dl) if items is None else items:
            taken.append(item)  # noqa: PERF402 - what came before an error counts
    except Exception as error:
        end = describe_error(error)
    else:
        end = "end"
    wanted: list[Any] = expected(workers)
    if taken and not isinstance(taken[0], str):  # it is `Large`
        wanted = [number // workers for number in range(len(taken))]
        taken = [item[0] if (item == item[0]).all() else "mixed" for item in taken]
    order = "" if taken == wanted[: len(taken)] else f" OUT OF ORDER {str(taken)[:1000]}"
    return f"{len(taken)}{order}; {end}"


def read(pipe: IterDataPipe[Any], workers: int = 2, *rest: Any, **options: Any) -> str:
    with loader(pipe, workers, *rest, **options) as dl:
        return take(dl, workers)


# what a worker does instead of yielding a sample


def busy_of(program: int) -> Path:
    """Return the file that a worker of a program creates when it starts to nap."""
    return FOLDER / f"busy {program}"


def nap() -> None:
    busy_of(os.getppid()).touch()
    time.sleep(600)


def nap_in_c() -> None:
    """Sleep without letting any other thread run."""
    busy_of(os.getppid()).touch()
    ctypes.PyDLL(None).sleep(600)


def nap_ignoring_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    nap()


def refuse() -> NoReturn:
    raise LookupError("no such sample")


#: Ways in which a worker may be busy.
BUSY: dict[str, Act] = {"asleep": nap, "in C code": nap_in_c, "deaf to SIGTERM": nap_ignoring_signals}


# waiting


def await_busy() -> None:
    """Wait until a worker of this program has begun to nap."""
    while not busy_of(os.getpid()).exists():
        time.sleep(0.005)


def await_wait(*, is_main: bool = True) -> None:
    """Wait until a thread and the loop of the main thread both wait for a worker."""

    def functions(frame: Any) -> Iterator[str]:
        while frame is not None:
            yield f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_name}"
            frame = frame.f_back

    main = threading.main_thread().ident
    while True:
        stacks = {ident: [*functions(frame)] for ident, frame in sys._current_frames().items()}
        if any(stack[0] == "process_connection.py _wait_s" for stack in stacks.values()) and (
            not is_main or "dataloader2.py __next__" in stacks[main or 0]
        ):
            return
        time.sleep(0.005)


def in_thread(*acts: Act) -> None:
    """Call functions one after the other in a thread."""

    def act() -> None:
        for each in acts:
            each()

    threading.Thread(target=act, daemon=True).start()


# killing a worker


def killed(moment: str, pipe: IterDataPipe[Any], workers: int, prefetch: int, top: str, **options: Any) -> str:
    """Kill the last worker at some point; return the result of this epoch, or of the next one.

    "At rest", the worker has prefetched up to its limit, or all items.
    """
    last = workers - 1
    with loader(pipe, workers, prefetch, top, **options) as dl:
        items: Any = iter(dl)
        victim = pids(dl)[last]
        if moment == "sending":
            items = itertools.chain([next(items) for _ in range(3)], items)
        elif moment == "waited for":
            begun = [next(items) for _ in range(workers)]  # each worker has opened a shard
            in_thread(await_busy, partial(os.kill, victim, signal.SIGKILL))
            return take(dl, workers, itertools.chain(begun, items))
        elif moment == "between epochs":
            assert take(dl, workers, items) == "60; end"
        elif moment in ("at rest", "in shutdown"):
            for _ in range(workers):  # one item of each worker, so that each worker has opened a shard
                next(items)
            if moment == "in shutdown":
                in_thread(partial(os.kill, victim, signal.SIGKILL))
                return "shut down"
            while psutil.Process(victim).status() != psutil.STATUS_SLEEPING:
                time.sleep(0.01)
        elif moment == "in reset":
            await_busy()
        os.kill(victim, signal.SIGKILL)
        return take(dl, workers, items if moment in ("at once", "in reset", "sending") else None)
