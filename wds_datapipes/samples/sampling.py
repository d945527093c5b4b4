"""Sampling: random subsets, slices by position, random functions, and a check that a stream is not empty."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from random import Random
from typing import Any, TypeVar, cast

from wds_datapipes.errors import EmptySourceError
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.samples.fields import map_samples
from wds_datapipes.seeds import derived_seed
from wds_datapipes.shards.position import SamplePosition, SkippedCount

__all__ = ["map_samples_with_rng", "non_empty", "parse_slice", "rsample", "slice_samples"]

T = TypeVar("T")

_END = object()


def rsample(
    source: Iterable[T],
    probability: float,
    *,
    rng: Random,
    passed: SkippedCount,
    address: Callable[[], SamplePosition] | None = None,
) -> Iterator[T]:
    """Yield each item with a probability; items that are replayed were drawn before.

    Args:
        source: the items.
        probability: the probability of each item, from 0 to 1.
        rng: the random generator.
        passed: the number of items drawn for; updated in place.
        address: returns the position of the last item of ``source``, if it is known.
    """
    for _ in range(passed.count):
        rng.random()
    for item in source:
        if passed.is_repeat(address) or rng.random() < probability:
            yield item


def parse_slice(positions: tuple[int | None, ...]) -> tuple[int, int | None, int]:
    """Return start, stop and step from the arguments, as for ``itertools.islice``.

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


def slice_samples(
    source: Iterable[T],
    start: int,
    stop: int | None,
    step: int,
    *,
    passed: SkippedCount,
    address: Callable[[], SamplePosition] | None = None,
) -> Iterator[T]:
    """Yield the items at some positions; the source is closed before the last one is yielded.

    Args:
        source: the items.
        start: the first position.
        stop: the position after the last, or None.
        step: the distance between positions.
        passed: the number of earlier items; updated in place.
        address: returns the position of the last item of ``source``, if it is known.
    """
    wanted = range(start, sys.maxsize if stop is None else stop, step)
    if not wanted:
        return
    last = wanted[-1]
    items = iter(source)
    if passed.count > last and not passed.has_pending:
        # Let the stages before consume the state that was loaded for them; errors in further items do not matter.
        with suppress(Exception):
            next(items, None)
        _close(items)
        return
    while passed.has_pending or passed.count <= last:
        item = next(cast(Iterator[object], items), _END)
        if item is _END:
            return
        if passed.is_repeat(address):
            yield cast(T, item)
        elif (position := passed.count - 1) in wanted:
            if position == last:
                _close(items)
            yield cast(T, item)


def _close(items: object) -> None:
    close = getattr(items, "close", None)
    if close is not None:
        close()


def non_empty(
    source: Iterable[T],
    *,
    upstream: Callable[[], str],
    passed: SkippedCount,
    address: Callable[[], SamplePosition] | None = None,
) -> Iterator[T]:
    """Yield all items; raise if there is none.

    Args:
        source: the items.
        upstream: returns the names of the stages before.
        passed: the number of items; updated in place.
        address: returns the position of the last item of ``source``, if it is known.
    """
    for item in source:
        passed.is_repeat(address)
        yield item
    if not passed.count:
        raise EmptySourceError(
            f"non_empty got nothing from {upstream()}. The shards may be empty, a stage may have dropped or skipped "
            f"over all, or there are more workers or ranks than shards: put non_empty before the split in that case"
        )


def map_samples_with_rng(
    source: Iterable[T],
    function: Callable[[T, Random], Any],
    *,
    seed: int,
    place: tuple[int, int],
    repeats: bool,
    address: Callable[[], SamplePosition] | None = None,
    on_error: OnError = "raise",
) -> Iterator[Any]:
    """Yield the result of a function for each item, with a generator seeded for the item; None drops the item.

    Args:
        source: the items.
        function: called with an item and the generator.
        seed: the seed of this epoch, the same on all ranks and workers.
        place: the rank and the worker.
        repeats: whether a shard may occur more than once, so that shard and key do not identify an item.
        address: returns the position of the last item of ``source``, if it is known.
        on_error: how to handle errors of the function.
    """
    rng = Random()
    last, number = None, 0

    def drawing(item: T) -> Any:
        nonlocal last, number
        facts: tuple[int | str, ...]
        if not repeats and isinstance(item, dict) and "__url__" in item and "__key__" in item:
            facts = (item["__url__"], item["__key__"])
        else:
            at = None if address is None else address().identity
            number = number + 1 if at == last else 0  # among items from one position, as after unbatching
            last = at
            facts = (*place, *(at or ()), number)
        rng.seed(derived_seed("map_samples_with_rng", seed, *facts))
        return function(item, rng)

    return map_samples(source, drawing, on_error=on_error, stage="map_samples_with_rng")
