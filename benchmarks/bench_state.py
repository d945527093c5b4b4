"""How much does it cost to save the position of a loop, and to resume from it?

    python benchmarks/bench_state.py --json state.json --plot state.png

Samples have 200 bytes of text and a class, in shards of 40,000 samples, and batches have 64 samples. The loop stops in
the middle of the epoch. Ours is ``DataLoader2`` with ``ShardReadingService``, after ``.shuffle_samples(n)``. The
reference is torchdata's ``StatefulDataLoader`` with a webdataset pipeline, which has no state: it resumes by rereading
everything before the position, and in a different order, because its shuffle is not seeded. The two alternate, in a
different order in each round.

The table shows the size of the state in bytes, and the number of samples that wait in the shuffle buffer; the time that
``state_dict()`` takes, also relative to that of a batch; the share of their time that workers spend on recording their
position; and the time from ``load_state_dict()`` to the next batch, including the start of the workers. The gain is the
ratio of this time to that of the reference. Figures are medians, and ratios are computed within a round.

Batches of images, 64 x 3 x 224 x 224 decoded from JPEG files of 15 KB, are measured without a reference, to show the
cost relative to such a batch.

Workers take a snapshot after each batch, and send it with the changes to their buffers. The main process makes a state
of a snapshot on request.
"""

from __future__ import annotations

import functools
import io
import itertools
import logging
import os
import statistics
import struct
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import torch
import webdataset
from contest import in_child, options, parse, write_report
from datasets import SETS, folder
from plots import pyplot
from rich.console import Console
from rich.progress import track
from rich.table import Table

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.loading.checkpoint.format import checkpoints_in
from wds_datapipes.loading.progress import SnapshotWriter
from wds_datapipes.shards.position import unpack_positions

# Silenced by the import above.
from torchdata.dataloader2 import DataLoader2  # isort: skip
from torchdata.stateful_dataloader import StatefulDataLoader  # isort: skip

#: The sizes of the shuffle buffer.
BUFFERS = (1, 1000, 10_000)
WORKERS = (0, 2)
#: The contents of a batch: texts of 200 bytes, or decoded images.
KINDS = ("texts", "images")
BATCH = 64
#: How often a state is saved; the median counts.
SAVES = 9
#: A report of a worker: its process ID, the current time, and the time spent on recording since the last report.
REPORT = struct.Struct("qdd")
#: The number of records between two reports of a worker.
RECORDS = 16


class Cost(NamedTuple):
    """The cost of one state.

    Attributes:
        state_bytes: the size of the state.
        waiting: the number of samples in shuffle buffers.
        save_s: the time that the loop waited for the state.
        batch_s: the time that the loop waited for a batch.
        recording: the share of their time that workers spent on recording.
        resume_s: the time from loading the state to the next batch.
    """

    state_bytes: int
    waiting: int
    save_s: float
    batch_s: float
    recording: float
    resume_s: float


def shuffled(urls: list[str], buffer_size: int) -> Any:
    return ShardList(urls).sharding_filter().load_wds_shards().group_samples().shuffle_samples(buffer_size)


def seeded_loader(pipe: Any, workers: int) -> DataLoader2[Any]:
    loader = DataLoader2(pipe, reading_service=ShardReadingService(workers))
    loader.seed(0)
    return loader


def ours(urls: list[str], buffer_size: int, workers: int) -> DataLoader2[Any]:
    return seeded_loader(shuffled(urls, buffer_size).wds_decode().batch(BATCH), workers)


def theirs(urls: list[str], buffer_size: int, workers: int) -> StatefulDataLoader[Any]:
    data = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False).shuffle(buffer_size).decode()
    return StatefulDataLoader(data, batch_size=BATCH, num_workers=workers, collate_fn=list)


def photo(_: Random, index: int) -> Mapping[str, bytes]:
    """Return one of a few JPEG files of 224 x 224 pixels and about 15 KB."""
    return {"jpg": _photo(index % 16), "cls": b"%d" % (index % 1000)}


