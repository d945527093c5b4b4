"""The shuffle yields each item once, stays within its bounds, and repeats its order for the same seed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from wds_datapipes import MockSamples
from wds_datapipes.samples.shuffling import BUFFER_SIZE, ShuffleState, nbytes, shuffle_samples


def shuffled(
    items: Any, buffer_size: int, *, initial: int | None = None, max_bytes: int | None = None, seed: int = 0
) -> list[Any]:
    return list(
        shuffle_samples(
            items,
            rng=Random(seed),
            buffer_size=buffer_size,
            state=ShuffleState(buffer_size if initial is None else initial),
            max_bytes=max_bytes,
        )
    )


BUFFERS = st.integers(1, 40).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))


@given(count=st.integers(0, 100), buffer=BUFFERS, seed=st.integers(0, 9), max_bytes=st.none() | st.integers(0, 400))
@settings(deadline=None, max_examples=100)
def test_each_item_comes_once_and_the_seed_decides_the_order(
    count: int, buffer: tuple[int, int], seed: int, max_bytes: int | None
) -> None:
    items = [bytes([number]) * (number % 17) + bytes([number]) for number in range(count)]
    order = shuffled(items, buffer[0], initial=buffer[1], max_bytes=max_bytes, seed=seed)
    assert sorted(order) == sorted(items)
    assert order == shuffled(items, buffer[0], initial=buffer[1], max_bytes=max_bytes, seed=seed)


def followed(buffer_size: int, initial: int, max_bytes: int | None, sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Return the numbers of buffered items and bytes whenever another item is requested."""
    held: list[bytes] = []
    states: list[tuple[int, int]] = []

    def source() -> Iterator[bytes]:
        for size in sizes:
            states.append((len(held), sum(map(len, held))))
            item = bytes(size)
            held.append(item)
            yield item

    state = ShuffleState(initial)
    for item in shuffle_samples(source(), rng=Random(1), buffer_size=buffer_size, state=state, max_bytes=max_bytes):
        held.remove(item)
    assert held == []
    yield from states


@given(buffer=BUFFERS, max_bytes=st.none() | st.integers(0, 300), sizes=st.lists(st.integers(0, 100), max_size=100))
@settings(deadline=None, max_examples=100)
def test_it_never_holds_more_than_its_bounds(buffer: tuple[int, int], max_bytes: int | None, sizes: list[int]) -> None:
    for count, size in followed(*buffer, max_bytes, sizes):
        assert count < buffer[0]
        assert max_bytes is None or size <= max_bytes


def test_after_initial_the_buffer_grows_by_one_per_item_until_it_is_full() -> None:
    counts = [count for count, _ in followed(6, 3, None, [1] * 20)]
    assert counts == [0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5]


def test_the_order_of_a_seed_never_changes() -> None:
    """A change here changes the order of every user's training runs."""
    assert shuffled(range(12), 5, initial=2, seed=17) == [1, 3, 5, 2, 6, 8, 9, 0, 11, 7, 4, 10]


def test_yielded_items_are_not_kept_alive() -> None:
    class Item:
        pass

    alive: list[weakref.ref[Item]] = []

    def make() -> Item:
        item = Item()
        alive.append(weakref.ref(item))
        return item

    source = (make() for _ in range(100))
    for item in shuffle_samples(source, rng=Random(0), buffer_size=4, state=ShuffleState(4), max_bytes=None):
        del item
        assert sum(item() is not None for item in alive) <= 3
    assert len(alive) == 100


@pytest.mark.parametrize(
    ("make", "least", "most"),
    [
        (lambda: bytes(1000), 1000, 1000),
        (lambda: memoryview(bytes(1000)), 1000, 1000),
        (lambda: np.zeros((10, 10), np.float32), 400, 400),
        (lambda: torch.zeros(10, 10), 400, 400),
        (lambda: Image.new("RGB", (20, 10)), 600, 600),
        (lambda: {"__key__": "a", "jpg": bytes(1000), "txt": "é" * 100}, 1100, 1600),
        (lambda: [bytes(10), (bytes(20), {"x": bytes(30)})], 60, 60),
        (lambda: 3, 48, 48),
        (lambda: None, 1, 100),
    ],
)
def test_the_size_of_a_value(make: Callable[[], object], least: int, most: int) -> None:
    assert least <= nbytes(make()) <= most


def test_the_buffer_has_a_default_size() -> None:
    shuffler: Any = MockSamples({"txt": "a"}, length=3).shuffle_samples()
    assert shuffler.initial == BUFFER_SIZE
    assert len(list(shuffler)) == 3
