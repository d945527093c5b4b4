"""Faults at the start of workers, and of what they get from the system."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn
from unittest import mock

import numpy as np
from fault_table import EARLY, ITER, LEFT_PIPES, LOOKUP, NONE_OPENED, died, fault, raised, signalled_to
from faulty_pipelines import Acting, Large, acting, describe_error, loader, plain, read, refuse
from torch.utils.data import IterDataPipe


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


fault("start: apply_sharding", pipeline=plain(Refusing), says="0; " + raised(LOOKUP, 0, "no shard for worker 0", EARLY))
fault(
    "start: iter raises",
    pipeline=plain(Eager),
    turn=(3, 0, "pinned"),
    says="0; " + raised(LOOKUP, 0, "raised by iter", EARLY),
)
fault(
    "start: iter returns a number",
    pipeline=plain(Numb),
    turn=(1, 10, "bare"),
    says="0; " + raised("TypeError: Caught TypeError", 0, "'int' object is not an", EARLY),
)
fault(
    "start: worker_init_fn",
    pipeline=plain(),
    turn=(3, 0, "bare"),
    worker_init_fn=init_fails,
    says="0; " + raised(LOOKUP, 0, "no such disk in worker 0", EARLY),
)
fault(
    "start: worker_init_fn exits",  # in all workers, and any of them may be noticed first
    pipeline=plain(),
    worker_init_fn=init_leaves,
    says="0; " + died("Worker [01]", "ended with exit code 4", NONE_OPENED),
)
fault(
    "start: worker_init_fn stops",
    pipeline=plain(),
    worker_init_fn=init_stops,
    says="0; " + raised("RuntimeError: Caught StopIteration", 0, "init_stops", EARLY),
)
fault(
    "start: worker_reset_fn",
    pipeline=plain(),
    worker_reset_fn=reset_fails,
    says="0; " + raised(LOOKUP, 0, "no such seed in worker 0", EARLY),
)
fault(
    "spawn: error",
    pipeline=acting(refuse),
    turn=(1, 10, "bare"),
    method="spawn",
    says="15; " + raised(LOOKUP, 0, "in refuse\n"),
)
fault(
    "spawn: unpickling fails",
    pipeline=plain(Fragile),
    turn=(1, 10, "bare"),
    method="spawn",
    says="0; " + raised(LOOKUP, 0, "not in a worker", EARLY),
)


def cannot_fork(after: int, pipe: IterDataPipe[Any]) -> str:
    """Make ``os.fork`` fail after ``after`` calls, as it does at the limit of processes."""
    fork, calls = os.fork, itertools.count()

    def limited() -> int:
        if next(calls) >= after:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    with mock.patch("os.fork", limited):
        return read(pipe)


@contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """Allow this process only ``left`` more descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = [os.dup(0)]
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while fillers[-1] < highest:
        fillers.append(os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1 + left, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in fillers:
            os.close(each)


def too_many_files(left: int) -> str:
    with few_descriptors(left):
        return read(plain())


for after in range(2):
    fault(
        f"start: {after} forks",
        says=rf"0; BlockingIOError: \[Errno 11\] Worker {after} cannot be started: Resource temporarily unavailable",
        left=LEFT_PIPES,
    )(partial(cannot_fork, after, plain()))
for left in (1, 2, 5, 8, 11):
    lost = r"0; OSError: \[Errno 24\] Worker [01] cannot be started: Too many open files|60; end"
    fault(
        f"start: {left} descriptors",
        says=lost if left > 1 else r"0; OSError: \[Errno 24\] Too many open files",
        left=LEFT_PIPES,
    )(partial(too_many_files, left))


@fault(
    "too many files later",
    says=r"OSError: this process has too many open files to receive a segment .* `ulimit -n`" + ITER,
)
def too_many_files_later() -> str:
    """Keep large items until no descriptor is left to receive another one."""
    kept: list[Any] = []
    with loader(plain(Large)) as dl:
        items = iter(dl)
        kept.append(next(items))
        try:
            with few_descriptors(0):
                kept.extend(items)
        except OSError as error:
            assert all((array == array[0]).all() for array in kept)
            return describe_error(error)
    return "no error"


@fault("spawn: killed at import", says="0; " + signalled_to("Worker 0", shard=NONE_OPENED))
def killed_at_import() -> str:
    """Kill a spawned worker while it is still receiving more than a pipe can buffer."""
    pipe = plain()
    vars(pipe)["ballast"] = b"x" * 1_000_000
    with mock.patch.dict(os.environ, FAULTS_WORKER="dies"):
        return read(pipe, 1, method="spawn")


def refuse_memory(*_: Any) -> NoReturn:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def ones() -> object:
    return np.ones(1_000_000)


def without_memory(pipe: Any, info: Any) -> Any:
    mock.patch("os.ftruncate", refuse_memory).start()
    return pipe


fault(
    "no memory for an item",
    pipeline=acting(ones),
    worker_init_fn=without_memory,
    says="11; " + raised("OSError: Caught OSError", 1, "Cannot allocate memory"),
)


@fault(
    "start: no memory",
    says="0; " + died("Worker [01]", "ended with exit code 1", NONE_OPENED),
    noise=r"Process \S+:\n.*Traceback .*Cannot allocate memory\n.*",  # the other may be killed during its traceback
)
def no_memory_for_the_page() -> str:
    with mock.patch("os.ftruncate", refuse_memory):
        return read(plain())
