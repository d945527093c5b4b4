"""Datapipes for a release of torch without them: their base classes, and the stages that most pipelines have.

The names of classes, arguments and attributes are those of torch, which states record, and so are all orders. So a run
continues from a state that it has saved with torch's datapipes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from enum import IntEnum
from itertools import islice
from random import Random
from typing import Any, ClassVar, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from wds_datapipes.datapipes.iteration import checked

T_co = TypeVar("T_co", covariant=True)
C = TypeVar("C", bound="type[IterDataPipe[Any]]")


class SHARDING_PRIORITIES(IntEnum):
    """What the data is split between: all workers of all ranks at once, ranks, and the workers of a rank."""

    DEFAULT, DISTRIBUTED, MULTIPROCESSING = 1, 2, 3


class MapDataPipe(Dataset[T_co]):
    """Base class of map-style datapipes."""


class IterDataPipe(IterableDataset[T_co]):
    """Base class of datapipes that yield items.

    An iteration calls `reset` first. It ends with an error if another iteration begins.

    Attributes:
        functions: the functional names of the stages, and functions that build them.
    """

    functions: ClassVar[dict[str, Callable[..., Any]]] = {}
    _valid_iterator_id: int | None = None
    _number_of_samples_yielded = 0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__iter__" in vars(cls):
            cls.__iter__ = checked(vars(cls)["__iter__"])  # type: ignore[method-assign]

    @classmethod
    def register_function(cls, name: str, function: Callable[..., Any]) -> None:
        """Let a method of all datapipes build a stage."""
        cls.functions[name] = function

    def __getattr__(self, name: str) -> Any:
        if name not in IterDataPipe.functions:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return functools.partial(IterDataPipe.functions[name], self)

    def reset(self) -> None:
        """Prepare for an iteration."""


def functional_datapipe(name: str) -> Callable[[C], C]:
    """Register a class as a stage with this functional name."""

    def register(stage: C) -> C:
        IterDataPipe.register_function(name, stage)
        return stage

    return register


class IterableWrapper(IterDataPipe[T_co]):
    """Yields the items of an iterable, which is copied for each iteration if possible."""

    def __init__(self, iterable: Iterable[T_co], deepcopy: bool = True) -> None:
        self.iterable, self.deepcopy = iterable, deepcopy

    def __iter__(self) -> Iterator[T_co]:
        items = self.iterable
        with suppress(TypeError):
            items = copy.deepcopy(items) if self.deepcopy else items
        yield from items

    def __len__(self) -> int:
        return len(self.iterable)  # type: ignore[arg-type]  # it may have none


@functional_datapipe("map")
class Mapper(IterDataPipe[Any]):
    """Calls a function with each item, and yields the results. Columns of items cannot be named."""

    def __init__(self, datapipe: Any, fn: Any, input_col: None = None, output_col: None = None) -> None:
        _refuse_columns(input_col, output_col)
        self.datapipe, self.fn, self.input_col, self.output_col = datapipe, fn, input_col, output_col

    def __iter__(self) -> Iterator[Any]:
        yield from map(self.fn, self.datapipe)

    def __len__(self) -> int:
        return len(self.datapipe)


def _refuse_columns(*columns: object) -> None:
    """Raise an error if a column is named."""
    if any(column is not None for column in columns):
        raise ValueError("This .map() or .filter() knows no columns. Pass a function of the whole item")


@functional_datapipe("collate")
class Collator(Mapper):
    """Makes a batch of each list of items."""

    def __init__(self, datapipe: Any, conversion: Any = default_collate, collate_fn: Any = None) -> None:
        super().__init__(datapipe, collate_fn or conversion)


@functional_datapipe("filter")
class Filter(IterDataPipe[T_co]):
    """Yields the items for which a function returns True."""

    def __init__(self, datapipe: Any, filter_fn: Any, input_col: None = None) -> None:
        _refuse_columns(input_col)
        self.datapipe, self.filter_fn, self.input_col = datapipe, filter_fn, input_col

    def __iter__(self) -> Iterator[T_co]:
        for item in self.datapipe:
            if not isinstance(is_wanted := self.filter_fn(item), bool):
                raise ValueError(f"The function of .filter() must return a bool, not {is_wanted!r}")
            if is_wanted:
                yield item


class DataChunk(list[Any]):
    """A batch of items."""


@functional_datapipe("batch")
class Batcher(IterDataPipe[Any]):
    """Yields lists of ``batch_size`` items; the last one may be shorter, or is dropped."""

    def __init__(self, datapipe: Any, batch_size: int, drop_last: bool = False, wrapper_class: Any = DataChunk) -> None:
        if batch_size <= 0:
            raise ValueError(f"batch_size must be positive, not {batch_size}")
        self.datapipe, self.batch_size = datapipe, batch_size
        self.drop_last, self.wrapper_class = drop_last, wrapper_class

    def __iter__(self) -> Iterator[Any]:
        items = iter(self.datapipe)
        while len(batch := list(islice(items, self.batch_size))) > (self.batch_size - 1 if self.drop_last else 0):
            yield self.wrapper_class(batch)

    def __len__(self) -> int:
        return (len(self.datapipe) + (0 if self.drop_last else self.batch_size - 1)) // self.batch_size


@functional_datapipe("shuffle")
class Shuffler(IterDataPipe[T_co]):
    """Yields the items in the order in which they are drawn from a buffer, with a seed that loaders set."""

    _enabled = True

    def __init__(self, datapipe: Any, *, buffer_size: int = 10_000, unbatch_level: int = 0) -> None:
        if buffer_size <= 0:
            raise ValueError(f"buffer_size must be positive, not {buffer_size}")
        self.datapipe = datapipe.unbatch(unbatch_level=unbatch_level) if unbatch_level else datapipe
        self.buffer_size, self._rng = buffer_size, Random()
        self._seed: int | None = None

    def set_seed(self, seed: int) -> Shuffler[T_co]:
        """Set the seed of the next iteration."""
        self._seed = seed
        return self

    def reset(self) -> None:
        """Begin with the seed that was set, or one from torch's generator."""
        seed, self._seed = self._seed, None
        self._rng.seed(int(torch.empty((), dtype=torch.int64).random_()) if seed is None else seed)

    def __iter__(self) -> Iterator[T_co]:
        held: list[T_co] = []
        for item in self.datapipe:
            if len(held) < self.buffer_size:
                held.append(item)
                continue
            place = self._rng.randrange(len(held))
            drawn, held[place] = held[place], item
            yield drawn
        while held:
            yield held.pop(self._rng.randrange(len(held)))

    def __len__(self) -> int:
        return len(self.datapipe)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@functional_datapipe("sharding_filter")
