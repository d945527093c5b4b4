"""What does it cost to bring an item from a worker process to the training loop?

    python benchmarks/bench_delivery.py --json delivery.json --plot delivery.png

The sources are synthetic and nearly free, so delivery is all there is to measure:

- SMALL: samples of 200 B of text and a class, one by one;
- IMG: samples of 100 KB of bytes and a class, one by one;
- LISTS: lists of 64 such samples;
- ARRAY: samples of a tensor of 100 KB, cloned each time, and a class, one by one;
- BATCHES: a tensor of 64 x 3 x 224 x 224 bytes, cloned each time, and 64 labels.

The loop looks at a byte of each page of the tensors that it gets, and drops them. Every contender is a process of its
own, forked after the imports and ended with its workers once it has been measured; they take turns. The rate is counted
over some time after the first third of a second. The time to the first item is that of building the loader, too. Memory
is what the loader adds to all processes together (PSS, so shared memory counts once), while everything that may be
ahead is ahead.

Measured, times WebLoader with one and two workers, on a machine that had other work to do: SMALL 25 and 27, BATCHES
6.2 and 4.3, ARRAY 9.0 and 4.4, IMG 2.7 and 2.4. The main process spends 4.5 us on a sample of SMALL, where WebLoader's
spends 140, and 6.6 us on one of BATCHES, where it is 79.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import operator
import os
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import webdataset
from contest import options, parse, pyplot, write_report
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.utils.data import DataLoader, IterDataPipe
from torchdata.stateful_dataloader import StatefulDataLoader

#: How long one measurement may take before its contender is taken for hung, in seconds.
PATIENCE_S = 30.0
#: How often one that hangs may try again.
TRIES = 2
#: What is delivered before the counting begins, in seconds.
WARM_UP_S = 0.33
PAGE = 4096
SHM = Path("/dev/shm")
KEY = "09d"
#: How many samples are made at once.
BURST = 40


class Kind(NamedTuple):
    """What is delivered.

    Attributes:
        items: makes them, without an end.
        samples: how many of them an item is.
        tensor: the tensor of an item that the loop looks at, if there is one.
    """

    items: Callable[[], Iterator[Any]]
    samples: int = 1
    tensor: Callable[[Any], torch.Tensor] | None = None


def small() -> Iterator[Any]:
    text = os.urandom(200)
    for number in itertools.count():
        yield {"__key__": format(number, KEY), "txt": text, "cls": number % 1000}


def img() -> Iterator[Any]:
    images = [os.urandom(100_000) for _ in range(64)]  # as many as a list has: a pickle keeps one of each
    for number in itertools.count():
        yield {"__key__": format(number, KEY), "jpg": images[number % 64], "cls": number % 1000}


def lists() -> Iterator[Any]:
    samples = img()
    while True:
        yield list(itertools.islice(samples, 64))


def array() -> Iterator[Any]:
    image = torch.randint(0, 256, (3, 182, 183), dtype=torch.uint8)
    for number in itertools.count():
        yield {"__key__": format(number, KEY), "image": image.clone(), "cls": number % 1000}


def batches() -> Iterator[Any]:
    images = torch.randint(0, 256, (64, 3, 224, 224), dtype=torch.uint8)
    labels = torch.arange(64)
    while True:
        yield images.clone(), labels.clone()


def bursts() -> Iterator[Any]:
    """Yield forty samples at once, and then the next ones a quarter of a second later; a sample is when it was made."""
    while True:
        for _ in range(BURST):
            yield time.monotonic()
        time.sleep(0.25)


def seldom() -> Iterator[Any]:
    while True:
        time.sleep(0.5)
        yield 1


KINDS = {
    "SMALL": Kind(small),
    "IMG": Kind(img),
    "LISTS": Kind(lists, 64),
    "ARRAY": Kind(array, 1, lambda sample: sample["image"]),
    "BATCHES": Kind(batches, 64, lambda batch: batch[0]),
    "bursts": Kind(bursts),
    "seldom": Kind(seldom),
}
#: Those that are delivered as fast as can be.
FAST = ("SMALL", "IMG", "LISTS", "ARRAY", "BATCHES")


class Source(IterDataPipe[Any]):
    """Makes items of one kind in every worker; it is an ``IterableDataset``, too."""

    _is_child_datapipe = False

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        yield from KINDS[self.kind].items()


def ours(source: Source, workers: int, method: str, *, ahead: int = 10) -> Iterable[Any]:
    from torchdata.dataloader2 import DataLoader2

    from wds_datapipes import ShardReadingService

    service = ShardReadingService(
        workers, method, worker_prefetch_cnt=ahead, main_prefetch_cnt=ahead, timeout_s=PATIENCE_S
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
    "the same, prefetch 0 (ours)": functools.partial(ours, ahead=0),
    "DataLoader2, repaired (ours)": stock,
    "DataLoader2, unpatched": stock,
    "DataLoader": dataloader,
    "StatefulDataLoader": stateful,
    REFERENCE: webloader,
}


class Delivery(NamedTuple):
    """How one contender delivered in one turn."""

    samples_per_s: float
    cpu_s_per_sample: float
    """Of the main process, all threads."""
    cores: float
    """The same, as a part of the time on the clock."""
    seconds_to_first: float
    memory: int
    """Bytes that all processes together have more than before."""
    shared: int
    """Those of them in shared memory."""
    shm: int
    """Bytes in ``/dev/shm``."""
    item_bytes: int


def deliver(build: Build, kind: str, workers: int, method: str, seconds: float) -> Delivery:
    """Build a loader, wait for its first item, count for some seconds, and look at what memory it has taken."""
    memory_before, shared_before = memory_of_all()
    shm_before = shm_in_use()
    samples, tensor = KINDS[kind].samples, KINDS[kind].tensor
    begin = time.perf_counter()
    items: Iterator[Any] = iter(build(Source(kind), workers, method))
    item = next(items)
    to_first = time.perf_counter() - begin
    item_bytes = size(item)

    def take(for_s: float) -> tuple[int, float]:
        nonlocal item
        count, begin = 0, time.perf_counter()
        while (now := time.perf_counter()) < begin + for_s:
            item = next(items)
            if tensor is not None:
                tensor(item).numpy().reshape(-1)[::PAGE].tobytes()
            count += samples
        return count, now - begin

    if not seconds:
        return Delivery(0, 0, 0, to_first, 0, 0, 0, item_bytes)
    take(WARM_UP_S)
    cpu = time.process_time()
    count, lasted = take(seconds)
    cpu = time.process_time() - cpu
    peaks: tuple[int, ...] = (0, 0, 0)
    for _ in range(5):
        take(0.02)
        time.sleep(0.1)  # all that may be ahead is made
        peaks = tuple(map(max, peaks, (*memory_of_all(), shm_in_use())))
    memory, shared, shm = map(operator.sub, peaks, (memory_before, shared_before, shm_before))
    return Delivery(count / lasted, cpu / count, cpu / lasted, to_first, memory, shared, shm, item_bytes)


def lateness(build: Build, method: str) -> float:
    """Return how long after it was made the last sample before a pause of the pipeline arrives, in seconds."""
    items = iter(build(Source("bursts"), 1, method))
    late = []
    for _ in range(5):
        for _ in range(BURST):
            made = next(items)
        late.append(time.monotonic() - made)
    return float(statistics.median(late[1:]))


def starving(build: Build, method: str) -> float:
    """Return the processor time, of all processes, while the loop waits for a worker, as a part of the time."""
    items = iter(build(Source("seldom"), 1, method))
    next(items)
    return cores_of_all(lambda: [next(items), next(items)])


def sated(build: Build, method: str) -> float:
    """The same while the workers wait for the loop."""
    items = iter(build(Source("SMALL"), 1, method))
    next(items)
    time.sleep(0.3)
    return cores_of_all(lambda: time.sleep(1))


def size(item: Any) -> int:
    """Return the bytes of payload in an item."""
    if isinstance(item, torch.Tensor):
        return item.nbytes
    if isinstance(item, (list, tuple)):
        return sum(map(size, item))
    if isinstance(item, dict):
        return sum(map(size, item.values()))
    return len(item) if isinstance(item, (bytes, str)) else 8


def memory_of_all() -> tuple[int, int]:
    """Return the bytes in memory of this process, of its parent and its workers, and those that are shared memory.

    What several processes have is counted once.
    """
    pids = (os.getpid(), os.getppid(), *(child.pid for child in multiprocessing.active_children()))
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii") for pid in pids]
    total, shared = (sum(int(text.split(f"{mark}:")[1].split()[0]) for text in texts) for mark in ("Pss", "Pss_Shmem"))
    return 1024 * total, 1024 * shared


def shm_in_use() -> int:
    """Return the bytes in use in ``/dev/shm``."""
    if not SHM.is_dir():
        return 0
    facts = os.statvfs(SHM)
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize


def cores_of_all(wait: Callable[[], object]) -> float:
    """Return the processor time that this process and its workers take during ``wait``, as a part of its time."""
    # The kernel's number of another process's clock, see clock_getcpuclockid(3).
    clocks = [(~(child.pid or 0) << 3) | 2 for child in multiprocessing.active_children()]
    clocks.append(time.CLOCK_PROCESS_CPUTIME_ID)
    begin, cpu = time.perf_counter(), sum(map(time.clock_gettime, clocks))
    wait()
    return (sum(map(time.clock_gettime, clocks)) - cpu) / (time.perf_counter() - begin)


def in_process_of_its_own(name: str, measure: Callable[..., Any], *arguments: Any) -> Any:
    """Measure a loader in a fork of this process, which ends with all of its workers.

    torchdata's service hangs now and then, so that it gets another try.
    """
    for _ in range(TRIES):
        near, far = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=_measure, args=(far, name, measure, arguments))
        process.start()
        far.close()
        try:
            if near.poll(PATIENCE_S):
                return near.recv()
        except EOFError:
            raise RuntimeError(f"{name} ended without a result in {measure.__name__}{arguments}") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            near.close()
    raise TimeoutError(f"{name} has hung {TRIES} times in {measure.__name__}{arguments}")


def _measure(answers: Connection, name: str, measure: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    os.environ["WDS_DATAPIPES_PATCHES"] = "0" if "unpatched" in name else "1"
    warnings.simplefilter("ignore")  # torchdata's banner, which says that it is no longer developed
    # Before anything is timed; this repairs torchdata, too.
    from wds_datapipes import ShardReadingService  # noqa: F401  for what importing it does

    answers.send(measure(LOADERS[name], *arguments))
    signal.pause()  # until it is ended with its workers


def main() -> None:
    parser = options(__doc__, rounds=5)
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2], help="numbers of worker processes")
    parser.add_argument("--seconds", type=float, default=0.7, help="how long to count")
    parser.add_argument("--kinds", nargs="+", choices=FAST, default=FAST, help="what is delivered (all)")
    parser.add_argument("--loaders", default="", help="only the reference and those with this in their name")
    arguments = parse(parser)
    names = [name for name in LOADERS if name == REFERENCE or arguments.loaders in name]
    idlers = names
    if arguments.quick:
        arguments.workers, arguments.rounds, arguments.seconds, arguments.kinds = [1], 1, 0.1, ["BATCHES"]
        idlers = [OURS, REFERENCE]
    console = Console(width=120)
    deliveries: dict[str, dict[str, list[Delivery]]] = {}
    for kind, workers in itertools.product(arguments.kinds, arguments.workers):
        title = f"{kind}, {workers} worker{'s' if workers > 1 else ''}"
        work = (kind, workers, "fork", arguments.seconds)
        found = deliveries[title] = in_turn(title, names, arguments.rounds, deliver, *work)
        sizes = {name: {run.item_bytes for run in runs} for name, runs in found.items()}
        if len(set().union(*sizes.values())) != 1:
            raise AssertionError(f"{title}: the contenders did not deliver the same: {sizes}")
        show_deliveries(console, title, found)
    manners = {
        "ms late": in_turn("late", idlers, arguments.rounds, lateness, "fork"),
        "cores, loop waits": in_turn("waiting for a worker", idlers, arguments.rounds, starving, "fork"),
        "cores, workers wait": in_turn("waiting for the loop", idlers, arguments.rounds, sated, "fork"),
    }
    spawned = in_turn("spawning", idlers, max(arguments.rounds // 2, 1), deliver, "SMALL", 1, "spawn", 0)
    show_manners(console, manners, spawned)
    write_report(arguments.json, {"deliveries": deliveries, "manners": manners, "spawned": spawned})
    plot(arguments.plot, deliveries)


def in_turn(title: str, names: Iterable[str], rounds: int, measure: Callable[..., Any], *work: Any) -> dict[str, Any]:
    """Measure each contender in each round; one that hangs every time is left out."""
    found: dict[str, list[Any]] = {name: [] for name in names}
    # No thread of its own refreshes the bar: forks are made here.
    with Progress(transient=True, auto_refresh=False) as progress:
        bar = progress.add_task(title, total=rounds * len(found))
        for _ in range(rounds):
            for name in tuple(found):
                try:
                    found[name].append(in_process_of_its_own(name, measure, *work))
                except TimeoutError as hung:
                    if name == REFERENCE:
                        raise
                    progress.console.print(f"{hung}, and is left out")
                    del found[name]
                progress.advance(bar)
                progress.refresh()
    return found


def times(runs: list[Delivery], reference: list[Delivery]) -> float:
    """Return how many times as fast as the reference: the median of the ratios within each round."""
    return statistics.median(a.samples_per_s / b.samples_per_s for a, b in zip(runs, reference, strict=True))


def show_deliveries(console: Console, title: str, found: Mapping[str, list[Delivery]]) -> None:
    table = Table(title=f"{title}: times {REFERENCE}; the main process's time for a sample", title_justify="left")
    table.add_column("loader", no_wrap=True)
    headings = ("samples/s", "best", "times", "CPU µs", "cores", "ms to first", "MB", "shared", "in /dev/shm")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, runs in found.items():
        middle = Delivery(*map(statistics.median, zip(*runs, strict=True)))
        table.add_row(
            name,
            f"{middle.samples_per_s:,.0f}",
            f"{max(run.samples_per_s for run in runs):,.0f}",
            f"{times(runs, found[REFERENCE]):.2f}",
            f"{1e6 * middle.cpu_s_per_sample:,.1f}",
            f"{middle.cores:.2f}",
            f"{1e3 * middle.seconds_to_first:,.0f}",
            f"{middle.memory / 1e6:,.0f}",
            f"{middle.shared / 1e6:,.0f}",
            f"{middle.shm / 1e6:,.0f}",
            style="bold" if name == REFERENCE else None,
        )
    console.print(table)


def show_manners(console: Console, manners: Mapping[str, Mapping[str, list[float]]], spawned: Any) -> None:
    table = Table(title="With little to do, and when workers are spawned", title_justify="left")
    table.add_column("loader", no_wrap=True)
    for heading in (*manners, "ms to the first, spawn"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in LOADERS:
        cells = []
        for found, scale, digits in zip(manners.values(), (1e3, 1, 1), (2, 4, 4), strict=True):
            cells.append(f"{scale * statistics.median(found[name]):.{digits}f}" if name in found else "")
        spawns = [run.seconds_to_first for run in spawned.get(name, ())]
        cells.append(f"{1e3 * statistics.median(spawns):,.0f}" if spawns else "")
        if any(cells):
            table.add_row(name, *cells)
    console.print(table)


def plot(path: Path | None, deliveries: Mapping[str, Mapping[str, list[Delivery]]]) -> None:
    """Draw one panel for each kind of items and number of workers: times the reference, on a logarithmic scale."""
    if path is None:
        return
    figure, panels = pyplot().subplots(
        len(deliveries), 1, squeeze=False, figsize=(9, 2.4 * len(deliveries)), layout="constrained", sharex=True
    )
    for panel, (title, found) in zip(panels[:, 0], deliveries.items(), strict=True):
        names = list(found)[::-1]
        values = [times(found[name], found[REFERENCE]) for name in names]
        bars = panel.barh(names, values, color=["tab:blue" if "ours" in name else "tab:gray" for name in names])
        panel.bar_label(bars, fmt="{:.2f}", padding=3, fontsize=8)
        panel.set_xscale("log")
        panel.margins(x=0.12)
        panel.set_title(title, loc="left", fontsize=10)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel(f"samples a second, times {REFERENCE}", fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
