"""ExternalSort: sorting more samples than memory holds, by runs in a temporary file."""

from __future__ import annotations

import io
import os
import resource
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_datapipes.errors import ShardWriteError, UnwritableSampleError
from wds_datapipes.prepare.reorder.external_sort import WINDOW_BYTES, ExternalSort
from wds_datapipes.prepare.reorder.sorted_runs import SortedRunFile, check_room
from wds_datapipes.types import Sample
from wds_datapipes.writing.tar_writer import TarWriter

#: What samples can be sorted by: values that can be compared with each other.
ORDERS = st.one_of(
    st.lists(st.integers()),
    st.lists(st.one_of(st.integers(), st.floats(allow_nan=False))),
    st.lists(st.binary(max_size=3)),
    st.lists(st.text(st.characters(), max_size=3)),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3))),
    st.lists(st.sampled_from([0, 1]), min_size=20, max_size=60),
)


def sample_of(number: int, *sizes: int) -> Sample:
    """A sample whose fields differ from those of all others."""
    fields = {f"f{at}.bin": number.to_bytes(4, "big") * (size // 4 + 1) for at, size in enumerate(sizes)}
    return {"__key__": f"{number}", "__url__": "x.tar", **fields}


def plain(sample: Sample) -> Sample:
    return {field: value for field, value in sample.items() if field != "__url__"}


@given(
    ORDERS,
    st.lists(st.integers(0, 20_000), max_size=3),
    st.one_of(st.integers(1, 20_000), st.just(10**9)),
    st.booleans(),
)
@settings(deadline=None)
def test_it_sorts_as_python_does(orders: list[Any], sizes: list[int], memory: int, reverse: bool) -> None:
    samples = [sample_of(number, *(number * size % 20_000 for size in sizes)) for number in range(len(orders))]
    with ExternalSort(memory_bytes=memory, reverse=reverse) as sorting:
        for order, sample in zip(orders, samples, strict=True):
            sorting.add(order, sample)
        found = [plain(sample) for sample in sorting.samples()]
    places = sorted(range(len(orders)), key=orders.__getitem__, reverse=reverse)
    assert found == [plain(samples[place]) for place in places]
    assert [list(sample) for sample in found] == [list(plain(samples[place])) for place in places]
    assert sorting.count == len(samples)


def test_runs_are_merged_in_levels_and_keep_what_is_equal_in_order() -> None:
    samples = [sample_of(number, 1000) for number in range(200)]
    with ExternalSort(memory_bytes=5000) as sorting:
        for number, sample in enumerate(samples):
            sorting.add(number % 3, sample)
        found = [int(sample["__key__"]) for sample in sorting.samples()]
    assert sorting.runs > 30  # and two at a time are merged, which takes five levels
    assert found == sorted(range(200), key=lambda number: number % 3)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, WINDOW_BYTES - 1, WINDOW_BYTES, 3 * WINDOW_BYTES + 5])
def test_fields_of_any_size_come_back_from_the_file(size: int) -> None:
    samples = [sample_of(number, size, 7, size) for number in range(6)]
    with ExternalSort(memory_bytes=1) as sorting:
        for number, sample in enumerate(samples):
            sorting.add(-number, sample)
        assert list(sorting.samples()) == [plain(sample) for sample in reversed(samples)]
    assert sorting.runs == 6


def test_large_samples_are_loaded_one_at_a_time(tmp_path: Path) -> None:
    """Sixteen runs begin with a sample of 8 MB each, of which one is in memory at a time."""
    size = 8 << 20
    with ExternalSort(memory_bytes=16 << 20, folder=tmp_path) as sorting:
        for number in range(32):
            sorting.add(number % 2, {"__key__": f"{number}", "bin": bytes(size)})
        tracemalloc.start()
        try:
            count = sum(len(sample["bin"]) == size for sample in sorting.samples())
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert count == 32
    assert sorting.runs == 32
    assert peak < 16 << 20 + 2 * size


def test_no_more_runs_are_read_side_by_side_than_memory_has_windows_for() -> None:
    with ExternalSort(memory_bytes=2 * WINDOW_BYTES) as sorting:
        for number in range(1200):
            sorting.add(number * 7919 % 1200, sample_of(number, 16_384))
        tracemalloc.start()
        try:
            found = [int(sample["__key__"]) * 7919 % 1200 for sample in sorting.samples()]
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert sorting.runs > 70
    assert found == sorted(found)
    assert peak < 35 * WINDOW_BYTES  # among them, a buffer for writing


def test_memory_is_counted_as_python_uses_it() -> None:
    """Small samples cost many times their bytes, which would be no bound."""
    memory = 1 << 20
    tracemalloc.start()
    try:
        with ExternalSort(memory_bytes=memory) as sorting:
            for number in range(10_000):
                sorting.add(number * 7919 % 10_007, {"__key__": f"{number:08d}", "cls": b"%d" % number})
            assert sum(1 for _ in sorting.samples()) == 10_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sorting.runs > 3
    assert memory / 2 < peak < 2 * memory + (5 << 20)  # and the keys that are remembered, and a buffer


