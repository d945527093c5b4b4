"""What processes of a host that start together take, as bench_scale.py measures it."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import s3fs  # type: ignore[import-untyped]  # noqa: F401  before processes are forked, which would all import it
import torch
import torch.distributed as dist
from harness.processes import in_child, memory
from harness.store import count_requests, store
from torch._C._distributed_c10d import TCPStore
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import IndexedSamples, ShardList, ShardReadingService
from wds_datapipes.index import AccessOptions, Manifest, build_index, read_manifest, write_index, write_manifest
from wds_datapipes.testing import build_shard
from wds_datapipes.types import ShardInfo

__all__ = ["PROCESSES", "Row", "rows_of_starts"]


class Row(NamedTuple):
    """A figure: what it was, what it is, and what it should be."""

    figure: str
    before: str
    now: str
    goal: str


#: How many processes of a host start together.
PROCESSES = 4, 16, 64
#: The figures of these: their names, digits and goals. The goals are for local shards: most of the time that S3 adds is
#: that of botocore, with which each process signs its requests.
STARTS = (
    ("requests until they know the shards", 0, ""),
    ("first item, s", 1, "1.9"),
    ("first item of epoch 2, s", 1, "0.6"),
    ("first item after a resume, s", 1, "1.9"),
    ("MiB (PSS) of a process", 0, "equal"),
)
LOCAL = "ShardList of local files"
STARTS_BEFORE = {
    LOCAL: ("", "1.2 to 1.9", "0.2 to 0.6", "", ""),
    "ShardList with a pattern": ("4, 16, 64", "", "", "", ""),
    "IndexedSamples with a pattern": ("516, 2064, 8256", "", "", "", ""),
    "IndexedSamples with a manifest": ("4, 16, 64", "", "", "", ""),
}


class Started(NamedTuple):
    """What a process took to start.

    Attributes:
        requests: those of all processes together until they know the shards.
        first_s: the time to the first item, in seconds.
        second_s: to that of the second epoch.
        resumed_s: to that after a resume in the middle of this epoch.
        memory: its memory (PSS) in MiB.
    """

    requests: float
    first_s: float
    second_s: float
    resumed_s: float
    memory: float


def first_item_s(loader: Any, begin: float) -> float:
    next(iter(loader))
    return time.perf_counter() - begin


def start_rank(
    rank: int, ranks: int, port: int, source: str, address: str, folder: Path, results: Any, gate: Any
) -> None:
    """Be a rank that starts, changes epoch and resumes."""
    gate.wait()  # a fork must not inherit the locks of the thread of the store, which serves the ranks before it
    torch.set_num_threads(1)
    meeting = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks)
    before = count_requests(address).requests
    dist.barrier()
    begin = time.perf_counter()
    options = store_options(address)

    def load() -> Any:
        shards: Any = str(folder / "*.tar") if source == LOCAL else "s3://data/*.tar"
        if source.endswith("manifest"):
            shards = read_manifest("s3://data/manifest.json", storage_options=options)
        if source.startswith("IndexedSamples"):
            pipe: Any = IndexedSamples(shards, global_batch_size=ranks, access=AccessOptions(storage_options=options))
        else:
            storage = None if source == LOCAL else options
            pipe = ShardList(shards, storage_options=storage).shuffle().sharding_filter()
            pipe = pipe.load_wds_shards(storage_options=storage).group_samples()
        loader: DataLoader2[Any] = DataLoader2(pipe, reading_service=ShardReadingService(distributed=True))
        loader.seed(1)
        return loader

    loader = load()
    made_s = time.perf_counter() - begin
    dist.barrier()
    requests = count_requests(address).requests - before
    dist.barrier()
    first_s = made_s + first_item_s(loader, time.perf_counter())
    dist.barrier()
    second_s = first_item_s(loader, time.perf_counter())
    state = loader.state_dict()
    loader.shutdown()
    dist.barrier()
    begin = time.perf_counter()
    loader = load()
    loader.load_state_dict(state)
    resumed_s = first_item_s(loader, begin)
    dist.barrier()
    results.send(Started(requests, first_s, second_s, resumed_s, memory(os.getpid()) / (1 << 20)))
    dist.barrier()
    loader.shutdown()
    dist.destroy_process_group()


def started(ranks: int, source: str, address: str, folder: Path) -> Started:
    """Return the most that any of some processes takes."""
    meeting = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fork, pairs = multiprocessing.get_context("fork"), []
    gate = fork.Event()
    for rank in range(ranks):
        ours, theirs = fork.Pipe(duplex=False)
        process = fork.Process(
            target=start_rank, args=(rank, ranks, meeting.port, source, address, folder, theirs, gate)
        )
        process.start()
        theirs.close()
        pairs.append((process, ours))
    gate.set()
    found = [ours.recv() for _, ours in pairs]
    for process, _ in pairs:
        process.join()
    return Started(*map(max, zip(*found, strict=True)))


def store_options(address: str) -> dict[str, str]:
    return {"key": "access", "secret": "secret", "endpoint_url": address}


def write_dataset(folder: Path, shards: int, address: str) -> None:
    """Write shards, their indexes and a manifest for the objects that a store makes of these files."""
    entries = []
    for number in range(shards):
        path, url = folder / f"{number:04d}.tar", f"s3://data/{number:04d}.tar"
        build_shard(path, [{"__key__": f"{number}-{n}", "cls": "1"} for n in range(4)])
        index = build_index(url, storage_options=store_options(address))
        write_index(index, f"{path}.wdsidx")
        entries.append(ShardInfo(url, len(index), path.stat().st_size))
    write_manifest(Manifest(entries), folder / "manifest.json")


def rows_of_starts(shards: int, counts: Sequence[int]) -> Iterator[Row]:
    with TemporaryDirectory() as temporary, store(Path(temporary), 0.0, 1e12) as address:
        folder = Path(temporary, "data")
        folder.mkdir()
        in_child(write_dataset, folder, shards, address)
        for source, before in STARTS_BEFORE.items():
            every = [in_child(started, processes, source, address, folder) for processes in counts]
            yield Row(f"{', '.join(map(str, counts))} processes, {source}", "", "", "")
            for (name, digits, goal), was, now in zip(STARTS, before, zip(*every, strict=True), strict=True):
                is_shared = name.startswith("requests") and "pattern" in source
                has_goal = source == LOCAL or not name.startswith("first")
                figures = ", ".join(f"{figure:.{digits}f}" for figure in now)
                yield Row(f"  {name}", was, figures, "those of 1" if is_shared else goal if has_goal else "")
