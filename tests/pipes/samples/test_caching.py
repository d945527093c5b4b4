"""Samples cached across epochs: the items, their origin, and what remains after an error."""

from __future__ import annotations

import copy
import errno
import io
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numbered_shards import write_numbered
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding
from torchdata.dataloader2 import DataLoader2
from users_stages import InMain

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.errors import CacheError
from wds_datapipes.samples import caching

pytestmark = [pytest.mark.usefixtures("folder")]
#: Not for torch's DataLoader or torchdata's service, which close some pipes only later.
leaves_nothing = pytest.mark.usefixtures("nothing_left")
PLACES = [None, "kept"]
#: Shards contain uneven numbers of samples, like real ones.
SAMPLES_PER_SHARD = [7, 1, 12, 3, 9, 5, 2]
KEYS = sorted(f"{shard}-{index}" for shard, count in enumerate(SAMPLES_PER_SHARD) for index in range(count))


@pytest.fixture
def shards() -> None:
    write_numbered(Path(), SAMPLES_PER_SHARD)


def pipeline(place: str | None) -> IterDataPipe[Any]:
    """Return a typical pipeline with a cache, whose list of shards accesses nothing."""
    samples = ShardList("{0..6}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()
    pipe: IterDataPipe[Any] = samples.cache_samples(place).to_tuple("__key__").map(first)
    return pipe


def first(values: tuple[Any, ...]) -> Any:
    return values[0]


def invert(number: float) -> float:
    return 1 / number


def remove_shards() -> None:
    for shard in range(len(SAMPLES_PER_SHARD)):
        os.remove(f"{shard}.tar")


class Counted(IterDataPipe[Any]):
    """Yields items, and counts them."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.reads = 0

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            self.reads += 1
            yield item


class Splitter(IterDataPipe[int]):
    """Splits the data without reporting its share."""

    def __iter__(self) -> Iterator[int]:
        yield 1

    def apply_sharding(self, instances: int, instance: int, sharding_group: Any = None) -> None:
        pass


def part_of(pipe: IterDataPipe[Any], instances: int, instance: int) -> IterDataPipe[Any]:
    part: IterDataPipe[Any] = copy.deepcopy(pipe)
    apply_sharding(part, instances, instance)
    return part


def seeded(pipe: IterDataPipe[Any], seed: int) -> IterDataPipe[Any]:
    apply_random_seed(pipe, torch.Generator().manual_seed(seed))
    return pipe


@leaves_nothing
@pytest.mark.parametrize("place", PLACES)
@given(items=st.lists(st.integers(0, 3)), stops=st.lists(st.integers(0, 12), max_size=6))
def test_every_pass_equals_the_source_until_one_is_complete(
    place: str | None, items: list[int], stops: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = Counted(items)
    pipe = source.cache_samples(None if place is None else tmp_path_factory.mktemp("kept"))
    reads, complete = 0, False
    for stop in [*stops, len(items) + 1, 3, len(items) + 1]:
        iterator = iter(pipe)
        assert list(islice(iterator, stop)) == items[:stop]
        del iterator
        reads += 0 if complete else min(stop, len(items))
        complete |= stop > len(items)
        assert source.reads == reads


@leaves_nothing
@pytest.mark.parametrize("place", PLACES)
def test_changes_in_place_do_not_affect_later_passes(place: str | None) -> None:
    def spoil(sample: dict[str, Any]) -> dict[str, Any]:
        sample["array"] += 1
        sample["list"].append(1)
        sample["tensor"].zero_()
        del sample["__key__"]
        return sample

    def fresh() -> dict[str, Any]:
        return {"__key__": "a", "array": np.zeros(3), "list": [0], "tensor": torch.ones(2)}

    pipe = Counted([fresh(), fresh()]).cache_samples(place)
    for _ in range(3):
        for sample in pipe:
            spoil(sample)
            assert sample["array"].tolist() == [1, 1, 1]
            assert sample["list"] == [0, 1]


@leaves_nothing
def test_cached_samples_are_not_pickled_with_the_pipe() -> None:
    pipe = Counted([]).cache_samples()
    empty = len(pickle.dumps(pipe))
    pipe.source.items = [bytes(100_000)]
    assert list(pipe) == list(pipe) == [bytes(100_000)]
    assert pipe.source.reads == 1
    pipe.source.items = []
    assert len(pickle.dumps(pipe)) < empty + 1000
    assert list(pickle.loads(pickle.dumps(pipe))) == []
    assert list(pipe) == [bytes(100_000)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [DataLoader, DataLoader2])
def test_later_epochs_read_no_shard(kind: Any, workers: int, place: str | None, shards: None) -> None:
    loader: Any = (
        DataLoader2(pipeline(place), reading_service=ShardReadingService(workers))
        if kind is DataLoader2
        else DataLoader(pipeline(place), batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    )
    epochs = [list(loader)]
    remove_shards()
    epochs += [list(loader), list(loader)]
    if kind is DataLoader2:
        loader.shutdown()
    assert sorted(epochs[0]) == KEYS
    assert epochs == [epochs[0]] * 3


@leaves_nothing
@pytest.mark.parametrize("place", PLACES)
def test_a_complete_part_and_interrupted_ones_form_one_epoch(place: str | None, shards: None) -> None:
    parts = [part_of(pipeline(place), 3, instance) for instance in range(3)]
    for instance, part in enumerate(parts):
        iterator = iter(seeded(part, 1))
        read = list(islice(iterator, 1000 if instance == 1 else 2))
        del iterator
        assert len(read) > 1
    for epoch in range(2, 5):
        assert sorted(key for part in parts for key in seeded(part, epoch)) == KEYS


def test_samples_cached_in_a_process_are_no_part_in_its_workers(shards: None) -> None:
    pipe = pipeline(None)
    assert sorted(pipe) == KEYS
    loader = DataLoader(pipe, batch_size=None, num_workers=2)
    assert sorted(loader) == sorted(loader) == KEYS
    remove_shards()
    assert sorted(pipe) == KEYS


@leaves_nothing
def test_the_seed_chooses_the_order_and_the_split(shards: None) -> None:
    def keys(seed: int) -> list[str]:
        pipe = ShardList("{0..6}.tar").shuffle().load_wds_shards().group_samples().cache_samples(seed=seed)
        return [sample["__key__"] for sample in seeded(pipe, 5)]

    assert keys(1) == keys(1) != keys(2)


@leaves_nothing
def test_each_rank_and_worker_has_its_own_file(shards: None) -> None:
    epochs = []
    for rank in range(2):
        service = ShardReadingService(2, distributed=(rank, 2))
        with DataLoader2(pipeline("kept"), reading_service=service) as loader:
            loader.seed(1)
            epochs += [list(loader), list(loader)]
    assert epochs[::2] == epochs[1::2]
    assert sorted(epochs[0] + epochs[2]) == KEYS
    assert sorted(os.listdir("kept")) == [f"part-0000{instance}-of-00004.samples" for instance in range(4)]
    assert sorted(DataLoader(pipeline("kept"), batch_size=None, num_workers=1)) == KEYS  # in another set of files
    unsplit = DataLoader(Counted([0, 1, 2]).cache_samples("whole"), batch_size=None, num_workers=2)
    assert sorted(unsplit) == sorted(unsplit) == [0, 0, 1, 1, 2, 2]
    assert len(os.listdir("whole")) == 2


@leaves_nothing
def test_another_pipeline_is_recognized_and_refused(shards: None) -> None:
    list(pipeline("kept"))

    def members(shards: str) -> IterDataPipe[Any]:
        pipe: IterDataPipe[Any] = ShardList(shards).shuffle().sharding_filter().load_wds_shards()
        return pipe

    samples = members("{0..6}.tar").group_samples()
    for pipe, seed, message in (
        (samples, 3, "it was created with seed 0, but this pipeline has seed 3"),
        (samples.to_tuple("txt"), 0, r"it was created with SampleGrouper\(.* has TupleMaker\(specs=\('txt',\)"),
        (members("{0..5}.tar").group_samples(), 0, r"it was .* ShardList\(urls=7 .* has ShardList\(urls=6 "),
        (members("{0..6}.tar").group_samples(fields=["txt"]), 0, r".*SampleGrouper\(\), .* has .*fields=\['txt'\]"),
        (samples.map(first), 0, ".* has MapperIterDataPipe\\(fn=.*first"),
    ):
        refused = rf"part-00000-of-00001\.samples belongs to another pipeline: {message}"
        with pytest.raises(CacheError, match=refused):
            list(pipe.cache_samples("kept", seed=seed))
    shuffle = samples.source.source.source_datapipe.set_shuffle(False)
    with pytest.raises(CacheError, match=r"another pipeline: .*ShufflerIterDataPipe\(.*enabled=False"):
        list(samples.cache_samples("kept"))
    shuffle.set_shuffle(True)
    list(samples.cache_samples("kept"))


SAMPLES = [{"__key__": "a", "cls": 1}, {"cls": 2}, {"__key__": "a", "cls": 1}, 5]


@leaves_nothing
def test_a_truncated_file_and_any_changed_byte_are_noticed() -> None:
    list(IterableWrapper(SAMPLES).cache_samples("kept"))
    path = Path("kept/part-00000-of-00001.samples")
    whole = path.read_bytes()
    truncated = [whole[:size] for size in range(0, len(whole), 5)]
    changed = [whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :] for at in range(0, len(whole), 3)]
    for damaged in (*truncated, *changed, whole + b"\0"):
        path.write_bytes(damaged)
        found: list[Any] = []
        with pytest.raises(CacheError, match=r"of-00001\.samples is damaged: at byte \d+, its data has a wrong len"):
            found.extend(IterableWrapper(SAMPLES).cache_samples("kept"))
        assert found == SAMPLES[: len(found)]


class FailingDisk(io.FileIO):
    """A file whose disk fails after some reads, like one on a stale network mount."""

    reads = 0

    def readinto(self, buffer: Any) -> int:
        FailingDisk.reads -= 1
        if FailingDisk.reads < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().readinto(memoryview(buffer)[:4000])


@leaves_nothing
@pytest.mark.parametrize("fails", ["folder", "open", 0, 1, 3])
def test_a_cache_that_cannot_be_read_is_reported(fails: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = IterableWrapper([bytes(3000)] * 8).cache_samples("kept")
    list(pipe)
    file = Path("kept/part-00000-of-00001.samples")

    def open_failing(path: str, mode: str) -> Any:
        if fails == "open":
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return io.BufferedReader(FailingDisk(path), 4000)

    if fails == "folder":
        file.unlink()
        file.mkdir()
    else:
        monkeypatch.setattr(caching, "open", open_failing, raising=False)
        monkeypatch.setattr(FailingDisk, "reads", fails if isinstance(fails, int) else 0)
    reason = "Is a directory" if fails == "folder" else "Input/output error"
    with pytest.raises(CacheError, match=rf"{file} cannot be read: {reason}\. Delete it"):
        list(pipe)


@pytest.mark.parametrize("room", [100, 3_000_000])
def test_a_full_disk_is_an_error_that_leaves_nothing(room: int, full_disk: Any) -> None:
    pipe = Counted([bytes(700_000)] * 8).cache_samples("kept")
    with full_disk(room), pytest.raises(CacheError, match="cannot be written: File too large, after") as caught:
        list(pipe)
    assert isinstance(caught.value.__cause__, OSError)
    traceback.clear_frames(caught.tb)
    assert os.listdir("kept") == []
    assert list(pipe) == list(pipe) == pipe.source.items


@leaves_nothing
@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_the_source_keeps_nothing(place: str | None) -> None:
    items = [1, 0]
    pipe = Counted(items).map(invert).cache_samples(place)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            list(pipe)
        assert place is None or os.listdir(place) == []
    items[1] = 2
    assert list(pipe) == list(pipe) == [1, 0.5]
    assert pipe.source.datapipe.reads == 6


def deadly(number: int) -> bytes:
    """Kill the process after it has written some of the samples."""
    if number == 100:
        os.kill(os.getpid(), signal.SIGKILL)
    return bytes(100_000)


def test_a_killed_process_leaves_no_valid_cache(forked: Callable[[Callable[[], object]], int | None]) -> None:
    assert forked(lambda: [*IterableWrapper(range(101)).map(deadly).cache_samples("kept")]) == -9
    (left,) = os.listdir("kept")
    assert left.endswith(".part")
    assert os.path.getsize(f"kept/{left}") > 0
    pipe = Counted([1, 2]).cache_samples("kept")
    assert list(pipe) == list(pipe) == [1, 2]
    assert os.listdir("kept") == ["part-00000-of-00001.samples"]
    assert pipe.source.reads == 2


@leaves_nothing
def test_two_processes_may_write_one_part_at_the_same_time() -> None:
    one, other = (iter(Counted([1, 2, 3]).cache_samples("kept")) for _ in range(2))
    assert [next(one), next(other)] == [1, 1]
    assert len(os.listdir("kept")) == 2
    assert [*one, *other] == [2, 3, 2, 3]
    assert os.listdir("kept") == ["part-00000-of-00001.samples"]
    again = Counted([1, 2, 3]).cache_samples("kept")
    assert list(again) == [1, 2, 3]
    assert again.source.reads == 0


@leaves_nothing
@pytest.mark.parametrize("place", PLACES)
def test_an_unpicklable_sample_is_named(place: str | None) -> None:
    pipe = Counted([{"__key__": "a/b", "lock": threading.Lock()}]).cache_samples(place)
    with pytest.raises(CacheError, match=r"cannot cache the sample 'a/b': pickling it raised TypeError: .*lock"):
        list(pipe)
    assert place is None or os.listdir(place) == []


def test_items_whose_part_is_unknown_are_refused() -> None:
    split = part_of(IterableWrapper(range(4)).sharding_filter(), 2, 0)
    for pipe, message in (
        (Splitter(), "because Splitter, which splits it, has no attribute"),
        (split.concat(IterableWrapper(range(4)).sharding_filter()), "split in different ways"),
    ):
        with pytest.raises(CacheError, match=message):
            list(pipe.cache_samples())
    here: Any = InMain(IterableWrapper(range(10)).sharding_filter())
    loader = DataLoader2(here.cache_samples(), reading_service=ShardReadingService(num_workers=2))
    with pytest.raises(CacheError, match="cannot cache the items of other processes") as caught:
        list(loader)
    traceback.clear_frames(caught.tb)
    loader.shutdown()
