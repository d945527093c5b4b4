"""Inspection of stages of any package: names, sources, torch's counters, and the methods that loaders call."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from wds_datapipes.datapipes import IterDataPipe, MapDataPipe
from wds_datapipes.pipes.functional_form import FunctionalForm

#: The maximum number of sources in a collection. Larger collections hold data and would take too long to search.
_MAX_SOURCES = 1000

#: Private attributes of torch's datapipes, in torch 2.4 to 2.13, that change during iteration.
TORCH_ATTRIBUTES = frozenset(
    {
        *("_buffer", "_enabled", "_fast_forward_iterator", "_number_of_samples_yielded", "_rng", "_seed"),
        *("_snapshot_state", "_uuid", "_valid_iterator_id"),
        *("_is_child_datapipe", "_apply_fn"),  # of `adapt_stage`
    }
)

Pipe = IterDataPipe[Any]

_PIPES = frozenset({IterDataPipe, MapDataPipe})
#: Packages whose stages search for a stage to append under the name of a missing attribute.
_LIBRARIES = frozenset({"torch", "torchdata", "wds_datapipes"})
#: Classes that define no loop, or an empty one.
_ABSTRACT = frozenset(IterDataPipe.__mro__)

#: Stages after which the elements of a tuple are those before it.
_KEEP_TUPLES = frozenset(
    {
        *(".batch", ".filter", ".map_tuple", ".non_empty", ".rsample", ".shuffle", ".shuffle_samples"),
        *(".slice_samples", ".with_epoch", ".with_length"),
    }
)


def count_yielded(stage: Any) -> int:
    """Return the number of items that a stage has yielded in its latest iteration, by torch's counter."""
    count: int = stage._number_of_samples_yielded
    return count


def iteration_of(stage: Any) -> int:
    """Return the number of a stage's latest iteration, by torch's counter."""
    return stage._valid_iterator_id or 0


def name_of(stage: Any) -> str:
    """Return a stage's name: that of its class, or of the class that created it as one of several outputs."""
    maker = vars(stage).get("main_datapipe", stage)
    return type(maker).__name__.lstrip("_").removesuffix("IterDataPipe")


def functional_name_of(stage: Any) -> str:
    """Return the method that appends a stage to a pipeline, such as ``.batch``, or the class of a source."""
    names = {_key_of(build): name for name, build in IterDataPipe.functions.items()}
    name = next((names[key] for key in map(_key_of, type(stage).__mro__) if key in names), None)
    return name_of(stage) if name is None or next(sources_of(stage), None) is None else f".{name}"


def _key_of(build: Any) -> Any:
    """Return the full name of a class, or of that which a functional form builds, without importing it."""
    if isinstance(build, FunctionalForm):
        return build.path
    kind = getattr(build, "__wrapped__", build)
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else kind


def call_of(stage: Any) -> str:
    """Return the call that appends a stage, such as ``.batch()``, or the class of a source."""
    name = functional_name_of(stage)
    return f"{name}()" if name.startswith(".") else name


def names_of_elements(stage: Any) -> list[str]:
    """Return the names of the elements of the tuples that a stage reads, if ``.to_tuple()`` has made them."""
    while stage is not None:
        stage = next(sources_of(stage), None)
        if functional_name_of(stage) == ".to_tuple":
            return [name for spec in stage.specs for name in spec.split()]
        if functional_name_of(stage) not in _KEEP_TUPLES:
            break
    return []


def loop_of(*kinds: type) -> type | None:
    """Return the first of some classes that defines ``__iter__``, if it is not abstract; otherwise None."""
    found = next((kind for kind in kinds if "__iter__" in vars(kind)), None)
    return None if found in _ABSTRACT else found


def library_of(kind: object) -> str:
    """Return the package of a class or a function."""
    return kind.__module__.partition(".")[0]


def attribute_of(stage: Any, name: str) -> Any:
    """Return an attribute of a stage of any package; None if it has none.

    Where an attribute is missing, ``__getattr__`` of torch and of this package searches for the stage to append under
    that name, which takes ten times as long. That of another package may pass on attributes of another object.
    """
    kind = type(stage)
    search = getattr(kind, "__getattr__", None)
    if hasattr(kind, name) or name in vars(stage) or (search is not None and library_of(search) not in _LIBRARIES):
        return getattr(stage, name, None)
    return None


def takes_seed(stage: Any) -> bool:
    """Whether a stage of any package takes a seed for each epoch."""
    return inspect.ismethod(attribute_of(stage, "set_seed"))


def splits(stage: Any) -> bool:
    """Whether a stage of any package splits the data between ranks and workers."""
    return inspect.ismethod(attribute_of(stage, "apply_sharding"))


def sources_of(stage: Any) -> Iterator[Any]:
    """Yield the stages that a stage reads from.

    torch's own traversal pickles all collections of a stage, which may contain functions.
    """
    return _pipes(getattr(stage, "__dict__", {}).values())


def _pipes(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        # Not isinstance: for each new type, an abstract class checks all of its subclasses, which takes milliseconds.
        if not _PIPES.isdisjoint(type(value).__mro__):
            yield value
        elif isinstance(value, (dict, list, tuple)) and len(value) <= _MAX_SOURCES:
            yield from _pipes(itertools.chain(value, value.values()) if isinstance(value, dict) else value)
