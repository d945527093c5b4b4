"""Functions of whole streams."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardReadingService


def times(numbers: Iterator[int], factor: int) -> Iterator[int]:
    for number in numbers:
        yield factor * number


def neighbours(numbers: Iterator[int]) -> Iterator[tuple[int, int]]:
    before = next(numbers, None)
    for number in numbers:
        if before is not None:
            yield before, number
        before = number


def test_functions_are_applied_in_their_order() -> None:
    pipe = IterableWrapper([1, 2, 3]).compose(partial(times, factor=10), neighbours)
    for _ in range(2):
        assert list(pipe) == [(10, 20), (20, 30)]


def test_a_function_may_return_any_iterable_and_be_a_lambda() -> None:
    assert list(IterableWrapper([3, 1, 2]).compose(lambda numbers: sorted(numbers))) == [1, 2, 3]
    assert list(IterableWrapper([3, 1, 2]).compose(sorted, lambda numbers: list(numbers)[:1])) == [1]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_functions_run_in_workers(workers: int) -> None:
    pipe = IterableWrapper(range(10)).sharding_filter().compose(partial(times, factor=2))
    with DataLoader2(pipe, reading_service=ShardReadingService(workers)) as loader:
        assert list(loader) == [2 * number for number in range(10)]


def test_functions_run_in_a_worker_of_torch() -> None:
    pipe = IterableWrapper(range(10)).compose(partial(times, factor=2))
    assert list(DataLoader(pipe, batch_size=None, num_workers=1)) == [2 * number for number in range(10)]


def test_an_interrupted_iterator_is_closed() -> None:
    closed: list[str] = []

    def watched(name: str, numbers: Iterator[int]) -> Iterator[int]:
        try:
            yield from numbers
        finally:
            closed.append(name)

    iterator = iter(IterableWrapper(range(10)).compose(partial(watched, "inner"), partial(watched, "outer")))
    assert next(iterator) == 0
    del iterator
    gc.collect()
    assert sorted(closed) == ["inner", "outer"]


@pytest.mark.parametrize("returned", [None, 3])
def test_a_function_that_does_not_return_an_iterable_is_named(returned: Any) -> None:
    def wrong(numbers: Iterator[int]) -> Any:
        return returned

    with pytest.raises(TypeError, match=f"wrong.* must return an iterable, but returned {returned}"):
        list(IterableWrapper([1]).compose(wrong))


def test_a_type_error_within_a_function_is_unchanged() -> None:
    def broken(numbers: Iterator[Any]) -> Iterator[Any]:
        for number in numbers:
            yield number + "a"

    with pytest.raises(TypeError, match="unsupported operand"):
        list(IterableWrapper([1]).compose(broken))