def test_a_file_has_no_name_and_one_descriptor(tmp_path: Path, nothing_left: None) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with ExternalSort(memory_bytes=20_000, folder=tmp_path) as sorting:
        for number in range(100):
            sorting.add(-number, sample_of(number, 3000))
        stream = sorting.samples()
        next(stream)
        assert sorting.runs > 10
        assert list(tmp_path.iterdir()) == []
        assert len(os.listdir("/proc/self/fd")) == before + 1
        stream.close()  # type: ignore[attr-defined]  # it is a generator


def test_what_fits_needs_no_file(tmp_path: Path) -> None:
    with ExternalSort(memory_bytes=1 << 20, folder=tmp_path / "none") as sorting:
        for number in range(9):
            sorting.add(-number, sample_of(number, 10))
        assert [sample["__key__"] for sample in sorting.samples()] == list("876543210")
        assert sorting.runs == 0


def test_a_key_that_comes_twice_is_noticed_at_once() -> None:
    with ExternalSort(memory_bytes=1000) as sorting:
        for number in range(5):
            sorting.add(0, sample_of(number, 3))
        with pytest.raises(UnwritableSampleError, match=r"The sample '3' comes twice, the second time from x\.tar"):
            sorting.add(0, sample_of(3, 3))
        assert len(list(sorting.samples())) == 5


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``size`` bytes: writing more fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_told_with_its_folder(tmp_path: Path, nothing_left: None) -> None:
    told = rf"The temporary file in '{tmp_path}' cannot be written, after \d+ bytes: File too large"

    def fill(sorting: ExternalSort) -> None:
        for number in range(100):
            sorting.add(0, sample_of(number, 3000))

    sorting = ExternalSort(memory_bytes=20_000, folder=tmp_path)
    with sorting, files_of_at_most(100_000), pytest.raises(ShardWriteError, match=told):
        fill(sorting)
    with ExternalSort(memory_bytes=20_000, folder=tmp_path) as sorting:
        fill(sorting)
        with files_of_at_most(200_000), pytest.raises(ShardWriteError, match=told):  # when runs are merged
            list(sorting.samples())
    assert list(tmp_path.iterdir()) == []


def test_no_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(ShardWriteError, match="none' cannot be written, after 0 bytes: No such file or directory"):
        SortedRunFile(tmp_path / "none")
    with pytest.raises(ValueError, match="memory_bytes is a number of bytes, from 1, not 0"):
        ExternalSort(memory_bytes=0)


def test_room_is_what_all_folders_of_a_disk_need_together(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    (tmp_path / "a").mkdir()
    here, there = str(tmp_path), str(tmp_path / "a")
    check_room({here: 1, there: 1})
    with pytest.raises(ShardWriteError, match=rf"At least {3 * free} bytes will be written to '{here}', and the disk"):
        check_room({here: 3 * free})
    with pytest.raises(ShardWriteError, match=rf"bytes will be written to '{here}' and '{there}', and the disk has"):
        check_room({here: free * 3 // 4, there: free * 3 // 4})
    with pytest.raises(ShardWriteError, match=r"Nothing can be written to '.*none': No such file"):
        check_room({f"{tmp_path}/none": 0})


@given(
    st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=3), min_size=1, max_size=60), st.integers(1, 100_000)
)
@settings(deadline=None)
def test_a_file_is_no_larger_than_the_archive_of_its_samples(sizes: list[list[int]], memory: int) -> None:
    ends: list[int] = []
    write = SortedRunFile.write

    def noting(file: SortedRunFile, items: Any) -> Any:
        run = write(file, items)
        ends.append(run.end)
        return run

    with pytest.MonkeyPatch.context() as patch, ExternalSort(memory_bytes=memory) as sorting:
        patch.setattr(SortedRunFile, "write", noting)
        samples = [sample_of(number, *fields) for number, fields in enumerate(sizes)]
        for number, sample in enumerate(samples):
            sorting.add(number % 7, sample)
        assert len(list(sorting.samples())) == len(sizes)
    with TarWriter(io.BytesIO(), encoder=False) as shard:
        for sample in samples:
            shard.write(sample)
    assert max(ends, default=0) <= shard.size


@given(st.lists(st.lists(st.integers(0, 9000), max_size=3), min_size=1, max_size=12), st.data())
@settings(deadline=None)
def test_what_is_read_in_windows_is_what_was_written(sizes: list[list[int]], data: st.DataObject) -> None:
    """Fields end at, before and behind the end of a window, and some are larger than it."""
    samples = [sample_of(number, *fields) for number, fields in enumerate(sizes)]
    middle = data.draw(st.integers(0, len(samples)))
    file = SortedRunFile()
    try:
        runs = [
            file.write((number, sample) for number, sample in enumerate(part))
            for part in (samples[:middle], samples[middle:])
        ]
        found = [waiting.load() for run in runs for _, waiting in file.read(run, 4096)]
    finally:
        file.close()
    assert found == [plain(sample) for sample in samples]


def test_a_file_that_lacks_something_is_told(nothing_left: None) -> None:
    """As by a failing disk: nothing shorter may come out, also where the samples go on to another file."""
    short, other = SortedRunFile(), SortedRunFile()
    try:
        run = short.write((number, sample_of(number, 5000)) for number in range(9))
        os.ftruncate(short._stream.fileno(), 18_000)
        samples = ((order, waiting.load()) for order, waiting in short.read(run, 4096))
        with pytest.raises(ShardWriteError, match=r"cannot be read, after \d+ bytes: it ends at byte 18000"):
            other.write(samples)
    finally:
        short.close()
        other.close()
