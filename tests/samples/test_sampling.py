"""Parts of a stream: the items that pass, and how much of the source is read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from wds_datapipes.samples.sampling import parse_slice, rsample, slice_samples
from wds_datapipes.shards.held_samples import ItemCounter

NUMBERS = st.none() | st.integers(0, 12)
POSITIONS = (
    st.tuples(NUMBERS) | st.tuples(NUMBERS, NUMBERS) | st.tuples(NUMBERS, NUMBERS, st.integers(1, 5) | st.none())
)


class Source:
    """Counts the items read from it, and records that it was closed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read = 0
        self.closed = False

    def __iter__(self) -> Iterator[int]:
        try:
            for number in range(self.count):
                self.read += 1
                yield number
        finally:
            self.closed = True


@given(count=st.integers(0, 15), positions=POSITIONS)
def test_a_slice_is_that_of_islice_and_reads_no_more_than_it_needs(
    count: int, positions: tuple[int | None, ...]
) -> None:
    source = Source(count)
    expected = list(itertools.islice(range(count), *positions))
    states = []
    sliced = []
    for item in slice_samples(source, *parse_slice(positions), counter=ItemCounter()):
        sliced.append(item)
        states.append((source.read, source.closed))
    assert sliced == expected
    start, stop, step = parse_slice(positions)
    wanted = range(start, count if stop is None else stop, step)
    if stop is None or not wanted or wanted[-1] >= count:
        assert source.read == (count if stop is None or wanted else 0)
    else:
        assert source.read == wanted[-1] + 1
        assert states[-1] == (wanted[-1] + 1, True), "it is closed when the last item leaves"
    assert [read for read, _ in states] == [item + 1 for item in sliced]


def test_a_slice_of_an_iterator_without_close() -> None:
    assert list(slice_samples([1, 2, 3], 0, 2, 1, counter=ItemCounter())) == [1, 2]
    assert list(itertools.islice(slice_samples(itertools.count(), 1, None, 2, counter=ItemCounter()), 3)) == [1, 3, 5]


@given(count=st.integers(0, 200), p=st.floats(0, 1), seed=st.integers(0, 5))
def test_a_random_part_is_a_part_and_the_seed_decides_which(count: int, p: float, seed: int) -> None:
    drawn = list(rsample(range(count), p, rng=Random(seed), counter=ItemCounter()))
    assert drawn == list(rsample(range(count), p, rng=Random(seed), counter=ItemCounter()))
    chances = Random(seed)
    assert drawn == [number for number in range(count) if chances.random() < p]