@functools.cache
def _photo(number: int) -> bytes:
    coarse = np.random.default_rng(number).integers(0, 256, (56, 56, 3), np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(coarse).resize((224, 224)).save(file, "JPEG", quality=90)
    return file.getvalue()


def stacked(batch: list[dict[str, Any]]) -> torch.Tensor:
    return torch.stack([sample["jpg"] for sample in batch])


def images(urls: list[str], buffer_size: int, workers: int) -> DataLoader2[Any]:
    """Like `ours`, with batches of 64 x 3 x 224 x 224 decoded from JPEG."""
    return seeded_loader(shuffled(urls, buffer_size).wds_decode("torchrgb").batch(BATCH).map(stacked), workers)


def measure(make: Callable[[], Any], stop: int) -> Cost:
    """Stop a loop, save its state, resume with another loader, and return the cost."""
    warnings.simplefilter("ignore")  # StatefulDataLoader's own
    logging.getLogger("torchdata").setLevel(logging.ERROR)  # reports each replay
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    spent = [0.0]  # by a worker, since its last report
    records = itertools.count(1)

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def timed_method(*arguments: Any) -> Any:
            begin = time.thread_time()
            result = method(*arguments)
            spent[0] += time.thread_time() - begin
            if next(records) % RECORDS == 0:
                os.write(writing, REPORT.pack(os.getpid(), time.perf_counter(), spent[0]))
                spent[0] = 0.0
            return result

        return timed_method

    for name in ("snapshot", "pack"):  # inherited by forked workers
        setattr(SnapshotWriter, name, timed(vars(SnapshotWriter)[name]))
    first = make()
    iterator: Iterator[Any] = iter(first)
    next(iterator)
    begin = time.perf_counter()
    for _ in islice(iterator, stop - 1):
        pass
    batch_s = (time.perf_counter() - begin) / (stop - 1)
    saves = []
    for _ in range(SAVES):
        begin = time.perf_counter()
        state = first.state_dict()
        saves.append(time.perf_counter() - begin)
        next(iterator)
    del iterator
    close(first)
    second = make()
    begin = time.perf_counter()
    second.load_state_dict(state)
    next(iter(second))
    resume_s = time.perf_counter() - begin
    close(second)
    os.write(writing, REPORT.pack(0, 0, 0))  # so that reading does not block
    shares = [share_of(reports) for reports in by_process(os.read(reading, 1 << 20))]
    data = state.get("wds_datapipes", "").encode()
    return Cost(len(data), waiting_in(data), statistics.median(saves), batch_s, max(shares, default=0.0), resume_s)


def by_process(data: bytes) -> list[list[tuple[float, float]]]:
    """Return the reports of each worker, as (time, seconds spent on recording)."""
    found: dict[int, list[tuple[float, float]]] = {}
    for process, when, spent in REPORT.iter_unpack(data):
        found.setdefault(process, []).append((when, spent))
    return [reports for reports in found.values() if len(reports) > 2]


def share_of(reports: list[tuple[float, float]]) -> float:
    """Return the share of the time between the first and the last report that was spent on recording."""
    return sum(spent for _, spent in reports[1:]) / (reports[-1][0] - reports[0][0])


def waiting_in(data: bytes) -> int:
    parts = checkpoints_in(data)[0].parts if data else []
    return sum(len(unpack_positions((stage or {}).get("waiting", ()))) for part in parts for stage in part.stages or ())


def close(loader: Any) -> None:
    if isinstance(loader, DataLoader2):
        loader.shutdown()


def middle(costs: Iterable[Cost]) -> Cost:
    return Cost(*map(statistics.median_low, zip(*costs, strict=True)))


def facts_of(costs: list[Cost], references: list[Cost]) -> dict[str, Any]:
    """Return the medians of all rounds; there may be no references."""
    facts: dict[str, Any] = {
        "ours": middle(costs)._asdict(),
        "save_batches": statistics.median(cost.save_s / cost.batch_s for cost in costs),
    }
    if references:
        pairs = zip(costs, references, strict=True)
        facts["reference"] = middle(references)._asdict()
        facts["reference_s"] = statistics.median(reference.resume_s for reference in references)
        facts["gain"] = statistics.median(reference.resume_s / cost.resume_s for cost, reference in pairs)
    return facts


def in_turn(makers: Sequence[Callable[[], Any]], stop: int, rounds: int) -> list[list[Cost]]:
    """Measure each loader in each round, in a different order in each, and return the costs of each."""
    costs: list[list[Cost]] = [[] for _ in makers]
    for number in range(rounds):
        loaders = list(zip(makers, costs, strict=True))
        for make, found in loaders if number % 2 == 0 else reversed(loaders):
            found.append(in_child(measure, make, stop))
    return costs


def main() -> None:
    arguments = parse(options(__doc__, rounds=5))
    small = SETS["SMALL"]._replace(shards=4, samples=40_000)
    urls = small.write(folder(arguments.data), arguments.scale)
    stop = max(4, round(80_000 * arguments.scale) // BATCH)
    few = max(4, round(40 * arguments.scale))
    least = (few + SAVES + 2) * BATCH // 4
    pictures = SETS["SMALL"]._replace(name="PHOTOS", samples=max(least, round(8_000 * arguments.scale)), sample=photo)
    photos = pictures._replace(shards=4).write(folder(arguments.data))
    title = f"A state after {stop:,} batches of {BATCH}, or {few:,} batches of images"
    table = Table(title=title, title_justify="left")
    headings = ("batches of", "workers", "shuffle", "bytes", "waiting", "ms to save", "in batches", "% to record")
    for heading in (*headings, "s to resume", "reference", "gain"):
        table.add_column(heading, justify="right")
    facts: dict[str, Any] = {}
    console = Console(width=120)
    cases = [(kind, workers, buffer_size) for kind in KINDS for workers in WORKERS for buffer_size in BUFFERS]
    for kind, workers, buffer_size in track(cases, console=console, transient=True):
        name = f"{workers} workers, shuffle {buffer_size}"
        if kind == "images":
            name = f"images, {name}"
            makers = [functools.partial(images, photos, buffer_size, workers)]
        else:
            makers = [functools.partial(build, urls, buffer_size, workers) for build in (ours, theirs)]
        own, *references = in_turn(makers, few if kind == "images" else stop, arguments.rounds)
        facts[name] = facts_of(own, references[0] if references else [])
        table.add_row(*row_of(kind, workers, buffer_size, middle(own), facts[name]))
    console.print(table)
    write_report(arguments.json, facts)
    plot(arguments.plot, facts)


def row_of(kind: str, workers: int, buffer_size: int, cost: Cost, facts: Mapping[str, Any]) -> list[str]:
    """Return a row of the table."""
    return [
        kind,
        str(workers),
        f"{buffer_size:,}",
        f"{cost.state_bytes:,}",
        f"{cost.waiting:,}",
        f"{1000 * cost.save_s:.2f}",
        f"{facts['save_batches']:.3f}",
        f"{100 * cost.recording:.2f}" if workers else "",
        f"{cost.resume_s:.3f}",
        *((f"{facts['reference_s']:.2f}", f"{facts['gain']:.1f}") if "gain" in facts else ("", "")),
    ]


def plot(path: Path | None, facts: dict[str, Any]) -> None:
    """Plot the time to resume."""
    if path is None:
        return
    figure, axes = pyplot().subplots(figsize=(8, 4), layout="constrained")
    names = [name for name in facts if "reference_s" in facts[name]]
    axes.barh([f"{name}: reference" for name in names], [facts[name]["reference_s"] for name in names], color="silver")
    axes.barh([f"{name}: ours" for name in names], [facts[name]["ours"]["resume_s"] for name in names])
    axes.set_xlabel("seconds until the next item")
    axes.invert_yaxis()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
