"""How many samples a second come out of worker processes, and how long does the first one take?

    python benchmarks/bench_loading.py --json loading.json --plot loading.png

The same shards of SMALL are read by worker processes, and the main process takes the samples: one by one ("samples"),
or in lists of 64 that the workers make ("lists of 64"). The rate is counted over some seconds after the first item, so
starting up is no part of it; the time to the first item includes all that building the loader takes, but no imports.

DataLoader2 runs as torchdata has it ("unpatched", by ``WDS_DATAPIPES_PATCHES=0``) and as importing ``wds_datapipes``
leaves it. Every contender is a process of its own, ended with its workers once it has been measured: torchdata's
service may hang when it is shut down.

Measured, times WebLoader with two workers: one by one DataLoader2 1.1 (unpatched 0.4), DataLoader 2.3; in lists of 64
they are at 8.6, 8.6 and 9.4. So gather samples into batches in the workers: what one message costs is then shared by
all of its samples.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import webdataset
from contest import options, parse, plot_bars, write_report
from datasets import SETS, folder
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
from webdataset.tariterators import tarfile_to_samples

from wds_datapipes import ShardReadingService  # which registers the stages, and repairs torchdata, too

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchdata's banner, which says that it is no longer developed
    from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService

#: Shards are read again and again, so that no worker runs out before the time is over.
ROUNDS_OF_SHARDS = 1000


class Loading(NamedTuple):
    """What one contender did."""

    samples_per_s: float
    seconds_to_first: float


def as_they_are(items: list[Any]) -> list[Any]:
    return items


def our_pipe(urls: list[str], together: int) -> Any:
    shards = IterableWrapper(urls * ROUNDS_OF_SHARDS, deepcopy=False).sharding_filter()
    samples = shards.load_wds_shards().group_samples(on_repeated_key="ignore")
    return samples.batch(together, wrapper_class=list) if together > 1 else samples


def ours(urls: list[str], together: int, workers: int) -> Iterable[Any]:
    service = ShardReadingService(num_workers=workers)
    loader: Iterable[Any] = DataLoader2(our_pipe(urls, together), reading_service=service)
    return loader


def dataloader2(urls: list[str], together: int, workers: int) -> Iterable[Any]:
    service = MultiProcessingReadingService(num_workers=workers)
    loader: Iterable[Any] = DataLoader2(our_pipe(urls, together), reading_service=service)
    return loader


def dataloader(urls: list[str], together: int, workers: int) -> Iterable[Any]:
    return DataLoader(our_pipe(urls, together), batch_size=None, num_workers=workers)


def webloader(urls: list[str], together: int, workers: int) -> Iterable[Any]:
    stages = [
        webdataset.SimpleShardList(urls * ROUNDS_OF_SHARDS),
        webdataset.split_by_worker,
        tarfile_to_samples(),
    ]
    if together > 1:
        stages.append(webdataset.batched(together, collation_fn=as_they_are))
    loader: Iterable[Any] = webdataset.WebLoader(webdataset.DataPipeline(*stages), batch_size=None, num_workers=workers)
    return loader


LOADERS: dict[str, tuple[Callable[[list[str], int, int], Iterable[Any]], str]] = {
    "ShardReadingService (ours)": (ours, "1"),
    "DataLoader2, repaired (ours)": (dataloader2, "1"),
    "DataLoader2, unpatched": (dataloader2, "0"),
    "DataLoader (ours inside)": (dataloader, "1"),
    "WebLoader (webdataset)": (webloader, "1"),
}


def measure(loader: str, urls: list[str], together: int, workers: int, seconds: float) -> Loading:
    """Build a loader, wait for its first item, and count for some seconds."""
    build = LOADERS[loader][0]
    begin = time.perf_counter()
    items: Iterator[Any] = iter(build(urls, together, workers))
    next(items)
    first_at = time.perf_counter()
    count = 0
    while (now := time.perf_counter()) < first_at + seconds:
        next(items)
        count += together
    return Loading(count / (now - first_at), first_at - begin)


def in_process_of_its_own(loader: str, *arguments: Any) -> Loading:
    """Measure in a fresh process, and end it with all of its workers."""
    environment = os.environ | {"WDS_DATAPIPES_PATCHES": LOADERS[loader][1]}
    command = [sys.executable, "-W", "ignore", __file__, "--measure", json.dumps([loader, *arguments])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True) as run:
        assert run.stdout is not None
        try:
            line = run.stdout.readline()
        finally:
            os.killpg(run.pid, signal.SIGKILL)
    if not line:
        raise RuntimeError(f"{loader} ended without a result")
    return Loading(*json.loads(line))


def main() -> None:
    parser = options(__doc__, rounds=3)
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2], help="numbers of worker processes")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long to count")
    parser.add_argument("--measure", help="for the program itself: what to measure, as JSON")
    arguments = parse(parser)
    if arguments.measure:
        print(json.dumps(measure(*json.loads(arguments.measure))), flush=True)
        signal.pause()  # until it is ended with its workers
    if arguments.quick:
        arguments.workers, arguments.rounds, arguments.seconds = [1], 1, 0.2
    urls = SETS["SMALL"].write(folder(arguments.data), arguments.scale)
    console = Console(width=110)
    facts: dict[str, dict[str, list[Loading]]] = {}
    for together in (64,) if arguments.quick else (1, 64):
        for workers in arguments.workers:
            title = f"{'samples' if together == 1 else f'lists of {together}'}, {workers} worker(s)"
            found: dict[str, list[Loading]] = {loader: [] for loader in LOADERS}
            for _ in track(range(arguments.rounds), title, transient=True):
                for loader, results in found.items():
                    results.append(in_process_of_its_own(loader, urls, together, workers, arguments.seconds))
            facts[title] = found
            show(console, title, found)
    write_report(arguments.json, facts)
    rates = {f"{loader}, {title}": _rate(runs) for title, found in facts.items() for loader, runs in found.items()}
    plot_bars(arguments.plot, rates, "Out of worker processes", "samples/s")


def show(console: Console, title: str, found: dict[str, list[Loading]]) -> None:
    reference = found["WebLoader (webdataset)"]
    table = Table(title=title, title_justify="left")
    table.add_column("loader", no_wrap=True)
    for heading in ("samples/s", "best", "times WebLoader", "ms to the first"):
        table.add_column(heading, justify="right", no_wrap=True)
    for loader, runs in found.items():
        times = statistics.median(a.samples_per_s / b.samples_per_s for a, b in zip(runs, reference, strict=True))
        table.add_row(
            loader,
            f"{_rate(runs):,.0f}",
            f"{max(run.samples_per_s for run in runs):,.0f}",
            f"{times:.2f}",
            f"{1e3 * statistics.median(run.seconds_to_first for run in runs):,.0f}",
        )
    console.print(table)


def _rate(runs: list[Loading]) -> float:
    return statistics.median(run.samples_per_s for run in runs)


if __name__ == "__main__":
    main()
