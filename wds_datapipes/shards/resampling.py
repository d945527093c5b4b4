"""Shards drawn with replacement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count as count_from
from random import Random

from wds_datapipes.errors import EmptySourceError

__all__ = ["resample_wds_shards"]


def resample_wds_shards(
    source: Iterable[str], *, rng: Random, count: int | None, on_round: Callable[[], None]
) -> Iterator[str]:
    """Yield ``count`` URLs of ``source``, or URLs for ever, each drawn by ``rng`` from all of them.

    Args:
        source: yields URLs.
        rng: draws.
        count: how many to draw; None is without limit.
        on_round: called whenever as many were drawn as there are.

    Raises:
        EmptySourceError: there is none to draw.
    """
    urls = list(source)
    if not urls:
        raise EmptySourceError("resample_wds_shards was given no shard to draw: its source is empty")
    for number in count_from() if count is None else range(count):
        if number % len(urls) == 0:
            on_round()
        yield urls[int(rng.random() * len(urls))]
