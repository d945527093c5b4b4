"""The thread that copies items into page-locked memory, one ahead of the loop."""

from __future__ import annotations

import gc
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import IterDataPipe
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper

from wds_datapipes import ShardReadingService
from wds_datapipes.loading.service.pinning import MemoryPinner, pin_memory_of
from wds_datapipes.loading.workers.connection import is_abandoned

#: Anything that takes longer than this counts as a hang, in seconds.
LIMIT_S = 300


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pin-memory"]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    gc.collect()
    for thread in threads():
        thread.join(LIMIT_S)
    assert threads() == []


def same(item: Any) -> Any:
    return item


class Stepwise(IterDataPipe[int]):
    """Yields each number after it is released; records how many were begun."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.begun = 0
        self.steps = threading.Semaphore(0)
        self.asked = threading.Semaphore(0)

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            self.begun += 1
            self.asked.release()
            assert self.steps.acquire(timeout=LIMIT_S)
            yield number


class Failing(IterDataPipe[int]):
    """Raises after some numbers."""

    def __init__(self, count: int, error: BaseException) -> None:
        self.count, self.error = count, error

    def __iter__(self) -> Iterator[int]:
        yield from range(self.count)
        raise self.error


def test_one_item_is_made_ahead() -> None:
    source = Stepwise(5)
    iterator = iter(MemoryPinner(source, same))
    for number in range(5):
        source.steps.release()
        assert next(iterator) == number
        if number < 4:
            assert source.asked.acquire(timeout=LIMIT_S)  # of this item
            assert source.asked.acquire(timeout=LIMIT_S)  # and of the next one, while the loop works
            source.asked.release()
            assert source.begun == number + 2
    assert next(iterator, None) is None


class Waiting(IterDataPipe[int]):
    """Yields a number, and then waits, like a stage that reads from a worker, until the loop is left."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def __iter__(self) -> Iterator[int]:
        yield 0
        self.asked.set()
        deadline = time.monotonic() + LIMIT_S
        while not is_abandoned():
            assert time.monotonic() < deadline


def test_a_waiting_source_notices_that_the_loop_was_left() -> None:
    source = Waiting()
    iterator = iter(MemoryPinner(source, same))
    assert next(iterator) == 0
    assert source.asked.wait(LIMIT_S)
    iterator.close()  # type: ignore[attr-defined]  # no_thread_left waits for the thread


def test_ctrl_c_at_the_start_of_the_thread_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iter(MemoryPinner(IterableWrapper(range(3)), same)))
    for thread in threads():
        thread.join(LIMIT_S)


@pytest.mark.parametrize(("count", "error"), [(0, LookupError("broken")), (5, KeyboardInterrupt("broken"))])
def test_an_error_of_the_source_is_raised_at_its_position(count: int, error: BaseException) -> None:
    iterator = iter(MemoryPinner(Failing(count, error), same))
    assert [next(iterator) for _ in range(count)] == list(range(count))
    with pytest.raises(type(error), match="broken") as caught:
        next(iterator)
    assert caught.value is error
    assert next(iterator, None) is None


@pytest.mark.parametrize("place", [0, 4])
def test_an_error_of_the_function_is_raised_at_its_position(place: int) -> None:
    def fail(number: int) -> int:
        return number if number != place else 1 // 0

    iterator = iter(MemoryPinner(IterableWrapper(range(10)), fail))
    assert [next(iterator) for _ in range(place)] == list(range(place))
    with pytest.raises(ZeroDivisionError):
        next(iterator)


class Big:
    """An object that records its deletion."""


def test_no_item_is_kept_after_it_is_taken_or_prefetched() -> None:
    made: list[weakref.ref[Big]] = []

    def make(_: int) -> Big:
        big = Big()
        made.append(weakref.ref(big))
        return big

    iterator = iter(MemoryPinner(IterableWrapper(range(5)), make))
    next(iterator)
    next(iterator)
    assert made[0]() is None
    while len(made) < 3:  # one ahead
        time.sleep(0.001)
    del iterator
    for thread in threads():
        thread.join(LIMIT_S)
    assert [each() for each in made] == [None] * 3


