"""Measure how fast shards are read, decoded and delivered by worker processes."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from wds_datapipes.codecs.crops import RandomResizedCrop
from wds_datapipes.codecs.images import ImageDecoder, open_image
from wds_datapipes.counters import Skipped, sum_skipped
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.errors import EmptySourceError
from wds_datapipes.extras import require
from wds_datapipes.io.local import local_path
from wds_datapipes.io.openers import open_url
from wds_datapipes.loading.report import count_skipped
from wds_datapipes.pipes import ShardList
from wds_datapipes.pipes.inspection import functional_name_of, sources_of
from wds_datapipes.pipes.stage import OneToOneStage
from wds_datapipes.samples.batching import collate_samples
from wds_datapipes.samples.keys import KeyRule, first_dot

#: The number of samples that show which fields there are.
EXAMPLES = 32
#: The size of a read from a file, and the number of bytes of a KiB.
READ_SIZE, KIB = 1 << 20, 1 << 10
#: How often the memory of the workers is looked at.
MEMORY_INTERVAL_S = 0.2
#: The stage that opens shards.
LOADER = ".load_wds_shards"


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """What is measured.

    Args:
        spec: the spec to which images are decoded, see `ImageDecoder`; None leaves them as bytes.
        crop: the height and width of a random resized crop in pixels; None decodes images in full.
        min_size: as for `ImageDecoder`.
        batch_size: the number of samples in a batch.
        seconds: how long each measurement takes, in seconds.
        cold: remove a local shard from the page cache each time before it is read.
        reading: arguments for ``.load_wds_shards()``, such as ``storage_options``.
        key_rule: splits member names into keys and fields.
        pipeline: takes the URLs and returns the pipeline to measure instead, of batches or samples.
    """

    spec: str | None = "torchrgb8"
    crop: int | None = None
    min_size: int | None = None
    batch_size: int = 64
    seconds: float = 5.0
    cold: bool = False
    reading: Mapping[str, Any] = field(default_factory=dict)
    key_rule: KeyRule = first_dot
    pipeline: Callable[[list[str]], IterDataPipe[Any]] | None = None

    def build(self, urls: Sequence[str]) -> IterDataPipe[Any]:
        """Return the pipeline that is measured."""
        if self.pipeline is not None:
            return self.pipeline(list(urls))
        shards: IterDataPipe[Any] = ShardList(list(urls)).resample_wds_shards()
        if self.cold:
            shards = shards.map(drop_pages)  # which the last time that the shard was read has left
        samples = shards.load_wds_shards(**self.reading).group_samples(key_rule=self.key_rule)
        crop = None if self.crop is None else RandomResizedCrop(self.crop, flip_probability=0.5)
        decoders = () if self.spec is None else (ImageDecoder(self.spec, crop=crop, min_size=self.min_size),)
        batches: IterDataPipe[Any] = samples.wds_decode(*decoders, on_error="skip").batch(self.batch_size).map(list)
        if self.crop is not None:  # so that images have one size
            batches = batches.map(partial(collate_samples, ragged="list"))
        return batches


class Delivery(NamedTuple):
    """How fast batches arrive with a number of worker processes.

    Attributes:
        workers: the number of worker processes; 0 for the main process only.
        samples_per_s: the number of samples that arrive per second.
        first_batch_s: the time from the start of the loader to the first batch, in seconds.
        loop_s: the time that the main process computes for each sample, in seconds.
        waited_s: the time that the main process waits for each sample, in seconds.
        worker_bytes: the peak memory of the largest worker in bytes, with its share of the memory that processes have
            in common; None if it is unknown.
    """

    workers: int
    samples_per_s: float
    first_batch_s: float
    loop_s: float
    waited_s: float
    worker_bytes: int | None

    @property
    def loop_share(self) -> float:
        """The fraction of the time in which the main process computes, rather than waits for the workers."""
        return min(1.0, self.loop_s * self.samples_per_s)


@dataclass
class ShardBenchmark:
    """The results of `measure_shards`.

    Attributes:
        shards: the number of shards.
        fields: the names of the fields of the first samples, and their mean sizes in bytes.
        images: the names of those that are images.
        sample_bytes: the mean size of a sample in bytes.
        raw_bytes_per_s: how fast the shards are read without parsing them, in bytes per second.
        open_s: the mean time from opening a shard to its first bytes, in seconds.
        passes: how many times all shards were read to measure this; less than 1 if the time did not suffice for all.
        stages: the functional names of the stages, and the seconds that each takes for a sample in one process. The
            opening of shards is ``"open"``.
        image_pixels: the mean number of pixels of a decoded image, or 0.
        processor_share: the fraction of the time of one process in which it computes, rather than waits for data.
        deliveries: the results for each number of workers.
        skipped: the samples that could not be decoded.
    """

    shards: int
    fields: dict[str, float] = field(default_factory=dict)
    images: list[str] = field(default_factory=list)
    sample_bytes: float = 0.0
    raw_bytes_per_s: float = 0.0
    open_s: float = 0.0
    passes: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    image_pixels: float = 0.0
    processor_share: float = 1.0
    deliveries: list[Delivery] = field(default_factory=list)
    skipped: Skipped = field(default_factory=lambda: sum_skipped(()))

    @property
    def sample_s(self) -> float:
        """The time of all stages for a sample in one process, in seconds."""
        return sum(self.stages.values())


class StageTimer(OneToOneStage[Any]):
    """Passes items on, counts them, and adds up the time that the stages before it take."""

    is_stateless = True

    def __init__(self, source: IterDataPipe[Any]) -> None:
        self.source = source
        self.name = functional_name_of(source)
        self.seconds = 0.0
        self.items = 0

    def __iter__(self) -> Iterator[Any]:
        items = iter(self.source)
        while True:
            begin = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self.seconds += time.perf_counter() - begin
            self.items += 1
            yield item


def measure_shards(urls: Sequence[str], workers: Sequence[int], options: BenchmarkOptions) -> Iterator[ShardBenchmark]:
    """Measure shards step by step, and yield the results so far after each step; it is the same object each time.

    Shards are drawn at random with replacement, so that any number of workers has enough of them.

    Args:
        urls: the shards.
        workers: numbers of worker processes.
        options: what is measured.

    Raises:
        EmptySourceError: the shards have no samples, or none that can be decoded.
        MissingDependencyError: DataLoader2 is not installed.
    """
    require("torchdata.dataloader2", extra="dataloader2", purpose="measure worker processes")
    found = ShardBenchmark(len(urls))
    _inspect(urls, options, found)
    yield found
    _measure_raw(urls, options, found)
    yield found
    _measure_stages(urls, options, found)
    yield found
    for count in workers:
        _measure_delivery(urls, options, count, found)
        yield found


def _inspect(urls: Sequence[str], options: BenchmarkOptions, found: ShardBenchmark) -> None:
    """Find the fields of the first samples, and their sizes."""
    samples = ShardList(list(urls)).load_wds_shards(**options.reading).group_samples(key_rule=options.key_rule)
    with closing(cast("Generator[Any, None, None]", iter(samples))) as first:
        examples = list(itertools.islice(first, EXAMPLES))
    if not examples:
        raise EmptySourceError(f"there is no sample in {len(urls)} shards, so there is nothing to measure")
    names = dict.fromkeys(name for sample in examples for name in sample if not name.startswith("__"))
    for name in names:
        sizes = [len(sample[name]) for sample in examples if name in sample]
        found.fields[name] = sum(sizes) / len(sizes)
        found.sample_bytes += sum(sizes) / len(examples)
    decoder = ImageDecoder("rgb8")
    found.images = [name for name in names if decoder.takes(name)]
    sizes_in_pixels = [_pixels(sample[name]) for sample in examples for name in found.images if name in sample]
    found.image_pixels = sum(sizes_in_pixels) / max(1, len(sizes_in_pixels))


def _pixels(data: bytes) -> int:
    """Return the number of pixels of an image, or 0 if it cannot be opened; decoding it reports the error."""
    try:
        width, height = open_image(data).size
    except (OSError, ValueError):
        return 0
    return width * height


def _measure_raw(urls: Sequence[str], options: BenchmarkOptions, found: ShardBenchmark) -> None:
    """Measure how many bytes per second can be read, with the shards one after the other."""
    opening = {name: value for name, value in options.reading.items() if name in ("storage_options", "timeout_s")}
    buffer = bytearray(READ_SIZE)
    size, opened, opening_s, begin = 0, 0, 0.0, time.perf_counter()
    for url in itertools.cycle(urls):
        if options.cold:
            drop_pages(url)
        opened += 1
        asked = time.perf_counter()
        with open_url(url, **opening) as file:
            count = file.readinto(buffer)  # type: ignore[attr-defined]  # raw streams have it
            opening_s += time.perf_counter() - asked
            while count:
                size += count
                if time.perf_counter() - begin > options.seconds:
                    break
                count = file.readinto(buffer)  # type: ignore[attr-defined]  # as above
        if (elapsed := time.perf_counter() - begin) > options.seconds:
            break
    found.raw_bytes_per_s, found.open_s, found.passes = size / elapsed, opening_s / opened, opened / len(urls)


def _measure_stages(urls: Sequence[str], options: BenchmarkOptions, found: ShardBenchmark) -> None:
    """Measure the time of each stage in this process, with one thread, as torch has in a worker."""
    pipe = options.build(urls)
    timers = _insert_timers(pipe)
    samples, threads = 0, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with closing(_endless(timers[0])) as items:
            next(items)
            before = [(timer.seconds, timer.items) for timer in timers]
            begin, computed = time.perf_counter(), time.process_time()
            while not samples or time.perf_counter() - begin < options.seconds:
                samples += count_samples(next(items))
            elapsed, computed = time.perf_counter() - begin, time.process_time() - computed
    finally:
        torch.set_num_threads(threads)
        found.skipped = sum_skipped((found.skipped, count_skipped(pipe)))
    found.processor_share = min(1.0, computed / elapsed)
    earlier, shards = 0.0, 0
    for timer, (seconds, items_before) in reversed([*zip(timers, before, strict=True)]):
        total = timer.seconds - seconds
        name, own = timer.name, max(0.0, total - earlier) / samples
        if name == LOADER:
            opening = min(own, shards * found.open_s / samples)
            found.stages["open"] = found.stages.get("open", 0.0) + opening
            own -= opening
        found.stages[name] = found.stages.get(name, 0.0) + own
        earlier, shards = total, timer.items - items_before


def _insert_timers(pipe: IterDataPipe[Any]) -> list[StageTimer]:
    """Insert a timer after each stage of a pipeline, up to the first with several sources; return them in reverse."""
    timers = [StageTimer(pipe)]
    while len(sources := list({id(source): source for source in sources_of(pipe)}.values())) == 1:
        timer = StageTimer(sources[0])
        names = [name for name, value in vars(pipe).items() if value is sources[0]]
        if not names:  # it is in a collection
            break
        for name in names:
            setattr(pipe, name, timer)
        timers.append(timer)
        pipe = sources[0]
    return timers


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

    pipe = options.build(urls)
    begin = time.perf_counter()
    with DataLoader2(pipe, reading_service=ShardReadingService(num_workers=workers)) as loader:
        items = _endless(loader)
        next(items)
        first_batch_s = time.perf_counter() - begin
        waited, memory, looked = _waited(loader), 0, 0.0
        count, begin, computed = 0, time.perf_counter(), time.process_time()
        while not count or time.perf_counter() - begin < options.seconds:
            count += count_samples(next(items))
            if time.perf_counter() - looked > MEMORY_INTERVAL_S:
                pids = [worker.pid for worker in loader.reading_service.report().workers]
                memory = max(memory, *(_memory_of(pid) or 0 for pid in pids), 0)
                looked = time.perf_counter()
        elapsed, computed = time.perf_counter() - begin, time.process_time() - computed
        waited = _waited(loader) - waited
        found.skipped = sum_skipped((found.skipped, loader.reading_service.report().skipped))
    found.deliveries.append(
        Delivery(workers, count / elapsed, first_batch_s, computed / count, waited / count, memory or None)
    )


def count_samples(item: Any) -> int:
    """Return the number of samples in an item of a pipeline: a batch of columns, a list of samples, or a sample.

    >>> count_samples({"jpg": torch.zeros(2, 3), "__key__": ["a", "b"]}), count_samples([torch.zeros(3, 2), [1, 2, 3]])
    (2, 3)
    >>> count_samples([{}, {}]), count_samples({"__key__": "a", "cls": 1}), count_samples((torch.zeros(3, 8), 1))
    (2, 1, 1)
    """
    if isinstance(item, Mapping) and "__key__" in item:
        return len(item["__key__"]) if isinstance(item["__key__"], list | tuple) else 1
    columns = list(item.values()) if isinstance(item, Mapping) else item if isinstance(item, list | tuple) else [item]
    lengths = {len(column) if _is_column(column) else 0 for column in columns}
    if len(lengths) == 1 and 0 not in lengths:
        return lengths.pop()
    return len(item) if isinstance(item, list) else 1


def _is_column(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, torch.Tensor) and value.ndim > 0)


def _waited(loader: Any) -> float:
    """Return how long the loop has waited for workers, in seconds."""
    seconds: float = sum(worker.waited_s for worker in loader.reading_service.report().workers)
    return seconds


def drop_pages(url: str) -> str:
    """Remove the pages of a local file from the page cache, so that it is read from the disk; return its URL."""
    if (path := local_path(url)) is not None:
        with open(path, "rb") as file:  # noqa: PTH123  a path may be longer than Path permits
            os.fsync(file)  # pages that are not written yet cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return url


def _memory_of(pid: int) -> int | None:
    """Return the memory of a process in bytes, with its share of the memory that it has in common with others."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return None
    return next(int(line.split()[1]) * KIB for line in text.splitlines() if line.startswith("Pss:"))
