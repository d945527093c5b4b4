"""A part of a stream: drawn at random, or by position; and that there is anything at all."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import TypeVar

from wds_datapipes.errors import EmptySource

__all__ = ["non_empty", "parse_slice", "rsample", "slice_samples"]

T = TypeVar("T")


def rsample(source: Iterable[T], p: float, *, rng: Random) -> Iterator[T]:
    """Yield each item with the probability ``p``."""
    for item in source:
        if rng.random() < p:
            yield item


def parse_slice(positions: tuple[int | None, ...]) -> tuple[int, int | None, int]:
    """Return the start, stop and step that are meant, as for ``itertools.islice``.

    >>> parse_slice((10,)), parse_slice((2, None)), parse_slice((None, 10, 3))
    ((0, 10, 1), (2, None, 1), (0, 10, 3))
    """
    if not 1 <= len(positions) <= 3:
        raise TypeError(f"slice_samples takes stop, or start, stop and step, not {len(positions)} numbers")
    given = (None, *positions) if len(positions) == 1 else positions
    numbers = []
    for name, number in zip(("start", "stop", "step"), given, strict=False):
        try:
            numbers.append(None if number is None else operator.index(number))
        except TypeError:
            raise TypeError(f"the {name} of slice_samples is a number or None, not {number!r}") from None
        if number is not None and number < (name == "step"):
            raise ValueError(
                f"the {name} of slice_samples is a number from {int(name == 'step')}, not {number!r}: "
                f"a stream has no end to count from"
            )
    start, stop, step = (*numbers, None)[:3]
    return start or 0, stop, step or 1


def slice_samples(source: Iterable[T], start: int, stop: int | None, step: int) -> Iterator[T]:
    """Yield the items at some positions; the source is closed before the last leaves, and not read beyond it."""
    wanted = itertools.count(start, step) if stop is None else range(start, stop, step)
    last = wanted[-1] if isinstance(wanted, range) and wanted else None
    if stop is not None and last is None:
        return
    items = iter(source)
    positions = iter(wanted)
    position = next(positions)
    for index, item in enumerate(items):
        if index == position:
            if index == last:
                close = getattr(items, "close", None)
                del items
                if close is not None:
                    close()
                yield item
                return
            position = next(positions)
            yield item


def non_empty(source: Iterable[T], *, upstream: Callable[[], str]) -> Iterator[T]:
    """Yield all items; that there is none is an error."""
    empty = True
    for item in source:
        empty = False
        yield item
    if empty:
        raise EmptySource(
            f"non_empty got nothing from {upstream()}. The shards may be empty, a stage may have left out or passed "
            f"over all, or there are more workers or ranks than shards: put non_empty before the split in that case"
        )