def test_a_caught_error_keeps_nothing_alive() -> None:
    def fail(item: Big) -> Big:
        raise LookupError("broken")

    def read(big: Big) -> None:
        with pytest.raises(LookupError, match="broken"):
            list(MemoryPinner(IterableWrapper([big], deepcopy=False), fail))

    big = Big()
    gone = weakref.ref(big)
    gc.collect()
    gc.disable()
    try:
        read(big)
        del big
        assert gone() is None
    finally:
        gc.enable()


# with the service


def tensors(number: int) -> dict[str, Any]:
    return {"number": number, "tensor": torch.full((3, 100, 100), number), "array": np.full(9, number)}


@pytest.mark.parametrize("workers", [0, 2])
def test_without_cuda_it_warns_once_and_still_reads_and_with_it_tensors_are_pinned(workers: int) -> None:
    service = ShardReadingService(workers, pin_memory=True)
    pipe = IterableWrapper(range(30)).sharding_filter().map(tensors)
    with DataLoader2(pipe, reading_service=service) as loader, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epochs = [list(loader) for _ in range(2)]
    has_cuda = torch.cuda.is_available()
    messages = [] if has_cuda else ["pin_memory=True has no effect, because CUDA is not available"]
    assert [str(each.message)[: len(message)] for each, message in zip(caught, messages, strict=True)] == messages
    for epoch in epochs:
        assert [item["number"] for item in epoch] == list(range(30))
        assert all((item["tensor"] == item["number"]).all() for item in epoch)
        assert all((item["array"] == item["number"]).all() for item in epoch)
        assert all(item["tensor"].is_pinned() == has_cuda for item in epoch)
    assert threads() == []


class Pair(NamedTuple):
    """A sample as the loop uses it."""

    image: torch.Tensor
    names: list[str]


class Custom:
    """Pins itself."""

    def __init__(self) -> None:
        self.is_pinned = False

    def pin_memory(self) -> Custom:
        self.is_pinned = True
        return self


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA, the test below pins real memory")
def test_items_keep_their_types_and_the_thread_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of torch that need CUDA are replaced, because the test only concerns which objects are copied."""
    devices, originals = set(), set()

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        originals.add(tensor.data_ptr())
        return tensor.clone()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.add((device, threading.current_thread().name)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", copied)
    tensor, array = torch.arange(5), np.arange(5)
    item = {"pair": Pair(tensor, ["a"]), "list": [tensor, b"bytes"], "array": array, "own": Custom(), "none": None}
    (got,) = pin_memory_of(IterableWrapper([item], deepcopy=False))
    assert type(got["pair"]) is Pair
    assert torch.equal(got["pair"].image, tensor)
    assert (got["pair"].names, got["list"][1], got["none"]) == (["a"], b"bytes", None)
    assert torch.equal(got["list"][0], tensor)
    assert np.array_equal(got["array"], array)
    assert got["own"].is_pinned
    assert originals == {tensor.data_ptr()}
    assert got["pair"].image.data_ptr() not in originals
    assert devices == {(3, "pin-memory")}


@pytest.fixture
def pinning_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the thread run even without CUDA, where it copies tensors into ordinary memory."""

    def copied(item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "tensor": item["tensor"].clone()}

    monkeypatch.setattr(
        "wds_datapipes.loading.service.service.pin_memory_of", lambda source: MemoryPinner(source, copied)
    )


@pytest.mark.usefixtures("pinning_anyway", "nothing_left")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_thread_reads_from_workers(workers: int) -> None:
    service = ShardReadingService(workers, pin_memory=True)
    with DataLoader2(IterableWrapper(range(300)).sharding_filter().map(tensors), reading_service=service) as loader:
        for taken in (0, 1, 7, 300):
            items = [item for item, _ in zip(loader, range(taken), strict=False)]
            assert [item["number"] for item in items] == list(range(taken))
            assert all((item["tensor"] == item["number"]).all() for item in items)
        iterator = iter(loader)
        begun = [next(iterator)["number"] for _ in range(5)]
        if workers:  # without any, there is nothing to pause
            loader._pause()
            loader._resume()
        assert begun + [item["number"] for item in iterator] == list(range(300))
