"""A stage is iterated as torch iterates it: the same items, counts, errors, profiles and snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.utils.snapshot import _simple_graph_snapshot_restoration

from wds_datapipes import Stage


class Generator(Stage[int]):
    is_stateless = True

    def __iter__(self) -> Iterator[int]:
        yield from range(5)


class Returned(Stage[int]):
    is_stateless = True

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Own(Stage[int]):
    """Is its own iterator."""

    is_stateless = True

    def reset(self) -> None:
        self.items = iter(range(5))

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return next(self.items)


KINDS = pytest.mark.parametrize("kind", [Generator, Returned, Own])


@KINDS
def test_it_yields_and_counts_all_items_in_each_iteration(kind: type[Any]) -> None:
    pipe = kind()
    for _ in range(3):
        assert [pipe._number_of_samples_yielded for _ in pipe] == [1, 2, 3, 4, 5]
    next(iter(pipe))
    assert (pipe._number_of_samples_yielded, list(pipe)) == (1, [0, 1, 2, 3, 4])


@pytest.mark.parametrize("kind", [Generator, Returned])
def test_a_second_iteration_ends_the_first(kind: type[Any]) -> None:
    pipe = kind()
    first, second = iter(pipe), iter(pipe)
    assert (next(first), next(second), next(second)) == (0, 0, 1)
    with pytest.raises(RuntimeError, match=f"This iteration of {kind.__name__} has ended, since another one has begun"):
        next(first)
    assert list(second) == [2, 3, 4]


@KINDS
def test_the_profiler_names_the_stage(kind: type[Any]) -> None:
    with torch.profiler.profile() as profile:
        assert list(kind()) == [0, 1, 2, 3, 4]
    # torch opens a range for the end of the items, too.
    assert [event.count for event in profile.key_averages() if event.key.startswith(kind.__name__)] in ([6], [5])


@KINDS
def test_torch_continues_from_a_snapshot(kind: type[Any]) -> None:
    pipe: IterDataPipe[int] = kind()
    _simple_graph_snapshot_restoration(pipe, 2)
    assert list(pipe) == [2, 3, 4]
    assert list(pipe) == [0, 1, 2, 3, 4]
