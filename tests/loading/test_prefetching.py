from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from torchdata.datapipes.iter import IterableWrapper, PinMemory, Prefetcher
from torchdata.datapipes.iter.util.prefetcher import _PrefetchData

from wds_datapipes.errors import WorkerDiedError
from wds_datapipes.loading.workers.connection import is_abandoned


class Failing:
    def __init__(self, error: BaseException, *, at_once: bool = False) -> None:
        self.error, self.at_once = error, at_once

    def __iter__(self) -> Iterator[int]:
        if self.at_once:
            raise self.error
        return self.numbers()

    def numbers(self) -> Iterator[int]:
        yield 1
        raise self.error


class Watched(deque[Any]):
    """A buffer that records whether its thread had already reported its end when an item was appended."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data, self.late = data, []  # type: ignore[var-annotated]  # a list of what came late

    def append(self, item: Any) -> None:
        super().append(item)
        if self.data.stop_iteration and not isinstance(item, StopIteration):
            self.late.append(item)


@pytest.mark.parametrize("at_once", [False, True])
def test_an_error_is_in_the_buffer_before_the_thread_reports_its_end(at_once: bool) -> None:
    data = _PrefetchData(Failing(LookupError("no shard"), at_once=at_once), 10)
    data.prefetch_buffer = buffer = Watched(data)
    Prefetcher.thread_worker(data)
    assert [type(item) for item in buffer] == [*[int] * (not at_once), LookupError, StopIteration]
    assert buffer.late == []


def test_an_exit_reaches_the_reader_as_an_error() -> None:
    pipe = IterableWrapper(Failing(SystemExit(3)), deepcopy=False).prefetch(2)
    with pytest.raises(WorkerDiedError, match=r"raised SystemExit\(3\) in a prefetch thread") as caught:
        list(pipe)
    assert isinstance(caught.value.__cause__, SystemExit)


def test_a_thread_learns_that_its_buffer_is_abandoned() -> None:
    seen = []

    def give_up() -> Iterator[int]:
        seen.append(is_abandoned())
        data.stop_iteration = True
        data.run_prefetcher = False
        seen.append(is_abandoned())
        yield 1

    data = _PrefetchData(give_up(), 10)
    Prefetcher.thread_worker(data)
    assert [*seen, is_abandoned()] == [False, True, False]


def test_pinning_threads_are_guarded_too() -> None:
    data = _PrefetchData(Failing(LookupError("no shard")), 10)
    PinMemory.thread_worker(data, lambda item, device: item, None)
    assert [type(item) for item in data.prefetch_buffer] == [int, LookupError, StopIteration]
