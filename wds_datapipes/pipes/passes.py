"""The stages before a stage: where the data is split, and which seeds they have when their source begins again."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe, get_worker_info
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from wds_datapipes.core.seeds import derived_seed
from wds_datapipes.core.sharing import Place

__all__ = ["Groups", "Passes", "has_no_share", "place_in", "place_of", "refuse_fed"]

#: What torch's ``ShardingFilter`` remembers: for each kind of splitting, among how many and which of them.
Groups = dict[int, tuple[int, int]]

#: How many sources a stage may have in one collection. A larger one holds data, and to look into all of it takes time.
_MOST_SOURCES = 1000

Pipe = IterDataPipe[Any]


def place_in(groups: Groups) -> Place:
    """Return the place that a loader has told to a stage that splits the data."""
    if SHARDING_PRIORITIES.DEFAULT in groups:
        # torch's DataLoader counts all workers of all ranks in one group, first those of the same number.
        instances, instance = groups[SHARDING_PRIORITIES.DEFAULT]
        info = get_worker_info()
        if info is None:
            return Place(rank=instance)
        return Place(instance % max(instances // info.num_workers, 1), info.num_workers, info.id)
    _, rank = groups.get(SHARDING_PRIORITIES.DISTRIBUTED, (1, 0))
    return Place(rank, *groups.get(SHARDING_PRIORITIES.MULTIPROCESSING, (1, 0)))


def place_of(pipe: Pipe) -> Place:
    """Return the place of a stage, as a stage before it knows it that splits the data."""
    found = (getattr(splitter, "groups", None) for splitter in _splitters(pipe))
    return next((place_in(groups) for groups in found if groups), Place())


def has_no_share(pipe: Pipe) -> bool:
    """Tell, after a pass, whether a stage before this one had something to deal, and nothing for this instance."""
    return any(not _yielded(splitter) and any(map(_yielded, _sources(splitter))) for splitter in _splitters(pipe))


def refuse_fed(pipe: Pipe, what: str) -> None:
    """Refuse a source that only the loader can begin again, as its items come from another process.

    Args:
        pipe: the source.
        what: what would begin it again.

    Raises:
        RuntimeError: it is one.
    """
    for stage in _upstream(pipe):
        if getattr(stage, "is_fed", False) or type(stage).__module__ == "torchdata.dataloader2.communication.iter":
            raise RuntimeError(
                f"{what} has to read its source on, and begin it again, at any time. Here its source is what other "
                "processes send, which begins when the loader begins an epoch, and only then. Put the stage before "
                "the one that is dispatched, or that stays in the main process."
            )


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

    def begin(self, source: Pipe, number: int) -> Iterator[Any]:
        """Begin a pass over ``source``, which is the ``number``-th, from 0."""
        before = {id(stage) for splitter in _splitters(source) for stage in _upstream(splitter)}
        stages = [stage for stage in _upstream(source) if inspect.ismethod(getattr(stage, "set_seed", None))]
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


def _splitters(pipe: Pipe) -> Iterator[Any]:
    return (stage for stage in _upstream(pipe) if inspect.ismethod(getattr(stage, "apply_sharding", None)))


def _upstream(pipe: Any) -> Iterator[Any]:
    """Yield a stage and all that are before it, each once, in an order that is the same in every copy."""
    seen, found = set(), [pipe]
    while found:
        stage = found.pop()
        if id(stage) not in seen:
            seen.add(id(stage))
            yield stage
            found += reversed(list(_sources(stage)))


def _sources(stage: Any) -> Iterator[Any]:
    """Yield the stages that a stage reads from.

    torch's own way to find them pickles all their collections, in which there may be functions.
    """
    return (source for value in vars(stage).values() for source in _pipes(value))


def _pipes(value: Any) -> Iterator[Any]:
    if isinstance(value, IterDataPipe | MapDataPipe):
        yield value
    elif isinstance(value, dict | list | tuple) and len(value) <= _MOST_SOURCES:
        for each in itertools.chain(value, value.values()) if isinstance(value, dict) else value:
            yield from _pipes(each)


def _yielded(stage: Any) -> bool:
    """Whether a stage has ever yielded anything. torch counts that for the datapipes that are iterated."""
    return getattr(stage, "_number_of_samples_yielded", 1) > 0
