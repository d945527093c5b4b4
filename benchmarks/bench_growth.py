"""Which costs grow with the length of a list, a shard, an epoch or a cache, and what do more workers give?

    python benchmarks/bench_growth.py --json growth.json --plot growth.png

Each measurement runs in a separate process:

- Skipping: ``select_files`` selects only the last member of shards with 10,000 to 100,000 small ones. The time per
  member should not depend on the number of earlier members, and skipped members should take no memory.
- Lists of 100,000 and 1,000,000 shards: the time to create the list and yield its first URL, and the memory per URL.
- An epoch of ten million samples, from 250 shards and two workers: the memory of all processes, and the size of a
  state, at ten points.
- States of a loader with two workers and a list of 100 to 1,000,000 shards.
- A shard cache with 1,000 to 100,000 copies: the time to find a copy, and that of a download which has to evict one.
- ``.cache_samples()`` with 10,000 and 100,000 samples: the time per sample, without and with the cache.
- 1 to 16 workers that decode IMG, crop and batch, against webdataset's WebLoader in alternating rounds: samples per
  second, and the memory of a worker. Beyond the number of cores, which is the limit, the rate should not fall.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from contest import options, parse, pyplot, write_report
from datasets import PHOTOGRAPHS, Fields, folder, write_shard
from growth import LISTERS, READERS, cache_samples, copies, epoch, list_shards, skip, state_of
from loaders import OURS, REFERENCE
from measure_loader import measure
from rich.console import Console
from rich.table import Table

T = TypeVar("T")

MEMBERS = (10_000, 30_000, 100_000)
LISTS = (100_000, 1_000_000)
EPOCH_SHARDS, SHARD_SAMPLES = 250, 40_000
STATES = (100, 10_000, 1_000_000)
COPIES = (1_000, 10_000, 100_000)
CACHED = (10_000, 100_000)
WORKERS = (1, 2, 4, 8, 16)


def in_process(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a forked process, which may start processes of its own, and return its result."""
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        return pool.submit(function, *arguments).result()


def shard(data: Path, samples: int) -> str:
    """Write a shard of small samples, unless it exists; the key of the last one is "last"."""
    path = data / f"skip-{samples}.tar"
    if not path.exists():
        data.mkdir(parents=True, exist_ok=True)
        fields: Fields = {"txt": b"x" * 100}
        write_shard(path, ((key, fields) for key in [*(f"{index:08d}" for index in range(1, samples)), "last"]))
    return str(path)


def measure_reading(data: Path, scale: float, rounds: int) -> dict[str, Any]:
    """Return the medians of skipping and of long lists."""
    sizes, lists = _scaled(MEMBERS, scale), _scaled(LISTS, scale)
    skipped = {
        reader: {size: [in_process(skip, reader, shard(data, size), size) for _ in range(rounds)] for size in sizes}
        for reader in READERS
    }
    listed = {
        lister: {size: [in_process(list_shards, lister, size) for _ in range(rounds)] for size in lists}
        for lister in LISTERS
    }
    return {"skipping": _medians(skipped), "listing": _medians(listed)}


def measure_state(data: Path, scale: float, rounds: int) -> dict[str, Any]:
    """Return the points of an epoch, and the medians for states and caches."""
    size, shards = _scaled([SHARD_SAMPLES], scale)[0], max(4, int(EPOCH_SHARDS * min(1.0, scale)))
    path = shard(data, size)
    state = {length: [in_process(state_of, path, length) for _ in range(rounds)] for length in _scaled(STATES, scale)}
    copied = {number: [in_process(copies, number) for _ in range(rounds)] for number in _scaled(COPIES, scale)}
    cached = {
        number: [in_process(cache_samples, shard(data, number), number) for _ in range(rounds)]
        for number in _scaled(CACHED, scale)
    }
    return {
        "epoch": in_process(epoch, path, shards, size),
        **_medians({"states": state, "copies": copied, "cached": cached}),
    }


def measure_workers(data: Path, scale: float, rounds: int) -> dict[str, dict[int, list[float]]]:
    """Return the samples per second, and the bytes of a worker, by loader and number of workers."""
    images = PHOTOGRAPHS["IMG"]._replace(shards=max(WORKERS), samples=192)
    urls = images.write(data, scale, multiple=64)
    samples = images.shards * 64 * max(1, round(images.samples * scale / 64))
    runs: dict[str, dict[int, list[tuple[float, float]]]] = {
        name: {workers: [] for workers in WORKERS} for name in (OURS, REFERENCE)
    }
    for number in range(rounds):
        for workers in WORKERS if scale > 0.1 else WORKERS[:1]:
            for name in (OURS, REFERENCE) if number % 2 else (REFERENCE, OURS):
                run = measure(name, urls, workers, samples, None)
                runs[name][workers].append((run.samples_per_s, run.worker_memory))
    return {name: {key: value for key, value in by.items() if value} for name, by in _medians(runs).items()}


