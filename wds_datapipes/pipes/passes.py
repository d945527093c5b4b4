"""What seeds the stages of a source have when it begins again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterDataPipe

from wds_datapipes.core.seeds import derived_seed
from wds_datapipes.core.sharing import Place
from wds_datapipes.pipes.upstream import splitters, upstream

__all__ = ["Passes"]


class Passes:
    """Begins the passes over a source, each with seeds of its own.

    The first one has the seeds that the loader has set. A loader sets them once an epoch, and workers come to a later
    pass in different epochs, or to several in one. So its seeds follow from those of the first pass. Before the data is
    split, they are the same in all workers and ranks, as each would else split another order.

    Args:
        place: of this instance.
        seed: of this instance, or None if there is no loader, which would have set one.
    """

    def __init__(self, place: Place, seed: int | None) -> None:
        self._place = place
        self._seed = seed
        self._shared: tuple[int, ...] = ()

    def begin(self, source: IterDataPipe[Any], number: int) -> Iterator[Any]:
        """Begin a pass over ``source``, which is the ``number``-th, from 0."""
        before = {id(stage) for splitter in splitters(source) for stage in upstream(splitter)}
        stages = [stage for stage in upstream(source) if inspect.ismethod(getattr(stage, "set_seed", None))]
        if number == 0:
            # torch's stages, and ours, keep the seed that was set until they begin.
            seeds = (getattr(stage, "_seed", None) for stage in stages if id(stage) in before)
            self._shared = tuple(seed for seed in seeds if seed is not None)
        for position, stage in enumerate(stages if number else ()):
            if id(stage) in before:
                if self._shared:
                    stage.set_seed(derived_seed("shared", *self._shared, number, position))
            elif self._seed is not None:
                stage.set_seed(derived_seed("own", self._seed, *self._place, number, position))
        return iter(source)
