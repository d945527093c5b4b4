"""What saving the position of a loop and resuming from it cost, as bench_state.py measures it."""

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
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from random import Random
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import torch
import webdataset
from harness.contest import in_turn
from harness.datasets import SETS
from harness.processes import in_child

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.loading.checkpoint.format import checkpoints_in
from wds_datapipes.loading.snapshots import SnapshotWriter
from wds_datapipes.shards.position import unpack_positions

# Silenced by the import above.
from torchdata.dataloader2 import DataLoader2  # isort: skip
from torchdata.stateful_dataloader import StatefulDataLoader  # isort: skip

__all__ = ["state"]

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


def state(arguments: Namespace) -> dict[str, Any]:
    """Measure states after batches of texts and of images, with each number of workers and size of the buffer."""
    small = SETS["SMALL"]._replace(shards=4, samples=40_000)
    urls = small.write(arguments.data, arguments.scale)
    stop = max(4, round(80_000 * arguments.scale) // BATCH)
    few = max(4, round(40 * arguments.scale))
    least = (few + SAVES + 2) * BATCH // 4
    pictures = small._replace(name="PHOTOS", samples=max(least, round(8_000 * arguments.scale)), sample=photo)
    photos = pictures.write(arguments.data)
    facts: dict[str, Any] = {}
    cases = [(kind, workers, buffer_size) for kind in KINDS for workers in WORKERS for buffer_size in BUFFERS]
    for kind, workers, buffer_size in cases:
        name = f"{workers} workers, shuffle {buffer_size}"
        if kind == "images":
            name = f"images, {name}"
            makers: dict[str, Callable[[], Any]] = {"ours": functools.partial(images, photos, buffer_size, workers)}
        else:
            makers = {"ours": functools.partial(ours, urls, buffer_size, workers)}
            makers["reference"] = functools.partial(theirs, urls, buffer_size, workers)
        end = few if kind == "images" else stop
        measures = {each: functools.partial(in_child, measure, make, end) for each, make in makers.items()}
        costs, _ = in_turn(name, measures, arguments.rounds)
        facts[name] = facts_of(costs["ours"], costs.get("reference", []))
    return facts
