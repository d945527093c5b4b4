"""Positions packed as text are unpacked unchanged; in a shuffle buffer, they take at most six bytes each."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_datapipes.shards.packed_rows import MIN_ROWS, pack_rows, unpack_rows

NUMBERS = st.integers(-(1 << 62), 1 << 62)


def buffer_of(size: int, *, sample_bytes: int, seed: int = 0) -> list[list[int]]:
    """Return the positions in a full shuffle buffer, from shards of 1,000 samples of similar sizes."""
    rng, rows, start = Random(seed), list[list[int]](), 0
    for number in range(6 * size):
        shard, place = divmod(number, 1000)
        start = start if place else 0
        end = start + 1536 + 512 * round(rng.lognormvariate(0, 0.5) * sample_bytes / 512)
        rows.append([shard, start, -1 if place == 999 else end])
        start = end
        if len(rows) > size:
            slot = rng.randrange(len(rows))
            rows[slot] = rows[-1]
            rows.pop()
    return rows


@given(
    width=st.integers(0, 3),
    unit=st.sampled_from([1, 512]),
    positions=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1 << 40), st.integers(0, 1 << 30))),
    data=st.data(),
)
def test_positions_come_back_in_their_order(width: int, unit: int, positions: Any, data: st.DataObject) -> None:
    rows = [
        [
            shard,
            start * unit,
            (start + size) * unit if size else -1,
            *data.draw(st.tuples(*[st.integers(0, 99)] * width)),
        ]
        for shard, start, size in positions
    ]
    packed = pack_rows(rows)
    assert isinstance(packed, str) == (len(rows) >= MIN_ROWS)
    assert unpack_rows(packed) == rows


@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=4), max_size=40))
def test_other_numbers_come_back_too(rows: list[list[int]]) -> None:
    assert unpack_rows(pack_rows(rows)) == rows


@pytest.mark.parametrize("sample_bytes", [1_000, 100_000, 1_000_000])
@pytest.mark.parametrize("size", [500, 3000])
def test_a_shuffle_buffer_takes_six_bytes_a_sample(size: int, sample_bytes: int) -> None:
    rows = buffer_of(size, sample_bytes=sample_bytes)
    packed = pack_rows(rows)
    assert unpack_rows(packed) == rows
    assert len(packed) <= 6 * size


def test_positions_of_several_sources_are_as_small() -> None:
    """A mixture numbers the shards of each source from 0."""
    rows = [[*row, source, 0] for source in range(3) for row in buffer_of(500, sample_bytes=100_000, seed=source)]
    Random(0).shuffle(rows)
    packed = pack_rows(rows)
    assert unpack_rows(packed) == rows
    assert len(packed) <= 6 * len(rows)
