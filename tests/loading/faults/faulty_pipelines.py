"""Pipelines and loaders that meet the faults of `fault_table`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
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


def take(dl: DataLoader2[Any], workers: int, items: Any = None) -> str:
    """Read an epoch; return the number of items, whether they were in order, and how the epoch ended."""
    taken: list[Any] = []
    try:
        for item in iter(dl) if items is None else items:
            taken.append(item)  # noqa: PERF402 - what came before an error counts
    except Exception as error:
        end = f"{type(error).__name__}: {error}"
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


class TwoArguments(Exception):
    """An error that needs two arguments."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(what, where)


class Stubborn(Exception):
    """An error whose class cannot be pickled."""

    __module__ = "nowhere"


class Choosy(Exception):
    """An error that cannot be constructed from a message."""

    def __init__(self, number: Any) -> None:
        super().__init__(int(number))


class Aside(BaseException):
    """An error that is not an `Exception`."""


def refuse() -> NoReturn:
    raise LookupError("no such sample")


def run_out() -> NoReturn:
    raise MemoryError("no room")


def recurse() -> object:
    return recurse()


def stop() -> NoReturn:
    raise StopIteration


def fail_with_two_arguments() -> NoReturn:
    raise TwoArguments("no such", "sample")


def fail_stubbornly() -> NoReturn:
    raise Stubborn("cannot be imported")


def fail_choosily() -> NoReturn:
    raise Choosy(7)


def fail_at_length() -> NoReturn:
    raise LookupError("x" * 1_000_000)


def fail_aside() -> NoReturn:
    raise Aside("no exception")


def interrupt() -> NoReturn:
    raise KeyboardInterrupt


def leave(code: Any) -> NoReturn:
    sys.exit(code)


def leave_at_once(code: int) -> NoReturn:
    os._exit(code)


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    nap()


def lock() -> object:
    return threading.Lock()


def nested_lock() -> object:
    return {"jpg": b"", "meta": [1, threading.Lock()]}


def ones() -> object:
    return np.ones(1_000_000)


class Sealed:
    """Can be pickled, but not unpickled."""

    def __init__(self, size: int) -> None:
        self.data = np.zeros(size, np.uint8)

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise LookupError("sealed")


def fork_sleeper() -> None:
    """Die and leave a process behind that inherits all open descriptors."""
    if not os.fork():
        nap()
    os.kill(os.getpid(), signal.SIGKILL)


class Refusing(Acting):
    """Cannot be split."""

    def apply_sharding(self, num_of_instances: int, instance_id: int, sharding_group: object = None) -> None:
        raise LookupError(f"no shard for worker {instance_id}")


class Eager(Acting):
    """Has an ``__iter__`` that is not a generator."""

    def __iter__(self) -> Iterator[Any]:
        raise LookupError("raised by iter")


class Numb(Acting):
    """Has an ``__iter__`` that does not return an iterator."""

    def __iter__(self) -> Iterator[Any]:
        return 7  # type: ignore[return-value]  # as careless code does


class Fragile(Acting):
    """Cannot be unpickled in a spawned worker."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        if in_a_spawned_worker():
            raise LookupError("not in a worker")
        self.__dict__.update(state)


def in_a_spawned_worker() -> bool:
    return sys.modules["__main__"].__name__ == "__mp_main__"


def init_fails(pipe: Any, info: Any) -> Any:
    raise LookupError(f"no such disk in worker {info.worker_id}")


def init_leaves(pipe: Any, info: Any) -> Any:
    sys.exit(4)


def init_stops(pipe: Any, info: Any) -> Any:
    raise StopIteration


def reset_fails(pipe: Any, info: Any, seeds: Any) -> Any:
    raise LookupError(f"no such seed in worker {info.worker_id}")


def reset_naps(pipe: Any, info: Any, seeds: Any) -> Any:
    nap()


#: Ways in which a worker may be busy.
BUSY: dict[str, Act] = {"asleep": nap, "in C code": nap_in_c, "deaf to SIGTERM": nap_ignoring_signals}
