"""The graph of stages: which stages a stage reads from, and what is known of each."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe

from wds_datapipes.pipes.stage import Stage
from wds_datapipes.shards.position import SamplePosition

__all__ = ["as_stage", "position_reader_of", "sources_of", "takes_seed", "upstream"]

#: How many sources a stage may have in one collection. A larger one holds data, and to look into all of it takes time.
_MOST_SOURCES = 1000

Pipe = IterDataPipe[Any]


class _ForeignStage(Stage[Any]):
    """Stands for a stage of another package, and promises nothing."""

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError


_FOREIGN = _ForeignStage()


def as_stage(pipe: Any) -> Stage[Any]:
    """Return a stage as a `Stage`; for one of another package, a `Stage` that promises nothing."""
    return pipe if isinstance(pipe, Stage) else _FOREIGN


def takes_seed(stage: object) -> bool:
    """Whether a stage, of whichever package, takes a seed for each epoch."""
    return inspect.ismethod(getattr(stage, "set_seed", None))


def position_reader_of(pipe: Any) -> Callable[[], SamplePosition] | None:
    """Return a function that returns the position of the item that a stage has yielded last; None if it is unknown."""
    while (reader := as_stage(pipe).position_reader()) is None:
        sources = list(sources_of(pipe))
        if len(sources) != 1:
            return None
        pipe = sources[0]
    return reader


def upstream(pipe: Any) -> Iterator[Any]:
    """Yield a stage and all that are before it, each once, in an order that is the same in every copy."""
    seen, found = set(), [pipe]
    while found:
        stage = found.pop()
        if id(stage) not in seen:
            seen.add(id(stage))
            yield stage
            found += reversed(list(sources_of(stage)))


def sources_of(stage: Any) -> Iterator[Any]:
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
