"""Comparisons of loaders from shards to batches of crops in the training process, as bench_peers.py runs them."""

from __future__ import annotations

import contextlib
import io
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import numpy as np
from harness.contest import in_turn
from harness.crops import random_resized_crop
from harness.store import BUCKET, presign, s3_store, store
from loaders.peers import read_pairs
from loaders.process import LoaderError, Run, converted, measure
from loaders.table import LOADERS, LOCAL, OURS, REFERENCE
from PIL import Image

__all__ = ["PRESIGNED", "S3", "SERVERS", "compare"]

#: The number of samples whose pixels are compared.
COMPARED = 64
#: The largest difference that counts as the same work, in levels of 255: of a sample's pixels on average if the boxes
#: are the same, otherwise of the mean of all pixels.
MAX_DIFFERENCE = 6.0


class Server(NamedTuple):
    """A web server on this machine: its latency, and the bandwidth of a connection."""

    latency_s: float
    bytes_per_s: float


SERVERS = {"HTTP": Server(0, 1e12), "10 ms": Server(0.01, 1e8), "100 ms": Server(0.1, 1e8)}
S3, PRESIGNED = "S3", "S3, presigned"


def write_pixels(urls: list[str], path: Path, samples: int) -> None:
    """Write the labels and the pixels of some samples, as Pillow decodes and resizes them."""
    every = max(1, samples // COMPARED)
    pairs = [(jpeg, label) for jpeg, label in read_pairs(urls) if label % every == 0]
    pixels = [random_resized_crop(Image.open(io.BytesIO(jpeg))).numpy().astype(np.int16) for jpeg, _ in pairs]
    np.savez(path, labels=[label for _, label in pairs], pixels=pixels)


def raw_read(urls: list[str], threads: int) -> float:
    """Return the bytes per second of reading shards without parsing them, with a connection per worker."""

    def read(url: str) -> int:
        buffer, count = bytearray(1 << 20), 0
        with urlopen(url) if "://" in url else Path(url).open("rb", buffering=0) as file:
            while size := file.readinto(buffer):
                count += size
        return count

    begin = time.perf_counter()
    with ThreadPoolExecutor(max(threads, 1)) as pool:
        size = sum(pool.map(read, urls))
    return size / (time.perf_counter() - begin)


class Entry(NamedTuple):
    """A participant in a comparison.

    Attributes:
        loader: its name.
        source: what it reads.
        store: the name of the store.
        files: the paths or web addresses of the same shards, for the raw read.
    """

    loader: str
    source: Any
    store: str
    files: list[str]

    @property
    def label(self) -> str:
        """Return the name in tables and plots."""
        return label_of(self.loader, self.store)


@contextlib.contextmanager
def entries_from(store_name: str, sources: Mapping[str, Any], paths: list[str]) -> Iterator[list[Entry]]:
    """Serve shards and their converted copies, and yield an entry for each loader that can read them from there."""
    names = [Path(path).name for path in paths]
    if store_name == S3:
        copies = [source for source in sources.values() if isinstance(source, str)]
        with s3_store([*paths, *copies]) as address:
            files = presign(address, names)
            yield [
                Entry(name, in_s3(source), store_name, files)
                for name, source in sources.items()
                if LOADERS[name].reads_s3
            ]
    else:
        is_https = store_name == PRESIGNED
        server = s3_store(paths, is_https=True) if is_https else store(Path(paths[0]).parent, *SERVERS[store_name])
        with server as address:
            urls = presign(address, names) if is_https else [f"{address}/{name}" for name in names]
            yield [Entry(name, urls, store_name, urls) for name in sources if LOADERS[name].reads_http]


def in_s3(source: list[str] | str) -> list[str] | str:
    """Return the URLs of files, or the URL of a folder."""
    if isinstance(source, str):
        return f"s3://{BUCKET}/{Path(source).name}"
    return [f"s3://{BUCKET}/{Path(path).name}" for path in source]


def label_of(loader: str, store_name: str) -> str:
    return loader if store_name == LOCAL else f"{loader}, {store_name}"


class EndToEnd:
    """A comparison of loaders on one dataset with one number of workers; all entries run in turn in each round."""

    def __init__(self, title: str, entries: list[Entry], samples: int, workers: int) -> None:
        self.title, self.samples, self.workers = title, samples, workers
        self.entries = {entry.label: entry for entry in entries}
        self.runs: dict[str, list[Run]] = {}
        self.checks: dict[str, Run] = {}
        self.left_out: dict[str, str] = {}
        #: The number of measurements that failed, and were repeated.
        self.repeated: dict[str, int] = {}
        #: The bytes per second of reading without parsing in each round, by store.
        self.raw: dict[str, list[float]] = {}

    def check(self, pixels: Path) -> None:
        """Run each entry once, and leave out those that fail or do other work."""
        self._in_turn(partial(self._check, pixels), 1)

    def _check(self, pixels: Path, entry: Entry) -> Run:
        if entry.store != LOCAL and entry.loader not in self.checks:
            raise LoaderError("it failed on the local shards")
        run = self._measure(entry, str(pixels))
        has_same_boxes = LOADERS[entry.loader].has_same_boxes
        off = run.difference if has_same_boxes else run.mean - self.checks[REFERENCE].mean
        if abs(off) > MAX_DIFFERENCE:
            raise LoaderError(f"its pixels differ by {off:.1f} levels")
        self.checks[entry.label] = run
        return run

    def take_checks(self) -> None:
        """Use the checks as a round, where figures do not matter."""
        self.runs = {label: [run] for label, run in self.checks.items()}
        self.raw = {entry.store: [raw_read(entry.files, self.workers)] for entry in self.entries.values()}

    def run(self, rounds: int) -> None:
        """Measure each entry in each round, and the raw read of each store."""
        runs = self._in_turn(self._run, rounds)
        self.runs = {label: some for label, some in runs.items() if self.entries[label].loader not in self.left_out}

    def _run(self, entry: Entry) -> Run:
        if entry.loader == REFERENCE:
            self.raw.setdefault(entry.store, []).append(raw_read(entry.files, self.workers))
        return self._measure(entry, None)

    def _in_turn(self, measured: Callable[[Entry], Run], rounds: int) -> dict[str, list[Run]]:
        """Measure all entries that are not left out, and leave out those that fail."""
        measures = {
            label: partial(measured, entry)
            for label, entry in self.entries.items()
            if label not in self.left_out and entry.loader not in self.left_out
        }
        required = [label for label in measures if self.entries[label].loader in (OURS, REFERENCE)]
        found, failed = in_turn(self.title, measures, rounds, errors=LoaderError, required=required)
        self.left_out |= failed
        return found

    def _measure(self, entry: Entry, pixels: str | None) -> Run:
        """Measure an entry, once more if it fails: MosaicML Streaming sometimes does when it reads from S3."""
        try:
            return measure(entry.loader, entry.source, self.workers, self.samples, pixels)
        except LoaderError:
            run = measure(entry.loader, entry.source, self.workers, self.samples, pixels)
            self.repeated[entry.label] = self.repeated.get(entry.label, 0) + 1
            return run

    def _ratio(self, label: str, other: str, figure: str) -> float:
        """Return the ratio of a figure to that of another entry: the median of the ratios within each round."""
        pairs = zip(self.runs[label], self.runs[other], strict=True)
        return float(statistics.median(getattr(a, figure) / getattr(b, figure) for a, b in pairs))

    def facts(self, shard_bytes: int) -> dict[str, Any]:
        """Return the results for a JSON file; ratios are to webdataset from the same store."""
        loaders = {}
        for label, runs in self.runs.items():
            entry, check = self.entries[label], self.checks[label]
            reference = label_of(REFERENCE, entry.store)
            figures = ("samples_per_s", "cpu_s_per_sample", "seconds_to_first", "memory", "worker_memory")
            middle = {figure: statistics.median(getattr(run, figure) for run in runs) for figure in figures}
            rate = middle["samples_per_s"] * shard_bytes / self.samples
            loaders[label] = middle | {
                "store": entry.store,
                "version": check.version,
                "times": self._ratio(label, reference, "samples_per_s"),
                "times_cpu": 1 / self._ratio(label, reference, "cpu_s_per_sample"),
                "of_local": self._ratio(label, entry.loader, "samples_per_s"),
                "of_local_cpu": 1 / self._ratio(label, entry.loader, "cpu_s_per_sample"),
                "best": max(run.samples_per_s for run in runs),
                "bytes_per_s": rate,
                "share_of_raw_read": rate / statistics.median(self.raw[entry.store]),
                "mean": check.mean,
                "difference": check.difference if LOADERS[entry.loader].has_same_boxes else None,
                "runs": [run._asdict() for run in runs],
            }
        return {
            "title": self.title,
            "workers": self.workers,
            "samples": self.samples,
            "bytes_per_sample": shard_bytes / self.samples,
            "loaders": loaders,
            "left_out": self.left_out,
            "repeated": self.repeated,
        }


def compare(
    set_name: str, paths: list[str], samples: int, names: Sequence[str], arguments: Namespace
) -> list[dict[str, Any]]:
    """Return the results on a dataset, for each number of workers; the most workers also read from the stores."""
    data = Path(paths[0]).parent
    pixels = data / f"{Path(paths[0]).stem}-pixels.npz"
    write_pixels(paths, pixels, samples)
    copies, left_out = converted(names, paths, data)
    sources = {name: copies.get(name, paths) for name in names if name not in left_out}
    local = [Entry(name, source, LOCAL, paths) for name, source in sources.items()]
    contests = []
    with contextlib.ExitStack() as servers:
        remote = [
            entry
            for store_name in arguments.stores
            for entry in servers.enter_context(entries_from(store_name, sources, paths))
        ]
        for workers in arguments.workers:
            title = f"{set_name}, {workers} worker{'' if workers == 1 else 's'}"
            entries = [*local, *remote] if workers == max(arguments.workers) else local
            contest = EndToEnd(title, entries, samples, workers)
            contest.left_out |= left_out
            contest.check(pixels)
            if arguments.quick:
                contest.take_checks()
            else:
                contest.run(arguments.rounds)
            contests.append(contest.facts(sum(Path(path).stat().st_size for path in paths)))
    return contests
