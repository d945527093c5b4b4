"""The stage that writes shards, in the loaders."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from readers import keys_in
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import apply_sharding
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService, ShardWriter, WriteOptions
from wds_datapipes.errors import EncodeError, StateError
from wds_datapipes.testing import build_shard
from wds_datapipes.writing import ShardInfo

SHARDS = 6
KEYS = [f"{shard}{number}" for shard in range(SHARDS) for number in range(7)]


@pytest.fixture(autouse=True)
def here(folder: Path) -> None:
    for shard in range(SHARDS):
        build_shard(f"in-{shard}.tar", [{"__key__": f"{shard}{n}", "cls": f"{n}", "json": "{}"} for n in range(7)])


def samples() -> IterDataPipe[Any]:
    pipe: IterDataPipe[Any] = (
        ShardList(f"in-{{0..{SHARDS - 1}}}.tar").sharding_filter().load_wds_shards().group_samples()
    )
    return pipe


def written(infos: list[ShardInfo]) -> list[str]:
    """Return the names of the shards, after checking each against its index."""
    for info in infos:
        assert (info.bytes, info.samples) == (os.path.getsize(info.url), len(keys_in(info.url)))
    return sorted(info.url for info in infos)


def load(pipe: IterDataPipe[Any], workers: int) -> list[ShardInfo]:
    with DataLoader2(pipe, reading_service=ShardReadingService(workers)) as loader:
        return list(loader)


@pytest.mark.parametrize(("kind", "workers"), [("DataLoader", 3), ("DataLoader2", 0), ("DataLoader2", 3)])
def test_workers_alternate_shard_numbers(kind: str, workers: int) -> None:
    pipe = samples().write_wds_shards("out-%02d.tar", maxcount=5)
    infos = load(pipe, workers) if kind == "DataLoader2" else [*DataLoader(pipe, batch_size=None, num_workers=workers)]
    assert all(type(info) is ShardInfo for info in infos)
    names = written(infos)
    assert len(set(names)) == len(names)
    assert sorted(keys_in("out-*.tar")) == KEYS
    count = max(workers, 1)
    # 42 samples in total: each worker writes full shards, and its own last shard, which is not full.
    full = [worker + count * number for worker in range(count) for number in range(-(-len(KEYS) // count // 5))]
    assert names == sorted(f"out-{number:02d}.tar" for number in full)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("out-%d.tar", ["out-0.tar", "out-1.tar", "out-2.tar", "out-3.tar"]),
        ("out-{rank}-%d.tar", ["out-0-0.tar", "out-0-1.tar", "out-1-0.tar", "out-1-1.tar"]),
        ("out-{worker}-%d.tar", ["out-0-0.tar", "out-0-1.tar", "out-1-0.tar", "out-1-1.tar"]),
    ],
)
def test_ranks_and_their_workers_write_separate_shards(pattern: str, names: list[str]) -> None:
    infos: list[ShardInfo] = []
    for rank, worker in itertools.product(range(2), range(2)):
        pipe = samples().write_wds_shards(pattern)
        apply_sharding(pipe, 2, rank, SHARDING_PRIORITIES.DISTRIBUTED)
        apply_sharding(pipe, 2, worker, SHARDING_PRIORITIES.MULTIPROCESSING)
        infos += pipe
    assert written(infos) == names
    assert sorted(keys_in("out-*.tar")) == KEYS


def test_a_pipeline_without_loader_is_the_writer() -> None:
    infos = list(samples().write_wds_shards("out-%02d.tar", maxcount=5, options=WriteOptions(digest=True)))
    with ShardWriter("again-%02d.tar", maxcount=5, options=WriteOptions(digest=True)) as writer:
        for sample in samples():
            writer.write(sample)
    assert [(info.samples, info.bytes, info.sha256) for info in infos] == [info[1:] for info in writer.shards]
    assert keys_in("out-*.tar") == KEYS


def test_finished_shards_are_yielded_and_an_interruption_leaves_whole_ones() -> None:
    iterator = iter(samples().write_wds_shards("out-%02d.tar", maxcount=5))
    assert next(iterator).url == "out-00.tar"
    assert [name for name in os.listdir() if name.startswith("out-0")] == ["out-00.tar"]
    next(iterator)
    del iterator
    assert sorted(name for name in os.listdir() if name.startswith("out")) == ["out-00.tar", "out-01.tar"]


def test_an_interruption_that_loses_samples_warns() -> None:
    iterator = iter(samples().write_wds_shards("out-%02d.tar", maxsize=4096))  # the next sample is written already
    assert next(iterator).url == "out-00.tar"
    lost = r"'out-01\.tar' with 1 sample was discarded, because iteration over write_wds_shards stopped"
    with pytest.warns(UserWarning, match=lost):
        del iterator
    assert sorted(name for name in os.listdir() if name.startswith("out")) == ["out-00.tar"]


def test_values_are_encoded_and_unencodable_ones_skipped() -> None:
    source = IterableWrapper([{"__key__": str(n), "cls": n if n != 2 else None} for n in range(5)])
    with pytest.raises(EncodeError):
        list(source.write_wds_shards("out-%d.tar"))
    assert not [name for name in os.listdir() if name.startswith("out")]
    [info] = source.write_wds_shards("out-%d.tar", on_error="skip")
    assert info.samples == 4
    assert keys_in("out-*.tar") == ["0", "1", "3", "4"]
    [info] = source.wds_encode(on_error="skip").write_wds_shards("other-%d.tar", options=WriteOptions(encoder=False))
    assert info.samples == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_conversion_resumes_in_each_worker(workers: int) -> None:
    pipe = samples().write_wds_shards("out-%02d.tar", maxcount=2, resume=True)
    first = load(pipe, workers)
    names, before = written(first), {info.url: Path(info.url).stat().st_mtime_ns for info in first}
    os.unlink(names[-1])
    again = load(pipe, workers)
    assert sorted(again) == sorted(first)
    rewritten = [name for name in names if Path(name).stat().st_mtime_ns != before[name]]
    assert rewritten == names[-1:]
    assert Counter(keys_in("out-*.tar")) == Counter(KEYS)
    journals = [name for name in os.listdir() if name.endswith(".journal")]
    assert len(journals) == max(workers, 1)


@pytest.mark.parametrize(("pattern", "journal"), [("out-%02d.tar", "j"), ("out-{worker}-%d.tar", "j-{worker}")])
def test_each_worker_has_its_own_journal(pattern: str, journal: str) -> None:
    pipe = samples().write_wds_shards(pattern, maxcount=4, resume=journal)
    first = load(pipe, 2)
    assert len([name for name in os.listdir() if name.startswith("j")]) == 2
    assert load(pipe, 2) == first


@pytest.mark.parametrize(
    ("pattern", "before", "now"), [("out-%02d.tar", 0, 2), ("out-%02d.tar", 2, 3), ("out-{rank}-{worker}-%d.tar", 2, 0)]
)
def test_resuming_with_a_different_number_of_workers_is_an_error(pattern: str, before: int, now: int) -> None:
    pipe = samples().write_wds_shards(pattern, maxcount=2, resume=True)
    first = load(pipe, before)
    content = {info.url: Path(info.url).read_bytes() for info in first}
    with pytest.raises(StateError, match=r"(?s)journal .?'out-.* conversion with writers="):
        load(pipe, now)
    assert {
        name: Path(name).read_bytes() for name in os.listdir() if name.startswith("out") and "journal" not in name
    } == content
    # A process without workers is equivalent to a single worker.
    assert sorted(load(pipe, before or 1)) == sorted(first)


def test_resuming_with_a_different_number_of_ranks_is_an_error() -> None:
    def written_by(ranks: int, workers: int) -> list[ShardInfo]:
        infos: list[ShardInfo] = []
        for rank, worker in itertools.product(range(ranks), range(workers)):
            pipe = samples().write_wds_shards("out-%d.tar", maxcount=5, resume=True)
            apply_sharding(pipe, ranks, rank, SHARDING_PRIORITIES.DISTRIBUTED)
            apply_sharding(pipe, workers, worker, SHARDING_PRIORITIES.MULTIPROCESSING)
            infos += pipe
        return infos

    first = written_by(2, 2)
    assert written_by(2, 2) == first
    for ranks, workers in ((1, 2), (2, 1), (1, 4)):
        text = rf"'2 workers on each of 2 ranks', not '{workers} workers on each of {ranks} ranks'"
        with pytest.raises(StateError, match=text):
            written_by(ranks, workers)
