"""How fast do batches of cropped images reach the training process, from shards of JPEG files?

    python benchmarks/bench_end_to_end.py --json end-to-end.json --plot end-to-end.png

Each loader reads shards, decodes JPEG files, crops, resizes to 224 x 224 (bilinear, antialiased), flips, and delivers
batches of 64 x 3 x 224 x 224 bytes with 64 labels to the training process, which reads a byte of each page. The images
are photographs of 400 to 500 pixels (IMG) and of two megapixels (PHOTO).

Equal work is checked before anything is timed: each sample comes exactly once, and the pixels of a part of them are
compared with Pillow's. Boxes follow from the size of an image, so that all loaders cut the same ones. Only DALI draws
its own, from the same distribution, and only the mean of its pixels is compared. The difference to Pillow's pixels is
part of the table, in levels of 255.

"ours" crops while decoding, into the tensor of a batch; "min_size" also decodes at a smaller scale where that has the
pixels of the crop. "Pillow" runs the same code on a sample as most other loaders, and "DataLoader" is PyTorch's.

Each measurement runs in a separate process, killed with its workers at the end, and loaders take turns. The rate is
that between the first quarter and the last eighth of an epoch: neither startup nor the end counts. CPU time is that of
all processes. The time to the first batch includes building the loader, but no imports. Memory is the increase of all
processes together (PSS); that of the workers is divided by their number.

Loaders with dependencies of their own run in the environments of environments.py. Those that are not installed, or
fail, are left out, and the output says so.

``--stores`` also reads from servers on the same machine, with the most workers:

- "HTTP", "10 ms" and "100 ms": a web server that responds at once or after a latency, the latter with 100 MB/s per
  connection. Ours and webdataset take part.
- "S3": rclone's S3 server. Loaders read it as their users do: ours, torchdata and Hugging Face datasets through s3fs,
  DALI, LitData and MosaicML Streaming by clients of their own, and webdataset through a command. SPDL has no client.
- "S3, presigned": the same by https, from URLs that contain a signature. Ours and webdataset take part.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import numpy as np
from contest import options, parse, write_report
from crops import random_resized_crop
from datasets import PHOTOGRAPHS, folder
from loaders import LOADERS, LOCAL, OURS, REFERENCE
from measure_loader import LoaderError, Run, convert, measure
from peer_loaders import read_pairs
from PIL import Image
from plots import plot_ratios
from report import section_of_loaders
from rich.console import Console
from rich.progress import track
from rich.table import Table
from store import BUCKET, presign, s3_store, store
from tar_loaders import BATCH

#: The number of batches that a measurement needs, unless its figures do not matter.
LEAST_BATCHES = 8
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
        for label, entry in self.entries.items():
            if entry.loader in self.left_out:  # it failed on the local shards
                continue
            with self._leaving_out(label):
                run = self._measure(entry, str(pixels))
                has_same_boxes = LOADERS[entry.loader].has_same_boxes
                off = run.difference if has_same_boxes else run.mean - self.checks[REFERENCE].mean
                if abs(off) > MAX_DIFFERENCE:
                    raise LoaderError(f"its pixels differ by {off:.1f} levels")
                self.checks[label], self.runs[label] = run, []

    def take_checks(self) -> None:
        """Use the checks as a round, where figures do not matter."""
        self.runs = {label: [self.checks[label]] for label in self.runs}
        self.raw = {entry.store: [raw_read(entry.files, self.workers)] for entry in self.entries.values()}

    def run_round(self) -> None:
        """Measure each entry once, and the raw read of each store."""
        for label, entry in self.entries.items():
            if label not in self.runs:
                continue
            if entry.loader == REFERENCE:
                self.raw.setdefault(entry.store, []).append(raw_read(entry.files, self.workers))
            with self._leaving_out(label):
                self.runs[label].append(self._measure(entry, None))

    def _measure(self, entry: Entry, pixels: str | None) -> Run:
        """Measure an entry, once more if it fails: MosaicML Streaming sometimes does when it reads from S3."""
        try:
            return measure(entry.loader, entry.source, self.workers, self.samples, pixels)
        except LoaderError:
            run = measure(entry.loader, entry.source, self.workers, self.samples, pixels)
            self.repeated[entry.label] = self.repeated.get(entry.label, 0) + 1
            return run

    @contextlib.contextmanager
    def _leaving_out(self, label: str) -> Iterator[None]:
        try:
            yield
        except LoaderError as error:
            if self.entries[label].loader in (OURS, REFERENCE):
                raise
            self.left_out[label] = str(error)
            self.runs = {
                other: runs
                for other, runs in self.runs.items()
                if other != label and self.entries[other].loader not in self.left_out
            }

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


def show(console: Console, facts: Mapping[str, Any]) -> None:
    """Print the results of a comparison, the fastest first."""
    title = f"{facts['title']}: speed relative to {REFERENCE} from the same store"
    table = Table(title=title, title_justify="left")
    table.add_column("loader", no_wrap=True)
    headings = (
        "samples/s", "best", "times", "times (CPU)", "CPU ms", "MB/s", "of raw read", "of local", "s to first", "MB",
        "MB/worker", "levels off",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, loader in sorted(facts["loaders"].items(), key=lambda item: -item[1]["samples_per_s"]):
        off = loader["difference"]
        table.add_row(
            name,
            f"{loader['samples_per_s']:,.0f}",
            f"{loader['best']:,.0f}",
            f"{loader['times']:.2f}",
            f"{loader['times_cpu']:.2f}",
            f"{1e3 * loader['cpu_s_per_sample']:.2f}",
            f"{loader['bytes_per_s'] / 1e6:,.0f}",
            f"{loader['share_of_raw_read']:.1%}",
            f"{loader['of_local']:.0%}",
            f"{loader['seconds_to_first']:.2f}",
            f"{loader['memory'] / 1e6:,.0f}",
            f"{loader['worker_memory'] / 1e6:,.0f}",
            "own boxes" if off is None else f"{off:.2f}",
            style="bold" if name == REFERENCE else None,
        )
    console.print(table)
    for name, reason in facts["left_out"].items():
        console.print(f"left out: {name}: {reason}")
    for name, count in facts["repeated"].items():
        console.print(f"measurements that failed and were repeated: {name}, {count}")


def sources_of(names: Iterable[str], urls: list[str], target: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what each loader reads, converting shards where it has its own format, and why others cannot read them."""
    sources: dict[str, Any] = {}
    left_out = {}
    for name in names:
        sources[name] = urls
        if LOADERS[name].convert is not None:
            copy = target / f"{Path(urls[0]).stem}-{LOADERS[name].environment}"
            try:
                if not copy.exists():
                    convert(name, urls, f"{copy}.partial")
                    Path(f"{copy}.partial").rename(copy)
                sources[name] = str(copy)
            except LoaderError as error:
                shutil.rmtree(f"{copy}.partial", ignore_errors=True)
                left_out[name] = str(error)
                del sources[name]
    return sources, left_out


