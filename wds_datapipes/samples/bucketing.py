"""Batches of samples of similar length."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeAlias, TypeVar

from wds_datapipes.arguments import check_integer
from wds_datapipes.errors import SampleSizeError
from wds_datapipes.on_error.policy import ErrorPolicy, OnError, note
from wds_datapipes.samples.fields import describe_sample, missing_field_error, not_a_sample_error
from wds_datapipes.samples.position_buffer import SampleBuffer
from wds_datapipes.shards.position import SamplePosition

T = TypeVar("T")

Length: TypeAlias = str | Callable[[Any], int]
"""The name of a field, or a function that returns the length of a sample."""


@dataclass(frozen=True)
class LengthBuckets:
    """Determines which samples share a bucket, and how many of them form a batch.

    Args:
        boundaries: the longest length of each bucket, in ascending order; longer samples share another bucket. None
            means four buckets between powers of two: 1, 2, ..., 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, and so on.
        batch_size: the maximum number of samples in a batch.
        max_tokens: the maximum number of tokens in a padded batch: the longest length times the number of samples.

    Raises:
        TypeError: a boundary is not an integer.
        ValueError: there is no limit, a boundary is negative, or the boundaries are not in ascending order.

    Examples:
        >>> buckets = LengthBuckets(batch_size=8)
        >>> [buckets.number(length) for length in (0, 1, 2, 8, 9, 10, 16, 17, 100)]
        [1, 1, 2, 8, 10, 10, 16, 20, 112]
        >>> [LengthBuckets((2, 5), batch_size=8).number(length) for length in (0, 2, 3, 5, 6)]
        [0, 0, 1, 1, 2]
    """

    boundaries: Sequence[int] | None = None
    batch_size: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size is None and self.max_tokens is None:
            raise ValueError("bucket_samples needs batch_size, max_tokens, or both")
        for boundary in self.boundaries or ():
            check_integer("each of boundaries", boundary, 0)
        if any(low >= high for low, high in pairwise(self.boundaries or ())):
            raise ValueError(f"boundaries must be in ascending order, without repetitions, not {self.boundaries}")

    def number(self, length: int) -> int:
        """Return the number of the bucket for a length; buckets for shorter lengths have lower numbers."""
        if self.boundaries is not None:
            return bisect_left(self.boundaries, length)
        length = max(length, 1)
        bits = max((length - 1).bit_length() - 3, 0)
        return -(-length >> bits) << bits

    def fits(self, count: int, longest: int) -> bool:
        """Whether a batch may have ``count`` samples with a maximum length of ``longest``."""
        return (self.batch_size is None or count <= self.batch_size) and (
            self.max_tokens is None or count * max(longest, 1) <= self.max_tokens
        )


class _Bucket(Generic[T]):
    """Samples of similar length, with their numbers in the buffer."""

    def __init__(self) -> None:
        self.samples: list[T] = []
        self.numbers: list[int] = []
        self.longest = 0

    def add(self, sample: T, length: int, number: int) -> None:
        self.samples.append(sample)
        self.numbers.append(number)
        self.longest = max(self.longest, length)


def bucket_samples(
    source: Iterable[T],
    buckets: LengthBuckets,
    *,
    length_of: Length,
    drop_last: bool,
    on_error: OnError,
    buffer: SampleBuffer,
    position: Callable[[], SamplePosition] | None = None,
) -> Iterator[list[T]]:
    """Yield batches of samples from the same bucket, each as soon as no further sample fits into it.

    Args:
        source: the samples, preceded by those in ``buffer``.
        buckets: the buckets.
        length_of: the length of a sample.
        drop_last: drop the samples that remain at the end instead of yielding them from the shortest to the longest.
        on_error: the policy for samples without a valid length.
        buffer: the samples that are held back; updated in place.
        position: returns the position of the last item of ``source``, if known.
    """
    policy = ErrorPolicy(on_error, "bucket_samples")
    held = defaultdict[int, _Bucket[T]](_Bucket)

    def take(number: int) -> list[T]:
        bucket = held.pop(number)
        buffer.remove(bucket.numbers)
        return bucket.samples

    for sample in policy.counted(buffer.read(source, position)):
        try:
            length = _measure(sample, length_of)
            if not buckets.fits(1, length):
                raise SampleSizeError(
                    f"{_describe(sample)} has the length {length}, which exceeds max_tokens={buckets.max_tokens} of "
                    'bucket_samples. Raise the limit, shorten such samples first, or skip them with on_error="skip"'
                )
        except Exception as error:  # noqa: BLE001 - the policy handles all errors of a user's function
            if policy.handle(error, sample if isinstance(sample, Mapping) else None):
                continue
            break
        number, place = buckets.number(length), buffer.add()
        if not buckets.fits(len(held[number].samples) + 1, max(held[number].longest, length)):
            yield take(number)
        held[number].add(sample, length, place)
        del sample  # its batch must not keep it alive
        if not buckets.fits(len(held[number].samples) + 1, held[number].longest):
            yield take(number)
    policy.finish()
    for number in [] if drop_last else sorted(held):
        yield take(number)


def _measure(sample: Any, length_of: Length) -> int:
    """Return the length of a sample.

    Raises:
        MissingFieldError: it does not have the field.
        SampleSizeError: its length is not a non-negative integer.
        TypeError: it has no fields.
    """
    if isinstance(length_of, str):
        if not isinstance(sample, Mapping):
            raise not_a_sample_error("bucket_samples", sample)
        if length_of not in sample:
            raise missing_field_error(f"bucket_samples takes the length from the field {length_of!r}", dict(sample))
        found = sample[length_of]
        if hasattr(found, "__len__") and getattr(found, "ndim", None) != 0:
            return len(found)
    else:
        try:
            found = length_of(sample)
        except Exception as error:
            note(error, f"raised in bucket_samples for {_describe(sample)}")
            raise
    try:
        length = operator.index(found)
    except TypeError:
        length = -1
    if length < 0 or isinstance(found, bool):
        what = f"the field {length_of!r}" if isinstance(length_of, str) else "length"
        raise SampleSizeError(
            f"{what} of bucket_samples gives the length {found!r:.100} for {_describe(sample)}, but must give a "
            "non-negative integer"
        )
    return length


def _describe(sample: Any) -> str:
    return describe_sample(dict(sample)) if isinstance(sample, Mapping) else f"a {type(sample).__name__}"
