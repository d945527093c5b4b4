"""What does it cost to save where a loop is, and to go on from there?

    python benchmarks/bench_state.py --json state.json --plot state.png

Samples of 200 bytes of text and a class, in shards of 40,000; the loop stops in the middle of the epoch. Ours is
``DataLoader2`` with ``ShardReadingService`` behind ``.shuffle_samples(n)``. The reference is torchdata's
``StatefulDataLoader`` with a pipeline of webdataset, which has no state: it goes on by reading all again that came
before, and in another order, since its shuffle is not seeded.

For each: the bytes of the state (of the reading service; a whole state of ``DataLoader2`` has the pipeline, too); the
time that the loop waits for ``state_dict()``; and the seconds from ``load_state_dict()`` until the next item is there,
the start of the workers included. The gain is how many times as fast that is as the reference.
"""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import webdataset
from contest import options, parse, pyplot, write_report
from datasets import SETS, folder
from rich.console import Console
from rich.table import Table
from torchdata.dataloader2 import DataLoader2
from torchdata.stateful_dataloader import StatefulDataLoader

from wds_datapipes import ShardList, ShardReadingService

#: How many samples wait in the shuffle.
BUFFERS = (1, 1000, 10_000)
WORKERS = (0, 2)


class Cost(NamedTuple):
    """What one state has cost.

    Attributes:
        state_bytes: how large it is.
        save_s: how long the loop waited for it.
        resume_s: how long it took from loading it until the next item was there.
    """

    state_bytes: int
    save_s: float
    resume_s: float


def ours(urls: list[str], buffer_size: int, workers: int) -> DataLoader2[Any]:
    pipe = ShardList(urls).sharding_filter().load_wds_shards().group_samples().shuffle_samples(buffer_size)
    return DataLoader2(pipe.wds_decode(), reading_service=ShardReadingService(workers))


def theirs(urls: list[str], buffer_size: int, workers: int) -> StatefulDataLoader[Any]:
    data = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False).shuffle(buffer_size).decode()
    return StatefulDataLoader(data, batch_size=None, num_workers=workers)


def measure(make: Callable[[], Any], stop: int) -> Cost:
    """Stop a loop, save, and go on with another loader."""
    first = make()
    iterator: Iterator[Any] = iter(first)
    for _ in islice(iterator, stop):
        pass
    begin = time.perf_counter()
    state = first.state_dict()
    save_s = time.perf_counter() - begin
    del iterator
    close(first)
    second = make()
    begin = time.perf_counter()
    second.load_state_dict(state)
    next(iter(second))
    resume_s = time.perf_counter() - begin
    close(second)
    return Cost(len(state.get("reading_service_state", b"")), save_s, resume_s)


def close(loader: Any) -> None:
    if isinstance(loader, DataLoader2):
        loader.shutdown()


def main() -> None:
    parser = options(__doc__, rounds=3)
    arguments = parse(parser)
    logging.getLogger("torchdata").setLevel(logging.ERROR)  # it says each time that it reads all again
    small = SETS["SMALL"]._replace(shards=4, samples=40_000)
    urls = small.write(folder(arguments.data), arguments.scale)
    stop = max(2, round(80_000 * arguments.scale))
    table = Table(title=f"A state after {stop:,} of {2 * stop:,} samples", title_justify="left")
    for heading in ("workers", "shuffle", "bytes", "ms to save", "s to go on", "s to go on (reference)", "gain"):
        table.add_column(heading, justify="right")
    facts: dict[str, Any] = {}
    for workers in WORKERS:
        for buffer_size in BUFFERS:
            rounds = [
                (
                    measure(functools.partial(ours, urls, buffer_size, workers), stop),
                    measure(functools.partial(theirs, urls, buffer_size, workers), stop),
                )
                for _ in range(arguments.rounds)
            ]
            own = Cost(*map(statistics.median_low, zip(*(mine for mine, _ in rounds), strict=True)))
            other = statistics.median(reference.resume_s for _, reference in rounds)
            gain = statistics.median(reference.resume_s / mine.resume_s for mine, reference in rounds)
            table.add_row(
                str(workers),
                f"{buffer_size:,}",
                f"{own.state_bytes:,}",
                f"{1000 * own.save_s:.1f}",
                f"{own.resume_s:.3f}",
                f"{other:.2f}",
                f"{gain:.1f}",
            )
            facts[f"{workers} workers, shuffle {buffer_size}"] = {
                "ours": own._asdict(),
                "reference_s": other,
                "gain": gain,
            }
    Console(width=120).print(table)
    write_report(arguments.json, facts)
    plot(arguments.plot, facts)


def plot(path: Path | None, facts: dict[str, Any]) -> None:
    """Draw how long it takes to go on."""
    if path is None:
        return
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4))
    names = list(facts)
    axes.barh([f"{name}: reference" for name in names], [facts[name]["reference_s"] for name in names], color="silver")
    axes.barh([f"{name}: ours" for name in names], [facts[name]["ours"]["resume_s"] for name in names])
    axes.set_xlabel("seconds until the next item")
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
