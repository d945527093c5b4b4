"""Growth measurements of bench_scale.py. Each measurement runs in a separate process."""

from __future__ import annotations

import gc
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import webdataset
from harness.processes import cost_of, descendants, in_use, memory
from torch.utils.data.datapipes.iter import IterableWrapper
from webdataset.tariterators import tarfile_to_samples

from wds_datapipes import ShardList, ShardReadingService, TarWriter
from wds_datapipes.io.remote.remote_file import FileFacts
from wds_datapipes.shard_cache.download import DownloadRequest
from wds_datapipes.shard_cache.entry import CopyFacts, Entry
from wds_datapipes.shard_cache.store import CacheFolder

from torchdata.dataloader2 import DataLoader2  # isort: skip - the import above silences its deprecation warning

__all__ = [
    "LISTERS",
    "READERS",
    "Copies",
    "Listing",
    "Point",
    "Skipping",
    "State",
    "cache_samples",
    "copies",
    "epoch",
    "list_shards",
    "skip",
    "state_of",
]

#: The number of lookups that are timed.
LOOKUPS = 1000
#: The size of a copy in bytes. Most are sparse files.
COPY_BYTES = 10_240
BATCH = 64


class Skipping(NamedTuple):
    """The cost of reading one shard."""

    us_per_member: float
    peak_bytes: int


class Listing(NamedTuple):
    """The cost of a long list."""

    seconds: float
    bytes_per_url: float


class Point(NamedTuple):
    """A point in an epoch: the samples and seconds so far, and the memory of all processes in bytes (PSS)."""

    samples: int
    seconds: float
    bytes: int
    state_bytes: int


class State(NamedTuple):
    """The size of a state, and the time to save it and from loading it to the next item."""

    bytes: int
    save_s: float
    resume_s: float


class Copies(NamedTuple):
    """The cost of the first copy that a process finds, of others, and of a download that has to evict another copy."""

    first_s: float
    us_per_lookup: float
    eviction_s: float


def is_last(name: str) -> bool:
    return name.startswith("last")


def ours(url: str) -> Iterable[Any]:
    pipe: Iterable[Any] = ShardList(url).load_wds_shards(select_files=is_last).group_samples()
    return pipe


def theirs(url: str) -> Iterable[Any]:
    urls = webdataset.SimpleShardList([url])
    pipeline: Iterable[Any] = webdataset.DataPipeline(urls, tarfile_to_samples(select_files=is_last))
    return pipeline


READERS: dict[str, Callable[[str], Iterable[Any]]] = {"ours": ours, "webdataset": theirs}


def skip(reader: str, path: str, members: int) -> Skipping:
    """Read only the last sample of a shard, and return the time per member and the peak memory."""
    keys = list[str]()
    cost = cost_of(lambda: keys.extend(sample["__key__"] for sample in READERS[reader](path)))
    if keys != ["last"]:
        raise AssertionError(f"{reader} yielded {keys} of {path}, not only the last sample")
    return Skipping(1e6 * cost.seconds / members, cost.bytes)


def ours_list(urls: str) -> Iterator[str]:
    return iter(ShardList(urls))


def torch_list(urls: str) -> Iterator[str]:
    return iter(IterableWrapper(webdataset.shardlists.expand_urls(urls), deepcopy=False))


def theirs_list(urls: str) -> Iterator[Any]:
    return iter(webdataset.SimpleShardList(urls))


LISTERS: dict[str, Callable[[str], Iterator[Any]]] = {
    "ours": ours_list,
    "webdataset": theirs_list,
    "webdataset's expansion in torch's IterableWrapper": torch_list,
}


def list_shards(lister: str, shards: int) -> Listing:
    """Expand a pattern, and return the time to the first URL and the memory per URL."""
    gc.collect()
    before = in_use()
    begin = time.perf_counter()
    urls = LISTERS[lister](f"s3://bucket/data/train-{{0000000..{shards - 1:07d}}}.tar")
    next(urls)
    elapsed = time.perf_counter() - begin
    return Listing(elapsed, (in_use() - before) / shards)