def _scaled(sizes: Sequence[int], scale: float) -> list[int]:
    return [max(200, int(size * min(1.0, scale))) for size in sizes] if scale < 1 else list(sizes)


def _medians(runs: Mapping[Any, Mapping[Any, Sequence[Sequence[float]]]]) -> dict[Any, dict[Any, list[float]]]:
    """Return the medians of the columns of all rounds."""
    return {
        name: {key: [statistics.median(column) for column in zip(*rounds, strict=True)] for key, rounds in by.items()}
        for name, by in runs.items()
    }


def main() -> None:
    arguments = parse(options(__doc__, rounds=3))
    data, scale, rounds = folder(arguments.data), arguments.scale, arguments.rounds
    if arguments.quick:
        rounds = 1
    facts = measure_reading(data, scale, rounds) | measure_state(data, scale, rounds)
    facts |= {"cores": os.cpu_count(), "workers": measure_workers(data, scale, rounds)}
    show(facts)
    write_report(arguments.json, facts)
    if arguments.plot:
        plot(arguments.plot, facts)


def show(facts: Mapping[str, Any]) -> None:
    """Print a table for each measurement."""
    console = Console(width=110)

    def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(title=title, title_justify="left")
        for number, heading in enumerate(headings):
            table.add_column(heading, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)

    print_table(
        "Skip all members but the last",
        ("reader", "members", "µs per member", "peak MB"),
        [
            (reader, f"{size:,}", f"{microseconds:.2f}", f"{size_in_bytes / 1e6:.1f}")
            for reader, by_size in facts["skipping"].items()
            for size, (microseconds, size_in_bytes) in by_size.items()
        ],
    )
    print_table(
        "Long lists",
        ("list", "shards", "s to the first URL", "bytes per URL"),
        [
            (lister, f"{size:,}", f"{seconds:.3f}", f"{each:,.0f}")
            for lister, by_size in facts["listing"].items()
            for size, (seconds, each) in by_size.items()
        ],
    )
    print_table(
        "An epoch, 2 workers",
        ("samples", "samples/s", "MB of all processes", "bytes of a state"),
        [
            (f"{samples:,}", f"{samples / seconds:,.0f}", f"{size / 1e6:.1f}", f"{state:,}")
            for samples, seconds, size, state in facts["epoch"]
        ],
    )
    print_table(
        "States, 2 workers",
        ("shards", "bytes", "ms to save", "s to resume"),
        [
            (f"{shards:,}", f"{size:,.0f}", f"{1e3 * save:.1f}", f"{resume:.2f}")
            for shards, (size, save, resume) in facts["states"].items()
        ],
    )
    print_table(
        "Shard cache",
        ("copies", "µs to find one", "s to download in place of one"),
        [(f"{number:,}", f"{find:.0f}", f"{evict:.2f}") for number, (find, evict) in facts["copies"].items()],
    )
    print_table(
        "Sample cache, µs per sample",
        ("samples", "first epoch", "second epoch"),
        [(f"{number:,}", f"{first:.2f}", f"{second:.2f}") for number, (first, second) in facts["cached"].items()],
    )
    print_table(
        f"Workers, on {facts['cores']} cores",
        ("loader", "workers", "samples/s", "MB/worker"),
        [
            (name, str(workers), f"{rate:,.0f}", f"{size / 1e6:.0f}")
            for name, by_workers in facts["workers"].items()
            for workers, (rate, size) in by_workers.items()
        ],
    )


def plot(path: Path, facts: Mapping[str, Any]) -> None:
    """Plot the memory in the epoch, and the rate and memory by the number of workers."""
    figure, (memory, rates, sizes) = pyplot().subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    memory.plot([point[0] / 1e6 for point in facts["epoch"]], [point[2] / 1e6 for point in facts["epoch"]], marker="o")
    memory.set_xlabel("million samples of an epoch")
    memory.set_ylabel("MB of all processes")
    cores = facts["cores"]
    for name, by_workers in facts["workers"].items():
        workers = [int(number) for number in by_workers]
        rates.plot(workers, [rate for rate, _ in by_workers.values()], marker="o", label=name)
        sizes.plot(workers, [size / 1e6 for _, size in by_workers.values()], marker="o", label=name)
    rates.axvline(cores, color="tab:gray", linestyle=":")
    rates.annotate(f"{cores} cores", (cores, 0), (4, 4), textcoords="offset points", fontsize=8, color="tab:gray")
    rates.set_ylabel("samples/s")
    sizes.set_ylabel("MB per worker")
    rates.legend(frameon=False)
    for axis in (rates, sizes):
        axis.set_xlabel("workers")
        axis.set_xscale("log", base=2)
        axis.set_xticks(WORKERS, [str(number) for number in WORKERS])
    for axis in (memory, rates, sizes):
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
