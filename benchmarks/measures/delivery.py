"""Loaders that deliver items from worker processes, and what bench_transport.py measures of them."""

from __future__ import annotations

import functools
import multiprocessing
import operator
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import webdataset
from harness.contest import in_turn
from harness.processes import in_child, memory
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from measures.items import BURST, KINDS, Source

__all__ = [
    "LOADERS",
    "OURS",
    "REFERENCE",
    "deliver",
    "measure_delay",
    "measure_in_turn",
    "measure_waiting_loop",
    "measure_waiting_workers",
]

#: The time limit of a measurement in seconds, after which the contender counts as hanging.
TIME_LIMIT_S = 30.0
#: The number of attempts for a contender that hangs.
ATTEMPTS = 2
#: The duration of the warm-up in seconds.
WARM_UP_S = 0.33
PAGE = 4096
SHM = Path("/dev/shm")


def ours(source: Source, workers: int, method: str, *, ahead: int = 10) -> Iterable[Any]:
    from torchdata.dataloader2 import DataLoader2

    from wds_datapipes import ShardReadingService

    service = ShardReadingService(
        workers, method, worker_prefetch_cnt=ahead, main_prefetch_cnt=ahead, timeout_s=TIME_LIMIT_S
    )
    loader: Iterable[Any] = DataLoader2(source, reading_service=service)
    return loader


def stock(source: Source, workers: int, method: str) -> Iterable[Any]:
    from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService

    loader: Iterable[Any] = DataLoader2(source, reading_service=MultiProcessingReadingService(workers, method))
    return loader


def dataloader(source: Source, workers: int, method: str) -> Iterable[Any]:
    return DataLoader(source, None, num_workers=workers, prefetch_factor=4, multiprocessing_context=method)


def stateful(source: Source, workers: int, method: str) -> Iterable[Any]:
    loader: Iterable[Any] = StatefulDataLoader(
        source, None, num_workers=workers, prefetch_factor=4, multiprocessing_context=method
    )
    return loader


def webloader(source: Source, workers: int, method: str) -> Iterable[Any]:
    loader: Iterable[Any] = webdataset.WebLoader(
        source, batch_size=None, num_workers=workers, multiprocessing_context=method
    )
    return loader


Build = Callable[[Source, int, str], Iterable[Any]]

REFERENCE = "WebLoader (webdataset)"
OURS = "ShardReadingService (ours)"
LOADERS: dict[str, Build] = {
    OURS: ours,
    "ShardReadingService, prefetch 0 (ours)": functools.partial(ours, ahead=0),
    "DataLoader2, patched (ours)": stock,
    "DataLoader": dataloader,
    "StatefulDataLoader": stateful,
    REFERENCE: webloader,
}


class Delivery(NamedTuple):
    """The results of one contender in one round."""

    samples_per_s: float
    cpu_s_per_sample: float
    """The CPU time of the main process, in all threads."""
    cores: float
    """The CPU time of the main process, relative to the elapsed time."""
    seconds_to_first: float
    memory: int
    """The increase of the memory of all processes, in bytes."""
    shared: int
    """The part of it in shared memory."""
    shm: int
    """The increase of ``/dev/shm``, in bytes."""
    item_bytes: int


def deliver(build: Build, kind: str, workers: int, method: str, seconds: float) -> Delivery:
    """Build a loader, wait for its first item, count items for some seconds, and measure the memory."""
    memory_before, shared_before = memory_of_all()
    shm_before = shm_in_use()
    samples, tensor = KINDS[kind].samples, KINDS[kind].tensor
    begin = time.perf_counter()
    items: Iterator[Any] = iter(build(Source(kind), workers, method))
    item = next(items)
    to_first = time.perf_counter() - begin
    item_bytes = size(item)

    def consume(duration_s: float) -> tuple[int, float]:
        nonlocal item
        count, begin = 0, time.perf_counter()
        while (now := time.perf_counter()) < begin + duration_s:
            item = next(items)
            if tensor is not None:
                tensor(item).numpy().reshape(-1)[::PAGE].tobytes()
            count += samples
        return count, now - begin

    if not seconds:
        return Delivery(0, 0, 0, to_first, 0, 0, 0, item_bytes)
    consume(WARM_UP_S)
    cpu = time.process_time()
    count, elapsed = consume(seconds)
    cpu = time.process_time() - cpu
    peaks: tuple[int, ...] = (0, 0, 0)
    for _ in range(5):
        consume(0.02)
        time.sleep(0.1)  # prefetching reaches its limit
        peaks = tuple(map(max, peaks, (*memory_of_all(), shm_in_use())))
    memory, shared, shm = map(operator.sub, peaks, (memory_before, shared_before, shm_before))
    return Delivery(count / elapsed, cpu / count, cpu / elapsed, to_first, memory, shared, shm, item_bytes)