def epoch(path: str, shards: int, samples: int) -> list[Point]:
    """Iterate over an epoch of shards that are all the same file, and return ten points of it.

    Args:
        path: the file.
        shards: how often it occurs.
        samples: the number of samples in the file.
    """
    points: list[Point] = []
    with TemporaryDirectory() as folder:
        for shard in range(shards):
            Path(folder, f"{shard:05d}.tar").symlink_to(path)
        pipe = ShardList(f"{folder}/{{00000..{shards - 1:05d}}}.tar").shuffle().sharding_filter()
        pipe = pipe.load_wds_shards().group_samples().shuffle_samples(1000).batch(BATCH)
        total, seen = shards * samples, 0
        with DataLoader2(pipe, reading_service=ShardReadingService(num_workers=2)) as loader:
            loader.seed(0)
            begin = time.perf_counter()
            for batch in loader:
                seen += len(batch)
                if len(points) < 10 and seen >= total * (len(points) + 1) / 11:
                    state = len(pickle.dumps(loader.state_dict()))
                    size = memory(os.getpid(), *descendants())
                    points.append(Point(seen, time.perf_counter() - begin, size, state))
    if seen != total:
        raise AssertionError(f"the epoch had {seen} samples, not {total}")
    return points


def state_of(path: str, shards: int) -> State:
    """Save a state after some batches of a list with this many shards, and resume from it."""

    def loader() -> DataLoader2[Any]:
        pipe = ShardList([path] * shards).shuffle().sharding_filter().load_wds_shards().group_samples()
        return DataLoader2(pipe.shuffle_samples(1000).batch(BATCH), reading_service=ShardReadingService(num_workers=2))

    with loader() as first:
        first.seed(0)
        batches = iter(first)
        for _ in range(20):
            next(batches)
        begin = time.perf_counter()
        state = first.state_dict()
        saved = time.perf_counter() - begin
    with loader() as second:
        begin = time.perf_counter()
        second.load_state_dict(state)
        next(iter(second))
        return State(len(pickle.dumps(state)), saved, time.perf_counter() - begin)


def copies(entries: int) -> Copies:
    """Find copies of shards in a folder with this many, and download another one in place of the oldest."""
    with TemporaryDirectory() as name:
        folder = Path(name, "cache")
        folder.mkdir()
        urls = [f"s3://bucket/{number:06d}.tar" for number in range(entries)]
        version = FileFacts(COPY_BYTES, etag='"1"')  # as in a manifest; otherwise, the store would be asked
        for url in urls:
            entry = Entry.of(folder, url)
            entry.path.touch()
            os.truncate(entry.path, COPY_BYTES)
            entry.write_facts(CopyFacts(url, COPY_BYTES, "", entry.path.stat().st_mtime_ns, version))
        store = CacheFolder(folder, max_bytes=entries * COPY_BYTES)
        random = Random(0)
        first = _find(store, random.choice(urls), version)  # compares all copies with the limit
        lookup = sum(_find(store, random.choice(urls), version) for _ in range(LOOKUPS)) / LOOKUPS
        source = f"{name}/new.tar"
        with TarWriter(source) as writer:
            writer.write({"__key__": "a", "txt": "a"})
        eviction = _find(store, source, FileFacts(Path(source).stat().st_size))
        return Copies(first, 1e6 * lookup, eviction)


def _find(store: CacheFolder, url: str, version: FileFacts) -> float:
    """Open the copy of a shard, after a download if there is none; return the seconds that it takes."""
    begin = time.perf_counter()
    copy = store.open(DownloadRequest(url, version, None, {}))
    taken = time.perf_counter() - begin
    assert copy is not None
    copy.close()
    return taken


def cache_samples(path: str, samples: int) -> tuple[float, float]:
    """Return the µs per sample of the first epoch, which fills the cache, and of the second, which reads it."""
    with TemporaryDirectory() as folder:
        pipe = ShardList(path).load_wds_shards().group_samples().cache_samples(f"{folder}/samples")
        times = []
        for _ in range(2):
            begin = time.perf_counter()
            if sum(1 for _ in pipe) != samples:
                raise AssertionError(f"the epoch had not {samples} samples")
            times.append(1e6 * (time.perf_counter() - begin) / samples)
    return times[0], times[1]
