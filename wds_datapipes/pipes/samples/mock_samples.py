"""The source that repeats one sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from wds_datapipes.arguments import check_integer
from wds_datapipes.pipes.roles import Source
from wds_datapipes.pipes.stage import EngineStage


class MockSamples(Source, EngineStage[Any]):
    """Generate synthetic samples to test or benchmark a pipeline without data.

    Every worker generates all samples, unless ``.sharding_filter()`` splits them.

    Yields:
        Any: ``length`` deep copies of ``sample``, so that changes to one do not affect the others, or the results of
            the function.

    Args:
        sample: a sample, or a function from the index of a sample to the sample.
        length: the number of samples.

    Raises:
        TypeError: ``length`` is not an integer.
        ValueError: ``length`` is negative.

    Examples:
        >>> list(MockSamples({"__key__": "a", "cls": 1}, 2))
        [{'__key__': 'a', 'cls': 1}, {'__key__': 'a', 'cls': 1}]
        >>> list(MockSamples(lambda number: {"__key__": f"{number:04d}"}, 2))
        [{'__key__': '0000'}, {'__key__': '0001'}]
    """

    draws_globally = True

    def __init__(self, sample: Callable[[int], Any] | Any, length: int) -> None:
        length = check_integer("length", length, 0)
        self.sample = sample if callable(sample) else deepcopy(sample)
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            yield self.sample(number) if callable(self.sample) else deepcopy(self.sample)

    def __len__(self) -> int:
        return self.length
