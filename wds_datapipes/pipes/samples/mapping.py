"""Stages that apply the user's functions to samples, to fields, or to the whole stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from random import Random
from typing import Any, TypeVar

from wds_datapipes.arguments import check_integer
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError, refuse_handler
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.inspection import upstream
from wds_datapipes.pipes.sharding import find_rank_and_worker
from wds_datapipes.pipes.stage import (
    EngineStage,
    FunctionStage,
    OpaqueValue,
    SnapshotStage,
    position_reader_of,
    register_stage,
)
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.samples.fields import Function, map_dict, map_samples, map_tuple
from wds_datapipes.samples.sampling import SampleSeeds, map_samples_with_rng
from wds_datapipes.shards.held_samples import NONE_AWAITED, Awaited, ItemCounter
from wds_datapipes.types import Sample

T_co = TypeVar("T_co", covariant=True)


class MockSamples(EngineStage[Any]):
    """Generate synthetic samples to test or benchmark a pipeline without data.

    Every worker generates all samples, unless ``.sharding_filter()`` splits them.

    Yields:
        Any: ``length`` deep copies of ``sample``, so that changes to one do not affect the others, or the results of
            the function.

    Args:
        sample: a sample, or a function from the index of a sample to the sample.
        length: the number of samples.

    Raises:
        TypeError: ``length`` is not an integer.
        ValueError: ``length`` is negative.

    Examples:
        >>> list(MockSamples({"__key__": "a", "cls": 1}, 2))
        [{'__key__': 'a', 'cls': 1}, {'__key__': 'a', 'cls': 1}]
        >>> list(MockSamples(lambda number: {"__key__": f"{number:04d}"}, 2))
        [{'__key__': '0000'}, {'__key__': '0001'}]
    """

    draws_globally = True

    def __init__(self, sample: Callable[[int], Any] | Any, length: int) -> None:
        length = check_integer("length", length, 0)
        self.sample = sample if callable(sample) else deepcopy(sample)
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            yield self.sample(number) if callable(self.sample) else deepcopy(self.sample)

    def __len__(self) -> int:
        return self.length


@register_stage("map_samples")
class SampleMapper(FunctionStage[Any]):
    """Apply a function to whole samples (functional name: ``map_samples``).

    It differs from torch's ``.map()`` in three ways: a sample is skipped if the function returns None; an error names
    the sample's key and shard, and ``on_error`` can skip it; and if the function takes a sample and returns a dict, the
    dict keeps the sample's ``__key__``, ``__url__``, ``__local_path__`` and ``__padding__``, unless it has its own.

    Yields:
        Any: the results of the function.

    Args:
        source: yields samples, or anything else.
        function: called with each item.
        on_error: ``"raise"``, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler; all but the first skip the
            item.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "cls": 3}, {"__key__": "b", "cls": 4}])
        >>> list(samples.map_samples(lambda sample: {"odd": True} if sample["cls"] % 2 else None))
        [{'__key__': 'a', 'odd': True}]
    """

    draws_globally = True
    function = staticmethod(map_samples)

    def __init__(self, source: IterDataPipe[Any], function: Function, *, on_error: OnError = "raise") -> None:
        _check_callable("map_samples applies a function to each sample", function)
        super().__init__(source, function=function, on_error=on_error)


class SeedingStage(SeededStage, FunctionStage[T_co], SnapshotStage[T_co]):
    """Base class of stages whose function gets a seed for each sample that is independent of process and order.

    Attributes:
        seeded_by: a name; stages with different names draw different numbers for the same sample.
    """

    shares_seed = True
    can_reshard = True
    seeded_by: str
    _own_seed = 0
    _state = ItemCounter()

    @property
    def has_state(self) -> bool:  # type: ignore[override]  # it depends on the stages before
        """Whether it counts items, because a user's stage may hold them back, so that their positions are unknown."""
        for stage in upstream(self.source):
            known = declared(stage)
            if known.position_reader() is not None:
                return False
            if known.has_state and not known.accepts_again:
                return True
        return False

    @property
    def is_stateless(self) -> bool:  # type: ignore[override]  # as above
        """Whether it counts no items."""
        return not self.has_state

    def snapshot(self) -> dict[str, Any]:
        """Return the number of items that neither their shards and keys nor their positions identify."""
        return {"passed": self._current().count}

    def load_state_dict(self, state: Mapping[str, Any], again: Awaited = NONE_AWAITED) -> None:  # noqa: ARG002 - users' stages are never read again
        """Load a state from which the next iteration resumes."""
        self._loaded = ItemCounter(state.get("passed", 0))

    def reset(self) -> None:
        """Start an epoch with the seed that was set for it, or one from torch's generator."""
        self._own_seed = self.take_seed()

    def function_options(self) -> dict[str, Any]:
        """Return the arguments of the function for a new iteration."""
        instance = find_rank_and_worker(self)
        seeds = SampleSeeds(
            self.seeded_by,
            self._own_seed,
            rank_and_worker=(instance.rank, instance.worker),
            repeats=any(declared(each).repeats_shards for each in upstream(self.source)),
            counter=self._start_progress(ItemCounter()),
            position=None if self.has_state else position_reader_of(self.source),
        )
        return {**super().function_options(), "seeds": seeds}