class ShardingFilter(IterDataPipe[T_co]):
    """Yields every n-th item, where n is the number of workers of all ranks."""

    def __init__(self, source_datapipe: Any, sharding_group_filter: int | None = None) -> None:
        self.source_datapipe, self.sharding_group_filter = source_datapipe, sharding_group_filter
        self.groups: dict[int, tuple[int, int]] = {}
        self.num_of_instances, self.instance_id = 1, 0

    def apply_sharding(self, num_of_instances: int, instance_id: int, sharding_group: int = 1) -> None:
        """Set the rank or the worker; loaders call this."""
        if not 0 <= instance_id < num_of_instances or (self.groups and (sharding_group == 1) != (1 in self.groups)):
            raise ValueError(
                f"No instance {instance_id} of {num_of_instances} in group {sharding_group} of {self.groups}"
            )
        self.groups[sharding_group] = num_of_instances, instance_id
        self.num_of_instances, self.instance_id = 1, 0
        for group, (count, number) in sorted(self.groups.items()):  # the ranks before their workers
            if self.sharding_group_filter in (None, group):
                self.instance_id += self.num_of_instances * number
                self.num_of_instances *= count

    def __iter__(self) -> Iterator[T_co]:
        yield from islice(self.source_datapipe, self.instance_id, None, self.num_of_instances)

    def __len__(self) -> int:
        return len(range(self.instance_id, len(self.source_datapipe), self.num_of_instances))


for _stage in (IterableWrapper, Mapper, Collator, Filter, Batcher, Shuffler, ShardingFilter):
    _stage.__name__ += "IterDataPipe"  # as in torch, since states record it
