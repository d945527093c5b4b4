"""A source of made-up samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from wds_datapipes.on_error.policy import note
from wds_datapipes.pipes.stage import Stage

__all__ = ["MockSamples"]


class MockSamples(Stage[Any]):
    """Make up samples, to try a pipeline or to measure one without its data.

    Every worker makes all of them, until ``.sharding_filter()`` deals them out.

    Yields:
        Any: ``length`` copies of ``sample``, each a deep one, so that what a stage changes in one shows in no other; or
        what the function returns, as it is.

    Args:
        sample: a sample, or a function that makes one from its number.
        length: how many there are.

    Raises:
        TypeError: ``length`` is no whole number.
        ValueError: or it is below 0.

    Examples:
        >>> list(MockSamples({"__key__": "a", "cls": 1}, 2))
        [{'__key__': 'a', 'cls': 1}, {'__key__': 'a', 'cls': 1}]
        >>> list(MockSamples(lambda number: {"__key__": f"{number:04d}"}, 2))
        [{'__key__': '0000'}, {'__key__': '0001'}]
    """

    def __init__(self, sample: Callable[[int], Any] | Any, length: int) -> None:
        super().__init__()
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(f"length is a number of samples, not {length!r}")
        if length < 0:
            raise ValueError(f"length is a number of samples, from 0, not {length}")
        self.sample = sample if callable(sample) else deepcopy(sample)
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            if not callable(self.sample):
                yield deepcopy(self.sample)
                continue
            try:
                sample = self.sample(number)
            except Exception as error:
                note(error, f"MockSamples called its function for the sample {number}")
                raise
            yield sample

    def __len__(self) -> int:
        return self.length
