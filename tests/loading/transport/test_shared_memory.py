"""Shared memory that is reused, and views of it that are safe to keep."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from wds_datapipes.loading.transport import shared_memory
from wds_datapipes.loading.transport.shared_memory import (
    SMALLEST,
    Segment,
    SegmentLender,
    SegmentPool,
    map_segment,
    new_memory,
)

MB = 1 << 20
SPARE = 3


class Pair:
    """A pool and the lender of its segments, as if in two processes."""

    def __init__(self, spare: int = SPARE) -> None:
        self.pool = SegmentPool()
        self.lender = SegmentLender(spare)
        self.filled = 0

    def lend(self, size: int) -> tuple[memoryview, int]:
        """Fill a segment, and return a view of it and the value of its bytes."""
        segment = self.pool.take(size)
        assert segment.memory.size >= size
        self.filled = (self.filled + 1) % 256
        segment.memory[:] = self.filled
        if (descriptor := segment.pass_on()) is not None:
            self.lender.add(segment.number, descriptor)
        return self.lender.lend(segment.number)[:size], self.filled

    def credit(self) -> int:
        """Report returned segments to the pool."""
        count = 0
        while self.lender.returned:
            self.pool.give_back(self.lender.returned.popleft())
            count += 1
        return count


#: The ways in which a part of an item may keep a reference to its memory.
FORMS: dict[str, Callable[[memoryview], Any]] = {
    "memoryview": lambda view: view,
    "part of a memoryview": lambda view: view[10:20],
    "cast": lambda view: view[:16].cast("Q").cast("B"),
    "array": lambda view: np.ndarray(len(view), np.uint8, view),
    "slice of an array": lambda view: np.ndarray(len(view), np.uint8, view)[5:50:3],
    "transposed array": lambda view: np.ndarray((2, len(view) // 2), np.uint8, view, order="F").T[:, 0],
    "array from a buffer": lambda view: np.frombuffer(view, np.uint8)[1:],
    "asarray": lambda view: np.asarray(view)[3:],
    "array of wide elements": lambda view: np.ndarray(4, "<u8", view).view(np.uint8),
    "structured array": lambda view: np.ndarray(4, [("a", "u1"), ("b", "u2")], view)["a"],
    "tensor": lambda view: torch.frombuffer(view, dtype=torch.uint8),
    "view of a tensor": lambda view: torch.frombuffer(view, dtype=torch.uint8)[3:30].reshape(3, 9).t()[1],
    "array of a tensor": lambda view: torch.frombuffer(view, dtype=torch.uint8).numpy()[1:9],
    "tensor of an array": lambda view: torch.from_numpy(np.ndarray(len(view), np.uint8, view)).view(torch.int8)[:4],
    "memoryview of a slice": lambda view: memoryview(np.ndarray(len(view), np.uint8, view)[7:]),
    "iterator": lambda view: iter(np.ndarray(len(view), np.uint8, view)[:3]),
}


def values(form: Any) -> set[int]:
    if hasattr(form, "__next__"):
        form = form.__reduce__()[1][0]  # memory that it iterates over
    return {int(value) % 256 for value in form[:: len(form) // 50 + 1]} | {int(form[-1]) % 256}


@pytest.mark.parametrize("form", FORMS)
def test_a_segment_is_lent_as_long_as_it_is_referenced(form: str) -> None:
    pair = Pair()
    view, value = pair.lend(100)
    kept = FORMS[form](view)
    del view
    assert len(pair.lender) == 1
    assert pair.credit() == 0
    for _ in range(3):
        pair.lend(100)
        pair.credit()
    assert values(kept) == {value}
    del kept
    assert len(pair.lender) == 0
    assert pair.credit() == 1


def test_views_end_in_many_threads_at_once() -> None:
    pair = Pair(spare=100)
    shares: list[list[memoryview]] = [[pair.lend(64)[0] for _ in range(10)] for _ in range(8)]
    threads = [threading.Thread(target=share.clear) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(pair.lender.returned) == list(range(80))
    assert len(pair.lender) == 0


# forked processes


def in_a_fork(act: Callable[[], object]) -> tuple[int, int]:
    """Run a function in a forked process once something is written to the pipe, and return its pid and the pipe."""
    begin, go = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.close(go)
            os.read(begin, 1)
            code = 0 if act() else 2
        finally:
            os._exit(code)
    os.close(begin)
    return pid, go


@pytest.mark.usefixtures("nothing_left")
def test_a_forked_process_keeps_the_segments_lent_at_the_fork() -> None:
    pair = Pair()
    lent = [pair.lend(1000) for _ in range(3)]
    pid, go = in_a_fork(lambda: all(values(view) == {value} for view, value in lent))
    lent.clear()
    assert pair.credit() == 3
    for _ in range(20):
        pair.lend(1000)
        pair.credit()
    os.close(go)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(pair.pool.segments) <= SPARE


# the system's view


def memory_maps() -> int:
    """Return the number of this package's shared memory segments that this process has mapped."""
    return len(re.findall(r"wds-datapipes", Path("/proc/self/maps").read_text()))


