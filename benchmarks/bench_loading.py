"""How fast do worker processes deliver samples, and when does the first one arrive?

    python benchmarks/bench_loading.py --json loading.json --plot loading.png

Worker processes read the same shards of SMALL, and the main process receives the samples: one by one ("samples"), or in
lists of 64 that the workers build ("lists of 64"). The rate is measured over some seconds after the first item, so it
does not include startup. The time to the first item includes building the loader, but no imports.

DataLoader2 runs without patches ("unpatched", with ``WDS_DATAPIPES_PATCHES=0``) and as patched by importing
``wds_datapipes``. Each contender runs in a separate process, which is killed with its workers after the measurement,
because torchdata's service may hang. A measurement that hangs is repeated.

Results relative to WebLoader with two workers: one by one DataLoader2 1.1 (unpatched 0.4), DataLoader 2.3; in lists of
64, they have 8.6, 8.6 and 9.4. Batch samples in the workers: all samples of a batch then share the cost of a message.
"""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import webdataset
from contest import options, parse, write_report
from datasets import SETS, folder
from plots import plot_bars
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
from webdataset.tariterators import tarfile_to_samples

from wds_datapipes import ShardReadingService  # also registers the stages and patches torchdata

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchdata's deprecation warning
    from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService

#: The time limit of a measurement in seconds, after which the contender counts as hanging.
TIME_LIMIT_S = 30.0
#: The number of attempts for a contender that hangs.
ATTEMPTS = 3
#: How often the list of shards is repeated, so that no worker finishes during a measurement.
REPEATS = 1000


class Loading(NamedTuple):
    """The results of one contender."""

    samples_per_s: float
    seconds_to_first: float


def keep_list(items: list[Any]) -> list[Any]:
    return items


def our_pipe(urls: list[str], batch_size: int) -> Any:
    shards = IterableWrapper(urls * REPEATS, deepcopy=False).sharding_filter()
    samples = shards.load_wds_shards().group_samples(on_repeated_key="ignore")
    return samples.batch(batch_size, wrapper_class=list) if batch_size > 1 else samples


def ours(urls: list[str], batch_size: int, workers: int) -> Iterable[Any]:
    service = ShardReadingService(num_workers=workers)
    loader: Iterable[Any] = DataLoader2(our_pipe(urls, batch_size), reading_service=service)
    return loader


def dataloader2(urls: list[str], batch_size: int, workers: int) -> Iterable[Any]:
    service = MultiProcessingReadingService(num_workers=workers)
    loader: Iterable[Any] = DataLoader2(our_pipe(urls, batch_size), reading_service=service)
    return loader


def dataloader(urls: list[str], batch_size: int, workers: int) -> Iterable[Any]:
    return DataLoader(our_pipe(urls, batch_size), batch_size=None, num_workers=workers)


def webloader(urls: list[str], batch_size: int, workers: int) -> Iterable[Any]:
    stages = [webdataset.SimpleShardList(urls * REPEATS), webdataset.split_by_worker, tarfile_to_samples()]
    if batch_size > 1:
        stages.append(webdataset.batched(batch_size, collation_fn=keep_list))
    loader: Iterable[Any] = webdataset.WebLoader(webdataset.DataPipeline(*stages), batch_size=None, num_workers=workers)
    return loader


LOADERS: dict[str, tuple[Callable[[list[str], int, int], Iterable[Any]], str]] = {
    "ShardReadingService (ours)": (ours, "1"),
    "DataLoader2, patched (ours)": (dataloader2, "1"),
    "DataLoader2, unpatched": (dataloader2, "0"),
    "DataLoader (ours inside)": (dataloader, "1"),
    "WebLoader (webdataset)": (webloader, "1"),
}


def measure(loader: str, urls: list[str], batch_size: int, workers: int, seconds: float) -> Loading:
    """Build a loader, wait for its first item, and count items for some seconds."""
    build = LOADERS[loader][0]
    begin = time.perf_counter()
    items: Iterator[Any] = iter(build(urls, batch_size, workers))
    next(items)
    first_at = time.perf_counter()
    count = 0
    while (now := time.perf_counter()) < first_at + seconds:
        next(items)
        count += batch_size
    return Loading(count / (now - first_at), first_at - begin)


def in_separate_process(loader: str, *arguments: Any) -> Loading:
    """Measure in a new process, and kill it with all of its workers; repeat this if it hangs."""
    environment = os.environ | {"WDS_DATAPIPES_PATCHES": LOADERS[loader][1]}
    command = [sys.executable, "-W", "ignore", __file__, "--measure", json.dumps([loader, *arguments])]
    for _ in range(ATTEMPTS):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        ) as process:
            assert process.stdout is not None
            try:
                is_ready, _, _ = select.select([process.stdout], [], [], TIME_LIMIT_S)
                line = process.stdout.readline() if is_ready else ""
            finally:
                os.killpg(process.pid, signal.SIGKILL)
        if line:
            return Loading(*json.loads(line))
        if is_ready:
            raise RuntimeError(f"{loader} ended without a result")
    raise TimeoutError(f"{loader} has hung {ATTEMPTS} times")


def main() -> None:
    parser = options(__doc__, rounds=3)
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2], help="numbers of worker processes")
    parser.add_argument("--seconds", type=float, default=2.0, help="the duration of a measurement")
    parser.add_argument("--measure", help="internal: the measurement to run, as JSON")
    arguments = parse(parser)
    if arguments.measure:
        print(json.dumps(measure(*json.loads(arguments.measure))), flush=True)
        signal.pause()  # until it is killed with its workers
    if arguments.quick:
        arguments.workers, arguments.rounds, arguments.seconds = [1], 1, 0.2
    urls = SETS["SMALL"].write(folder(arguments.data), arguments.scale)
    console = Console(width=110)
    facts: dict[str, dict[str, list[Loading]]] = {}
    for batch_size in (64,) if arguments.quick else (1, 64):
        for workers in arguments.workers:
            title = f"{'samples' if batch_size == 1 else f'lists of {batch_size}'}, {workers} worker(s)"
            found: dict[str, list[Loading]] = {loader: [] for loader in LOADERS}
            for _ in track(range(arguments.rounds), title, transient=True):
                for loader, results in found.items():
                    results.append(in_separate_process(loader, urls, batch_size, workers, arguments.seconds))
            facts[title] = found
            show(console, title, found)
    write_report(arguments.json, facts)
    rates = {f"{loader}, {title}": _rate(runs) for title, found in facts.items() for loader, runs in found.items()}
    plot_bars(arguments.plot, rates, "Samples from worker processes", "samples/s")


def show(console: Console, title: str, found: dict[str, list[Loading]]) -> None:
    reference = found["WebLoader (webdataset)"]
    table = Table(title=title, title_justify="left")
    table.add_column("loader", no_wrap=True)
    for heading in ("samples/s", "best", "times WebLoader", "ms to first"):
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
