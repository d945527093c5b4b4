"""Several sources as one."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from random import Random
from typing import Literal, Protocol, TypeVar

from wds_datapipes.errors import EmptySource

__all__ = ["Stop", "mix_samples"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Stop = Literal["first", "all", "never"]
_END = object()


class Beginner(Protocol[T_co]):
    """Begins the passes over the sources."""

    def __call__(self, source: int, number: int, /) -> Iterator[T_co]:
        """Begin a pass over one of the sources; both are numbers from 0."""


def mix_samples(
    begin: Beginner[T],
    sources: int,
    *,
    weights: Sequence[float] | None,
    stop: Stop,
    rng: Random,
    has_no_share: Callable[[int], bool],
) -> Iterator[T]:
    """Yield items of several sources, from each in turn or from one that is drawn by its weight.

    Args:
        begin: begins a pass over a source.
        sources: how many there are.
        weights: one for each source, or None to take them in turn.
        stop: when to stop.
        rng: draws.
        has_no_share: whether nothing of a source was dealt to this instance.

    Raises:
        EmptySource: a source that has to begin again has no item.
    """
    left = [source for source in range(sources) if weights is None or weights[source] > 0]
    bounds = _bounds(left, weights)
    passes = [begin(source, 0) if source in left else iter(()) for source in range(sources)]
    begun = [1] * sources
    turn = 0
    while left:
        turn = turn % len(left) if weights is None else bisect(bounds, rng.random() * bounds[-1], 0, len(left) - 1)
        source = left[turn]
        item = next(passes[source], _END)
        if item is _END and stop == "never":
            passes[source] = begin(source, begun[source])
            begun[source] += 1
            item = next(passes[source], _END)
            if item is _END and not has_no_share(source):
                raise EmptySource(
                    f'mix_samples(stop="never") has to begin source {source} (of 0 to {sources - 1}) again, '
                    "and it yields nothing"
                )
        if item is not _END:
            yield item  # type: ignore[misc]  # mypy does not know that there is one _END
            turn += 1
        elif stop == "first":
            return
        else:
            del left[turn]
            bounds = _bounds(left, weights)


def _bounds(left: list[int], weights: Sequence[float] | None) -> list[float]:
    """Return the upper bounds of what is drawn for each source."""
    return [] if weights is None else list(accumulate(weights[source] for source in left))
