"""Measure how fast shards are read, decoded and delivered by worker processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from wds_datapipes.codecs.crops import RandomResizedCrop
from wds_datapipes.codecs.images import ImageDecoder
from wds_datapipes.counters import Skipped, sum_skipped
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.errors import EmptySourceError
from wds_datapipes.extras import DATALOADER2, require
from wds_datapipes.loading.report import count_skipped
from wds_datapipes.pipes import ShardList
from wds_datapipes.samples.batching import collate_samples
from wds_datapipes.samples.keys import KeyRule, first_dot

#: The number of samples that show which fields there are.
EXAMPLES = 32


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """Options of a measurement.

    Args:
        spec: the spec for decoding images, see `ImageDecoder`; None leaves them as bytes.
        crop: the height and width of a random resized crop in pixels; None decodes images in full.
        batch_size: the number of samples in a batch.
        seconds: how long each measurement takes, in seconds.
        reading: arguments for ``.load_wds_shards()``, such as ``storage_options``.
        key_rule: splits member names into keys and fields.
        pipeline: a function of the URLs that returns another pipeline to measure, whose items are batches of that size.
    """

    spec: str | None = "torchrgb8"
    crop: int | None = None
    batch_size: int = 64
    seconds: float = 5.0
    reading: Mapping[str, Any] = field(default_factory=dict)
    key_rule: KeyRule = first_dot
    pipeline: Callable[[list[str]], IterDataPipe[Any]] | None = None

    def build(self, urls: Sequence[str]) -> dict[str, IterDataPipe[Any]]:
        """Return the pipeline of batches to measure, preceded by pipelines that end at an earlier stage."""
        if self.pipeline is not None:
            return {"pipeline": self.pipeline(list(urls))}
        samples = ShardList(list(urls)).resample_wds_shards().load_wds_shards(**self.reading)
        read = samples.group_samples(key_rule=self.key_rule)
        crop = None if self.crop is None else RandomResizedCrop(self.crop, flip_probability=0.5)
        decoders = () if self.spec is None else (ImageDecoder(self.spec, crop=crop),)
        decoded = read.wds_decode(*decoders, on_error="skip")
        collate: Any = list if self.crop is None else partial(collate_samples, ragged="list")
        batches = decoded.batch(self.batch_size)
        return {"read": read.batch(self.batch_size), "decode": batches, "batch": batches.map(collate)}


class Delivery(NamedTuple):
    """The speed at which batches arrive with a number of worker processes.

    Attributes:
        workers: the number of worker processes; 0 for the main process only.
        samples_per_s: the number of samples that arrive per second.
        first_batch_s: the time from the start of the loader to the first batch, in seconds.
        loop_share: the fraction of the time in which the main process computes instead of waiting for the workers.
    """

    workers: int
    samples_per_s: float
    first_batch_s: float
    loop_share: float

    def headroom(self, step_s: float, batch_size: int) -> float:
        """Return the ratio of the samples that arrive to those that training steps consume."""
        return self.samples_per_s * step_s / batch_size


@dataclass
class ShardBenchmark:
    """The results of `measure_shards`.

    Attributes:
        shards: the number of shards.
        fields: the names of the fields in the first samples, with their mean sizes in bytes.
        sample_bytes: the mean size of a sample in bytes.
        stages: the seconds that reading, decoding and batching take per sample in one process.
        deliveries: the results for each number of workers.
        skipped: the samples that could not be decoded.
    """

    shards: int
    fields: dict[str, float] = field(default_factory=dict)
    sample_bytes: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    deliveries: list[Delivery] = field(default_factory=list)
    skipped: Skipped = field(default_factory=Skipped)

    @property
    def shares(self) -> dict[str, float]:
        """The fraction of the time that each stage takes in one process."""
        total = sum(self.stages.values()) or 1.0
        return {name: seconds / total for name, seconds in self.stages.items()}


def measure_shards(urls: Sequence[str], workers: Sequence[int], options: BenchmarkOptions) -> Iterator[ShardBenchmark]:
    """Measure shards step by step; after each step, yield the results so far, always in the same object.

    Shards are drawn at random with replacement, so that any number of workers has enough of them.

    Args:
        urls: the shards.
        workers: numbers of worker processes.
        options: what is measured.

    Raises:
        EmptySourceError: the shards have no samples, or none that can be decoded.
        MissingDependencyError: DataLoader2 is not installed.
    """
    require("torchdata.dataloader2", release=DATALOADER2, purpose="measure worker processes")
    found = ShardBenchmark(len(urls))
    samples = ShardList(list(urls)).load_wds_shards(**options.reading).group_samples(key_rule=options.key_rule)
    examples = list(samples.slice_samples(EXAMPLES))
    if not examples:
        raise EmptySourceError("the shards have no samples, so there is nothing to measure")
    for name in dict.fromkeys(name for sample in examples for name in sample if not name.startswith("__")):
        sizes = [len(sample[name]) for sample in examples if name in sample]
        found.fields[name] = sum(sizes) / len(sizes)
        found.sample_bytes += sum(sizes) / len(examples)
    yield found
    earlier, threads = 0.0, torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        for name, pipe in options.build(urls).items():
            seconds = 1 / _measure_rate(pipe, options)[0]
            found.stages[name], earlier = max(0.0, seconds - earlier), seconds
    finally:
        torch.set_num_threads(threads)
        found.skipped = count_skipped(pipe)
    yield found
    for count in workers:
        _measure_delivery(urls, options, count, found)
        yield found


def _measure_rate(batches: Any, options: BenchmarkOptions) -> tuple[float, float, float]:
    """Return the samples per second, the seconds to the first batch, and the fraction of time spent computing."""
    begin, count = time.perf_counter(), 0
    with closing(_endless(batches)) as items:
        next(items)
        first_batch_s = time.perf_counter() - begin
        begin, computed = time.perf_counter(), time.process_time()
        while not count or time.perf_counter() - begin < options.seconds:
            next(items)
            count += options.batch_size
        elapsed, computed = time.perf_counter() - begin, time.process_time() - computed
    return count / elapsed, first_batch_s, min(1.0, computed / elapsed)


def _endless(pipe: Any) -> Generator[Any, None, None]:
    """Yield the items of one epoch after the other.

    Raises:
        EmptySourceError: an epoch has no items.
    """
    while True:
        is_empty = True
        for item in pipe:
            is_empty = False
            yield item
        if is_empty:
            raise EmptySourceError("the pipeline yielded nothing, so there is nothing to measure")


def _measure_delivery(urls: Sequence[str], options: BenchmarkOptions, workers: int, found: ShardBenchmark) -> None:
    """Measure how fast batches arrive from worker processes."""
    from wds_datapipes.loading.service.service import ShardReadingService
    from wds_datapipes.loading.torchdata_api import DataLoader2

    *_, pipe = options.build(urls).values()
    with DataLoader2(pipe, reading_service=ShardReadingService(num_workers=workers)) as loader:
        rates = _measure_rate(loader, options)
        found.skipped = sum_skipped((found.skipped, loader.reading_service.report().skipped))
    found.deliveries.append(Delivery(workers, *rates))