def resident(kind: str) -> int:
    """Return the size of this process's shared memory ("Shmem") or mapped files ("File"), in bytes."""
    found = re.search(rf"Rss{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.usefixtures("nothing_left")
def test_memory_is_shared_and_has_no_name() -> None:
    descriptor = new_memory(3 * MB)
    assert os.fstat(descriptor).st_size == 3 * MB
    assert os.fstat(descriptor).st_nlink == 0
    assert not os.get_inheritable(descriptor)
    assert "/memfd:" in os.readlink(f"/proc/self/fd/{descriptor}")
    here, there = map_segment(descriptor, 3 * MB), map_segment(descriptor, 3 * MB)
    os.close(descriptor)
    here[:] = 5
    assert set(there[::1000].tolist()) == {5}


def test_unneeded_segments_return_to_the_system() -> None:
    pair = Pair(spare=2)
    gc.collect()
    resident_before, maps_before = resident("Shmem"), memory_maps()
    lent = [pair.lend(MB) for _ in range(30)]
    assert all(view[-1] == value for view, value in lent)
    assert resident("Shmem") - resident_before >= 30 * MB
    assert memory_maps() - maps_before == 60  # here and there
    lent.clear()
    assert pair.credit() == 30
    assert memory_maps() - maps_before == 4
    assert resident("Shmem") - resident_before <= 5 * MB


def test_sizes_that_grow_do_not_leave_small_segments_behind() -> None:
    pair = Pair(spare=50)
    before = memory_maps()
    for size in range(SMALLEST, 40 * SMALLEST, SMALLEST):
        pair.lend(size)
        pair.credit()
    assert memory_maps() - before == 2


def test_the_last_segment_that_fits_is_taken() -> None:
    pool = SegmentPool()
    small, large, larger = pool.take(SMALLEST), pool.take(4 * SMALLEST), pool.take(8 * SMALLEST)
    for segment in (larger, large, small):
        os.close(segment.pass_on() or 0)
        pool.give_back(segment.number)
    assert pool.take(2 * SMALLEST) is large
    assert pool.take(10) is small
    assert pool.take(10) is larger


# out of memory


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("failing", ["ftruncate", "from_file"])
def test_unavailable_memory_leaves_no_descriptor(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("none left")

    monkeypatch.setattr(os if failing == "ftruncate" else torch, failing, fail)
    with pytest.raises(OSError, match="none left"):
        Segment(0, MB)


def test_a_system_without_such_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())  # a C library without this function
    with pytest.raises(NotImplementedError, match=r"require Linux 3\.17"):
        new_memory(MB)


@pytest.mark.usefixtures("nothing_left")
def test_an_error_of_the_c_library_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def memfd_create(name: bytes, flags: int) -> int:
            assert (name, flags) == (b"wds-datapipes", shared_memory.MFD_CLOEXEC)
            ctypes.set_errno(24)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Library)
    with pytest.raises(OSError, match="Too many open files"):
        new_memory(MB)