@register_stage("map_samples_with_rng")
class RngSampleMapper(SeedingStage[Any]):
    """Apply a function with a seeded random generator to each sample (functional name: ``map_samples_with_rng``).

    The function receives a sample and a ``random.Random`` whose seed derives from the loader's seed, the epoch, and the
    sample's ``__url__`` and ``__key__``. The random numbers of a sample therefore do not depend on the process, the
    order, or whether the run was resumed. If shards may occur more than once, as with ``.resample_wds_shards()``, or if
    items are not samples, the seed derives from rank, worker and position instead, so that each copy gets its own
    numbers.

    The generator is reused for the next sample: do not store it. Seed the generators of other libraries from it::

        def augment(sample, rng):
            noise = np.random.default_rng(rng.getrandbits(64)).normal(size=3)
            generator = torch.Generator().manual_seed(rng.getrandbits(63))
            torch.manual_seed(rng.getrandbits(63))  # torch's global generator, for torchvision's transforms
            ...

    Put this stage before ``.with_epoch()``, because after it, a sample that is repeated within an epoch gets the same
    numbers.

    Yields:
        Any: the results of the function, except ``None``. A dict keeps the ``__key__``, ``__url__``, ``__local_path__``
            and ``__padding__`` of its sample, unless it has its own.

    Args:
        source: yields samples, or anything else.
        function: a function of an item and a ``random.Random``.
        on_error: ``"raise"``; or, to skip the sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> def flip(sample, rng):
        ...     return {"image": sample["image"][::-1] if rng.random() < 0.5 else sample["image"]}
        >>> samples = [{"__key__": str(n), "__url__": "a.tar", "image": "ab"} for n in range(100)]
        >>> flipped = [sample["image"] for sample in IterableWrapper(samples).map_samples_with_rng(flip)]
        >>> 30 < flipped.count("ba") < 70
        True
    """

    draws_globally = True
    function = staticmethod(map_samples_with_rng)
    seeded_by = "map_samples_with_rng"

    def __init__(
        self, source: IterDataPipe[Any], function: Callable[[Any, Random], Any], *, on_error: OnError = "raise"
    ) -> None:
        _check_callable("map_samples_with_rng applies a function of a sample and a generator", function)
        super().__init__(source, function=function, on_error=on_error)


@register_stage("map_dict")
class DictMapper(FunctionStage[Sample]):
    """Apply functions to fields by name (functional name: ``map_dict``).

    Yields:
        dict: a new dict for each sample; the sample itself is unchanged.

    Args:
        source: yields samples.
        on_error: ``"raise"``; or, to skip the sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.
        by_field: the function to apply to each field.

    Raises:
        MissingFieldError: a sample lacks one of the fields.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([{"__key__": "a", "txt": "Hello"}]).map_dict(txt=str.upper))
        [{'__key__': 'a', 'txt': 'HELLO'}]
    """

    is_one_to_one = True
    draws_globally = True
    function = staticmethod(map_dict)

    def __init__(self, source: IterDataPipe[Sample], /, *, on_error: OnError = "raise", **by_field: Function) -> None:
        refuse_handler(by_field, "keywords are fields. For a field of that name, use map_samples")
        if not by_field:
            raise ValueError("map_dict needs a function for at least one field, as in map_dict(txt=str.upper)")
        for field, function in by_field.items():
            _check_callable(f"map_dict applies a function to the field {field!r}", function)
        super().__init__(source, functions=by_field, on_error=on_error)


@register_stage("map_tuple")
class TupleMapper(FunctionStage[tuple[Any, ...]]):
    """Apply functions to the elements of tuples by position (functional name: ``map_tuple``).

    Yields:
        tuple: a new tuple for each tuple or list.

    Args:
        source: yields tuples or lists.
        by_position: one function for each element, starting with the first; ``None`` leaves the element unchanged.
        on_error: ``"raise"``; or, to skip the tuple, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

    Raises:
        ValueError: there are more functions than elements.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([("a", 1)]).map_tuple(str.upper, None))
        [('A', 1)]
    """

    is_one_to_one = True
    draws_globally = True
    function = staticmethod(map_tuple)

    def __init__(
        self, source: IterDataPipe[Sequence[Any]], *by_position: Function | None, on_error: OnError = "raise"
    ) -> None:
        for function in by_position:
            if function is not None:
                _check_callable("map_tuple applies functions, or None to leave an element unchanged", function)
        super().__init__(source, functions=by_position, on_error=on_error)


@register_stage("compose")
class StreamComposer(EngineStage[Any]):
    """Apply a function to the whole stream of items (functional name: ``compose``).

    This turns a generator function of an iterator into a stage: it may yield several items for one, skip items, or
    combine adjacent ones. It is called once per epoch, and closed if the epoch is abandoned.

    A pipeline with this stage resumes by replay, because the function may store earlier items.

    Yields:
        Any: the items of the last function.

    Args:
        source: yields anything.
        through: functions from an iterator to an iterable, each applied to the items of the previous one; use
            ``functools.partial`` to pass arguments.

    Raises:
        TypeError: an argument is not a function, or does not return an iterable.

    Examples:
        >>> def pairs(numbers):
        ...     for number in numbers:
        ...         yield number
        ...         yield -number
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([1, 2]).compose(pairs))
        [1, -1, 2, -2]
    """

    draws_globally = True
    holds_items = True

    def __init__(self, source: IterDataPipe[Any], *through: Callable[[Iterator[Any]], Iterable[Any]]) -> None:
        if not through:
            raise TypeError("compose needs a function from an iterator to an iterator, as in compose(patches)")
        for function in through:
            _check_callable("compose takes functions from an iterator to an iterator", function)
        self.source = source
        self._through = OpaqueValue(through)

    def __iter__(self) -> Iterator[Any]:
        stream = iter(self.source)
        for function in self._through.value:
            items = function(stream)
            try:
                stream = iter(items)
            except TypeError:
                raise TypeError(f"compose: {function!r} must return an iterable, but returned {items!r}") from None
        yield from stream


def _check_callable(purpose: str, function: object) -> None:
    if not callable(function):
        raise TypeError(f"{purpose}, not {function!r}")
