"""The graph of stages: the sources of each stage, and their properties."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

from wds_datapipes.datapipes import IterDataPipe, MapDataPipe

__all__ = [
    "TORCH_ATTRIBUTES",
    "count_yielded",
    "functional_name_of",
    "iteration_of",
    "sources_of",
    "takes_seed",
    "upstream",
]

#: The maximum number of sources in one collection. Larger collections hold data, and would take too long to search.
_MAX_SOURCES = 1000

#: Private attributes of torch's datapipes, in torch 2.4 to 2.13, that change during iteration. Only this module and the
#: class attribute `Stage._is_child_datapipe` use private names of torch's datapipes.
TORCH_ATTRIBUTES = frozenset(
    {
        *("_buffer", "_enabled", "_fast_forward_iterator", "_number_of_samples_yielded", "_rng", "_seed"),
        *("_snapshot_state", "_uuid", "_valid_iterator_id"),
    }
)

Pipe = IterDataPipe[Any]

_PIPES = frozenset({IterDataPipe, MapDataPipe})


def count_yielded(stage: Any) -> int:
    """Return the number of items that a stage has yielded in its latest iteration; torch counts them."""
    count: int = stage._number_of_samples_yielded
    return count


def iteration_of(stage: Any) -> int:
    """Return the number of a stage's latest iteration; torch counts them."""
    return stage._valid_iterator_id or 0


def name_of(stage: Any) -> str:
    """Return a stage's name: that of its class, or of the class that created it as one of several."""
    maker = vars(stage).get("main_datapipe", stage)
    name = type(maker).__name__.lstrip("_").removesuffix("IterDataPipe")
    return "RandomSplitter" if name == "SplitterIterator" else name


def functional_name_of(stage: Any) -> str:
    """Return the method that adds a stage to a pipeline, such as ``.batch``, or the class of a source."""
    names = {getattr(build, "__wrapped__", None): name for name, build in IterDataPipe.functions.items()}
    name = next((names[kind] for kind in type(stage).__mro__ if kind in names), None)
    return name_of(stage) if name is None or next(sources_of(stage), None) is None else f".{name}"


def takes_seed(stage: object) -> bool:
    """Whether a stage of any package takes a seed for each epoch."""
    return inspect.ismethod(getattr(stage, "set_seed", None))


def upstream(pipe: Any) -> Iterator[Any]:
    """Yield a stage and all stages before it, each once, in the same order for every copy."""
    seen, found = set(), [pipe]
    while found:
        stage = found.pop()
        if id(stage) not in seen:
            seen.add(id(stage))
            yield stage
            found += reversed(list(sources_of(stage)))


def sources_of(stage: Any) -> Iterator[Any]:
    """Yield the stages that a stage reads from.

    torch's own traversal pickles all collections of a stage, which may contain functions.
    """
    return (source for value in vars(stage).values() for source in _pipes(value))


def _pipes(value: Any) -> Iterator[Any]:
    # Not isinstance: for each new type, an abstract class asks all of its subclasses, which takes milliseconds.
    if not _PIPES.isdisjoint(type(value).__mro__):
        yield value
    elif isinstance(value, dict | list | tuple) and len(value) <= _MAX_SOURCES:
        for each in itertools.chain(value, value.values()) if isinstance(value, dict) else value:
            yield from _pipes(each)
