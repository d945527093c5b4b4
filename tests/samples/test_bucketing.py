"""`bucket_samples`: batches of samples of similar length."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from error_facts import naming
from hypothesis import given
from hypothesis import strategies as st
from resumed_buffer import check_buffer_resumes
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes import ErrorBudget
from wds_datapipes.errors import SampleSizeError
from wds_datapipes.samples.bucketing import LengthBuckets, bucket_samples
from wds_datapipes.samples.position_buffer import SampleBuffer
from wds_datapipes.shards.position import SamplePosition

LENGTHS = st.lists(st.integers(0, 20), max_size=60)
BOUNDARIES = st.none() | st.sets(st.integers(1, 25), max_size=4).map(sorted)
LIMITS = st.tuples(st.none() | st.integers(1, 5), st.none() | st.integers(20, 60)).filter(any)


def numbered(lengths: list[int]) -> list[tuple[int, int]]:
    return list(enumerate(lengths))


def length_of(sample: tuple[int, int]) -> int:
    return sample[1]


def run(
    buckets: LengthBuckets, drop_last: bool = False
) -> Callable[[Iterator[Any], SampleBuffer, Callable[[], SamplePosition] | None], Iterator[Any]]:
    def start(source: Iterator[Any], buffer: SampleBuffer, position: Any) -> Iterator[Any]:
        return bucket_samples(
            source,
            buckets,
            length_of=length_of,
            drop_last=drop_last,
            on_error="raise",
            buffer=buffer,
            position=position,
        )

    return start


@given(LENGTHS, BOUNDARIES, LIMITS)
def test_each_sample_is_in_one_batch_of_its_bucket_which_takes_as_many_in_their_order_as_fit(
    lengths: list[int], boundaries: list[int] | None, limits: tuple[int | None, int | None]
) -> None:
    batch_size, max_tokens = limits
    buckets = LengthBuckets(boundaries, batch_size, max_tokens)
    batches = list(run(buckets)(iter(numbered(lengths)), SampleBuffer(), None))
    assert sorted(sample for batch in batches for sample in batch) == numbered(lengths)
    for batch in batches:
        assert batch == sorted(batch)
        assert len({buckets.number(length) for _, length in batch}) == 1
        assert batch_size is None or len(batch) <= batch_size
        assert max_tokens is None or len(batch) * max(length for _, length in batch) <= max_tokens
    for number in {buckets.number(length) for length in lengths}:
        own = [batch for batch in batches if buckets.number(batch[0][1]) == number]
        assert [sample for batch in own for sample in batch] == [
            sample for sample in numbered(lengths) if buckets.number(sample[1]) == number
        ]
        for batch, following in itertools.pairwise(own):
            longest = max(length for _, length in [*batch, following[0]])
            assert not buckets.fits(len(batch) + 1, longest)


@given(LENGTHS, BOUNDARIES, LIMITS)
def test_drop_last_drops_the_batches_of_the_end_which_are_not_full_and_come_from_short_to_long(
    lengths: list[int], boundaries: list[int] | None, limits: tuple[int | None, int | None]
) -> None:
    buckets = LengthBuckets(boundaries, *limits)
    batches = list(run(buckets)(iter(numbered(lengths)), SampleBuffer(), None))
    kept = list(run(buckets, drop_last=True)(iter(numbered(lengths)), SampleBuffer(), None))
    assert batches[: len(kept)] == kept
    rest = [buckets.number(batch[0][1]) for batch in batches[len(kept) :]]
    assert rest == sorted({*rest})


@given(LENGTHS, BOUNDARIES, LIMITS, st.booleans())
def test_reading_the_held_samples_again_resumes_with_the_same_batches(
    lengths: list[int], boundaries: list[int] | None, limits: tuple[int | None, int | None], drop_last: bool
) -> None:
    buckets = LengthBuckets(boundaries, *limits)
    most = None if limits[0] is None else limits[0] * (len(boundaries or range(14)) + 1)
    check_buffer_resumes(run(buckets, drop_last), numbered(lengths), most=most)


def test_samples_without_tokens_fill_batches_too() -> None:
    batches = list(IterableWrapper([""] * 7).bucket_samples(len, max_tokens=3))
    assert [len(batch) for batch in batches] == [3, 3, 1]


@pytest.mark.parametrize(
    ("value", "length"),
    [*((3, 3), (b"abc", 3), (np.int16(6), 6)), *((np.zeros((5, 2)), 5), (torch.zeros(4), 4), (torch.tensor(7), 7))],
)
def test_the_length_of_a_field_is_its_number_or_its_len(value: Any, length: int) -> None:
    pipe = IterableWrapper([{"__key__": "a", "x": value}])
    assert len(list(pipe.bucket_samples("x", max_tokens=length))) == 1
    with pytest.raises(SampleSizeError, match=naming("'a'", length, f"max_tokens={length - 1}")):
        list(pipe.bucket_samples("x", max_tokens=length - 1))


@pytest.mark.parametrize("value", [2.0, -1, None, True, torch.tensor(1.5)])
def test_a_length_that_is_not_a_count_is_an_error_that_names_the_sample(value: Any) -> None:
    samples = IterableWrapper([{"__key__": "a", "__url__": "a.tar", "x": value}], deepcopy=False)
    with pytest.raises(
        SampleSizeError, match=r"the field 'x' of .* the length .* for the sample 'a' of a\.tar, .* integer"
    ):
        list(samples.bucket_samples("x", batch_size=2))
    with pytest.raises(SampleSizeError, match=r"^length of bucket_samples gives"):
        list(samples.bucket_samples(lambda sample: sample["x"], batch_size=2))


def test_on_error_skips_and_counts_samples_that_are_too_long_or_have_no_length() -> None:
    samples = [{"__key__": str(n), "x": n} for n in (1, 9, 2, -3)] + [{"__key__": "none"}]
    stage = IterableWrapper(samples).bucket_samples("x", max_tokens=4, boundaries=[4], on_error="skip")
    assert [[sample["x"] for sample in batch] for batch in stage] == [[1, 2]]
    counts = {"bucket_samples: SampleSizeError": 2, "bucket_samples: MissingFieldError": 1}
    assert stage.counters.skipped().counts == counts
    budget = ErrorBudget(max_errors=1, warn=False)
    with pytest.raises(Exception, match="bucket_samples skipped 2 of 4 items"):
        list(IterableWrapper(samples).bucket_samples("x", max_tokens=4, on_error=budget))
