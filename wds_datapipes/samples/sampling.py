"""Sampling: random subsets, slices by position, random functions, and a check that a stream is not empty."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from random import Random
from typing import Any, TypeVar

from wds_datapipes.errors import EmptySourceError
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.samples.fields import map_samples
from wds_datapipes.seeds import derived_seed
from wds_datapipes.shards.held_samples import ItemCounter
from wds_datapipes.shards.position import SamplePosition
from wds_datapipes.types import Instance

T = TypeVar("T")


def rsample(
    source: Iterable[T],
    probability: float,
    *,
    rng: Random,
    counter: ItemCounter,
    position: Callable[[], SamplePosition] | None = None,
) -> Iterator[T]:
    """Yield each item with a given probability; items that are read again are always yielded.

    Args:
        source: the items.
        probability: the probability of each item, from 0 to 1.
        rng: the random generator.
        counter: counts the items; updated in place.
        position: returns the position of the last item of ``source``, if known.
    """
    for _ in range(counter.count):
        rng.random()
    for item in source:
        if counter.is_repeat(position) or rng.random() < probability:
            yield item


def parse_slice(positions: tuple[int | None, ...]) -> tuple[int, int | None, int]:
    """Return start, stop and step from the arguments, as for ``itertools.islice``.

    >>> parse_slice((10,)), parse_slice((2, None)), parse_slice((None, 10, 3))
    ((0, 10, 1), (2, None, 1), (0, 10, 3))
    """
    try:
        itertools.islice((), *positions)
    except (TypeError, ValueError):
        raise ValueError(
            "slice_samples takes stop, or start, stop and step: non-negative integers or None, with a step of at least "
            f"1, not {positions}. Positions cannot be counted from the end of a stream"
        ) from None
    bounds = slice(*positions)
    return bounds.start or 0, bounds.stop, bounds.step or 1


def slice_samples(
    source: Iterable[T],
    start: int,
    stop: int | None,
    step: int,
    *,
    counter: ItemCounter,
    position: Callable[[], SamplePosition] | None = None,
) -> Iterator[T]:
    """Yield the items at some positions; the source is closed before the last one is yielded.

    Args:
        source: the items.
        start: the first position.
        stop: the position after the last, or None.
        step: the distance between positions.
        counter: counts the items; updated in place.
        position: returns the position of the last item of ``source``, if known.
    """
    wanted = range(start, sys.maxsize if stop is None else stop, step)
    if not wanted:
        return
    last = wanted[-1]
    items = iter(source)
    if counter.count > last and not counter.has_pending:
        # Let earlier stages consume their loaded state; errors in further items do not matter.
        with suppress(Exception):
            next(items, None)
        _close(items)
        return
    for item in items:
        if counter.is_repeat(position):
            yield item
        elif (index := counter.count - 1) in wanted:
            if index == last:
                _close(items)
            yield item
        if counter.count > last and not counter.has_pending:
            return


def _close(items: object) -> None:
    close = getattr(items, "close", None)
    if close is not None:
        close()


def non_empty(
    source: Iterable[T], *, upstream: str, counter: ItemCounter, position: Callable[[], SamplePosition] | None = None
) -> Iterator[T]:
    """Yield all items; raise an error if there are none.

    Args:
        source: the items.
        upstream: the name of the previous stage.
        counter: counts the items; updated in place.
        position: returns the position of the last item of ``source``, if known.
    """
    for item in source:
        counter.is_repeat(position)
        yield item
    if not counter.count:
        raise EmptySourceError(
            f"non_empty received no items from {upstream}. The shards may be empty, or a stage may have dropped or "
            "skipped all samples. If there are fewer shards than workers or ranks, put non_empty before the split"
        )


class SampleSeeds:
    """Derives the seed of each sample from its shard and key, so that it is the same in every process and order.

    Args:
        name: the name of the stage; stages with different names draw different numbers from the same seed.
        seed: the seed of this epoch, the same on all ranks and workers.
        instance: the rank and the worker.
        repeats: whether a shard may occur more than once, so that shard and key do not identify an item.
        counter: counts the items that neither shard and key nor a position identify; updated in place.
        position: returns the position of the last item read, if known.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        *,
        instance: Instance,
        repeats: bool,
        counter: ItemCounter,
        position: Callable[[], SamplePosition] | None = None,
    ) -> None:
        self._facts = (name, seed)
        self._instance = instance.rank, instance.worker
        self._repeats = repeats
        self._counter = counter
        self._position = position
        self._last: Any = None
        self._seed = 0
        self._number = 0

    def derive(self, item: object) -> int:
        """Return the seed of the last item read; call this once for each item."""
        if not self._repeats and isinstance(item, dict) and "__url__" in item and "__key__" in item:
            return derived_seed(*self._facts, item["__url__"], item["__key__"])
        if self._position is None:
            self._counter.count += 1
            return derived_seed(*self._facts, *self._instance, self._counter.count)
        at = self._position().identity
        self._number = self._number + 1 if at == self._last else 0  # items may share a position, as in a batch
        self._last = at
        return derived_seed(*self._facts, *self._instance, *at, self._number)

    def follow(self, source: Iterable[T]) -> Iterator[T]:
        """Yield the items of ``source``, and derive the seed of each one for `make_rng`."""
        for item in source:
            self._seed = self.derive(item)
            yield item

    def make_rng(self) -> Random:
        """Return a generator for the last item that `follow` yielded; each call returns an equal one."""
        return Random(self._seed)


def map_samples_with_rng(
    source: Iterable[T], function: Callable[[T, Random], Any], seeds: SampleSeeds, *, on_error: OnError = "raise"
) -> Iterator[Any]:
    """Yield the result of a function of each item and a generator seeded for it, unless the result is None."""
    rng = Random()

    def drawing(item: T) -> Any:
        rng.seed(seeds.derive(item))
        return function(item, rng)

    return map_samples(source, drawing, on_error=on_error, stage="map_samples_with_rng")
