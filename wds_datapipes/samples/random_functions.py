"""Functions that draw, and draw the same again for the same sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any, TypeVar

from wds_datapipes.on_error.policy import OnError
from wds_datapipes.samples.fields import map_samples
from wds_datapipes.seeds import derived_seed
from wds_datapipes.shards.position import SamplePosition

__all__ = ["map_samples_with_rng"]

T = TypeVar("T")


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
    """Yield what a function makes of each item and of a generator that is seeded for it; None leaves the item out.

    Args:
        source: the items.
        function: gets an item and the generator.
        seed: of this epoch, the same on all ranks and workers.
        place: the rank and the worker.
        repeats: whether one shard may come more than once, so that shard and key do not tell one item from another.
        address: tells where the item is that ``source`` has yielded last, if that is known.
        on_error: what to do about an error of the function.
    """
    rng = Random()
    last, number = None, 0

    def drawing(item: T) -> Any:
        nonlocal last, number
        facts: tuple[int | str, ...]
        if not repeats and isinstance(item, dict) and "__url__" in item and "__key__" in item:
            facts = (item["__url__"], item["__key__"])
        else:
            at = None if address is None else address().place
            number = number + 1 if at == last else 0  # among items from one place, as of a sample that was taken apart
            last = at
            facts = (*place, *(at or ()), number)
        rng.seed(derived_seed("map_samples_with_rng", seed, *facts))
        return function(item, rng)

    return map_samples(source, drawing, on_error=on_error, stage="map_samples_with_rng")