def measure_delay(build: Build, method: str) -> float:
    """Return the delay of the last sample before a pause of the pipeline, in seconds."""
    items = iter(build(Source("bursts"), 1, method))
    delays = []
    for _ in range(5):
        for _ in range(BURST):
            produced = next(items)
        delays.append(time.monotonic() - produced)
    return float(statistics.median(delays[1:]))


def measure_waiting_loop(build: Build, method: str) -> float:
    """Return the CPU time of all processes while the loop waits for a worker, relative to the elapsed time."""
    items = iter(build(Source("rare"), 1, method))
    next(items)
    return cores_of_all(lambda: [next(items), next(items)])


def measure_waiting_workers(build: Build, method: str) -> float:
    """Return the CPU time of all processes while the workers wait for the loop, relative to the elapsed time."""
    items = iter(build(Source("SMALL"), 1, method))
    next(items)
    time.sleep(0.3)
    return cores_of_all(lambda: time.sleep(1))


def size(item: Any) -> int:
    """Return the payload of an item in bytes."""
    if isinstance(item, torch.Tensor):
        return item.nbytes
    if isinstance(item, (list, tuple)):
        return sum(map(size, item))
    if isinstance(item, dict):
        return sum(map(size, item.values()))
    return len(item) if isinstance(item, (bytes, str)) else 8


def memory_of_all() -> tuple[int, int]:
    """Return the memory of this process, its parent and its workers in bytes, and the part of it that is shared memory.

    Memory of several processes counts once.
    """
    pids = (os.getpid(), os.getppid(), *(child.pid or 0 for child in multiprocessing.active_children()))
    return memory(*pids), memory(*pids, kind="Pss_Shmem")


def shm_in_use() -> int:
    """Return the used bytes of ``/dev/shm``."""
    if not SHM.is_dir():
        return 0
    facts = os.statvfs(SHM)
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize


def cores_of_all(wait: Callable[[], object]) -> float:
    """Return the CPU time of this process and its workers during ``wait``, relative to the elapsed time."""
    # The clock IDs of other processes, see clock_getcpuclockid(3).
    clocks = [(~(child.pid or 0) << 3) | 2 for child in multiprocessing.active_children()]
    clocks.append(time.CLOCK_PROCESS_CPUTIME_ID)
    begin, cpu = time.perf_counter(), sum(map(time.clock_gettime, clocks))
    wait()
    return (sum(map(time.clock_gettime, clocks)) - cpu) / (time.perf_counter() - begin)


def in_separate_process(name: str, measure: Callable[..., Any], *arguments: Any) -> Any:
    """Measure a loader in a forked process, which is killed with all of its workers.

    torchdata's service hangs occasionally, so the measurement is repeated in this case.
    """

    def measured() -> Any:
        warnings.simplefilter("ignore")  # torchdata's deprecation warning
        # Imported before the timing; also patches torchdata.
        from wds_datapipes import ShardReadingService  # noqa: F401  imported for its side effects

        return measure(LOADERS[name], *arguments)

    for _ in range(ATTEMPTS):
        with suppress(TimeoutError):
            return in_child(measured, timeout_s=TIME_LIMIT_S)
    raise TimeoutError(f"{name} has hung {ATTEMPTS} times in {measure.__name__}{arguments}")


def measure_in_turn(
    title: str, names: Iterable[str], rounds: int, measure: Callable[..., Any], *work: Any
) -> dict[str, Any]:
    """Measure each contender in each round; one that hangs every time is left out."""
    measures = {name: functools.partial(in_separate_process, name, measure, *work) for name in names}
    found, hung = in_turn(title, measures, rounds, errors=TimeoutError, required=[REFERENCE])
    for why in hung.values():
        print(f"{why}, and is left out")
    return found