def compare(
    set_name: str, paths: list[str], samples: int, names: list[str], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the results on a dataset, for each number of workers; the most workers also read from the stores."""
    data = Path(paths[0]).parent
    pixels = data / f"{Path(paths[0]).stem}-pixels.npz"
    write_pixels(paths, pixels, samples)
    sources, left_out = sources_of(names, paths, data)
    local = [Entry(name, source, LOCAL, paths) for name, source in sources.items()]
    console = Console(width=165)
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
            for _ in track(range(arguments.rounds), title, transient=True):
                contest.run_round()
            contests.append(contest.facts(sum(Path(path).stat().st_size for path in paths)))
            show(console, contests[-1])
    return contests


def main() -> None:
    parser = options(__doc__, rounds=3)
    parser.add_argument("--workers", nargs="+", type=int, default=[2], help="numbers of workers (2)")
    parser.add_argument("--sets", nargs="+", default=list(PHOTOGRAPHS), choices=PHOTOGRAPHS, help="the datasets (all)")
    parser.add_argument(
        "--stores", nargs="+", default=[], choices=[*SERVERS, S3, PRESIGNED], help="the servers to read from as well"
    )
    parser.add_argument(
        "--loaders", default="", help="run only ours, the reference and loaders with this text in the name"
    )
    arguments = parse(parser)
    if arguments.quick:
        arguments.rounds, arguments.sets, arguments.workers = 0, ["IMG"], arguments.workers[-1:]
    names = [name for name in LOADERS if name in (OURS, REFERENCE) or arguments.loaders in name]
    # The reference first, since the pixels of others are compared with its own.
    names.sort(key=lambda name: name != REFERENCE)
    data = folder(arguments.data)
    shards = {name: PHOTOGRAPHS[name].write(data, arguments.scale, multiple=16) for name in arguments.sets}
    samples = {name: sum(1 for _ in read_pairs(paths)) for name, paths in shards.items()}
    for name, count in samples.items():
        if count < LEAST_BATCHES * BATCH and not arguments.quick:
            parser.error(f"--scale {arguments.scale:g} leaves {count} samples of {name}: too few for a rate")
    contests = []
    for name, paths in shards.items():
        contests += compare(name, paths, samples[name], names, arguments)
    write_report(arguments.json, contests)
    plot_ratios(arguments.plot, section_of_loaders(contests).panels)


if __name__ == "__main__":
    main()
