"""Base classes of stages, and a wrapper that hides values from torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from wds_datapipes.arguments import checks_calls
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.datapipes.iteration import checked
from wds_datapipes.errors import StateError
from wds_datapipes.on_error.policy import CountedErrors, OnError, check_on_error
from wds_datapipes.pipes.foreign_calls import functional_form
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.inspection import name_of, sources_of
from wds_datapipes.pipes.roles import Role, Transform
from wds_datapipes.samples.position_buffer import plain_state
from wds_datapipes.shards.held_samples import NONE_AWAITED, Awaited, ItemCounter
from wds_datapipes.shards.position import SamplePosition

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
C = TypeVar("C", bound=type[IterDataPipe[Any]])


class Stage(Role, IterDataPipe[T_co]):
    """Base class of stages whose state can be saved and loaded to resume a run in the middle of an epoch.

    A subclass stores its source in an attribute and defines ``__iter__``, which starts from the beginning each time.
    Its state is known if it belongs to one of two kinds:

    - **Stateless**: it keeps nothing between two items, and yields at most one item for each item that it reads. It
      sets ``is_stateless = True``.
    - **Stateful**: it defines `state_dict`, which returns everything that it keeps between two items, and
      `load_state_dict`. Loaders call `state_dict` after many or all items, so it must be cheap. Put such a stage after
      shuffles.

    A pipeline with a stage that is neither resumes by replay, which produces the items of the epoch again. A
    declaration applies only to the ``__iter__`` of its class; a subclass that overrides ``__iter__`` must repeat it.

    A stage that buffers samples does not save them: it sets ``rereads_samples``, and its state lists their positions in
    the shards under ``"waiting"``; see `source_position`. A stage that draws random numbers defines ``set_seed(seed)``,
    like torch's ``.shuffle()``. Loaders call it before each epoch: stages before the split get the same seed on all
    ranks and workers, and stages after it different ones. ``__len__`` returns the number of items of an epoch in this
    process; the default raises ``TypeError``.

    Attributes:
        is_stateless: whether it keeps nothing between two items, and yields at most one item for each item that it
            reads.
        rereads_samples: whether the samples at the ``"waiting"`` positions of its state are read again to resume.
        combines_samples: whether its items consist of several samples, as batches do, so that one position does not
            suffice to read an item again.
        can_reshard: whether the rest of an epoch can be assigned to a different number of workers, because its state
            consists only of ``"waiting"`` samples.
        shares_seed: whether all ranks and workers get the same seed even after the data is split.

    Examples:
        >>> class Lengths(Stage[int]):
        ...     is_stateless = True
        ...
        ...     def __init__(self, source):
        ...         self.source = source
        ...
        ...     def __iter__(self):
        ...         for sample in self.source:
        ...             yield len(sample["txt"])
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(Lengths(IterableWrapper([{"__key__": "a", "txt": "a cat"}])))
        [5]
    """

    has_state = False  # the methods below are placeholders
    on_error: OnError = "raise"
    # torch asks for this before each item, and its search for a missing attribute takes a microsecond.
    _is_child_datapipe = False

    def __init_subclass__(cls, **options: Any) -> None:
        own = vars(cls).keys()
        if own & {"snapshot", "state_dict"} and "has_state" not in own:
            # An inherited snapshot() lacks what a new state_dict() contains.
            cls.has_state = "snapshot" in own or cls.snapshot is Stage.snapshot
        super().__init_subclass__(**options)
        if "__iter__" in own and not hasattr(cls, "__next__"):
            cls.__iter__ = checked(cls.__iter__)  # type: ignore[method-assign]

    @property
    def counted_errors(self) -> Any:  # a CountedErrors, typed so that functions accept it as an OnError
        """``on_error``, combined with ``counters``."""
        return CountedErrors(self.on_error, self.counters)

    def __len__(self) -> int:
        """Return the number of items of an epoch in this process."""
        raise TypeError(
            f"{name_of(self)} has no length, because its items cannot be counted without reading them. "
            "IndexedSamples knows its length, and .with_epoch(n) makes epochs of n items"
        )

    def __bool__(self) -> bool:
        return True  # regardless of its length

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name[:1] == "_" else functional_form(self, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last item yielded, as a JSON-serializable dictionary."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from which the next iteration resumes.

        Args:
            state: a result of `state_dict`, or ``{}`` to start the next iteration from the beginning.
        """
        raise NotImplementedError(f"{type(self).__name__} has no load_state_dict()")

    def load_resumed_state(self, state: Mapping[str, Any], again: Awaited) -> None:  # noqa: ARG002
        """Load a state; stages of this package also yield first the samples that later stages have buffered."""
        self.load_state_dict(state)

    def is_even(self) -> bool:
        """Whether it yields equally many items on each rank if its source does, so that ranks stay in step."""
        return self.has_position or self.is_transparent or (self.is_one_to_one and self.on_error == "raise")

    def reset_state(self) -> None:
        """Discard a loaded state, so that the next iteration starts from the beginning.

        Raises:
            StateError: `load_state_dict` does not accept an empty state.
        """
        if not self.has_state or type(self).load_state_dict is Stage.load_state_dict:
            return
        try:
            self.load_state_dict({})
        except LookupError as error:
            raise StateError(
                f"{type(self).__name__}.load_state_dict({{}}) raised {error!r}. At the beginning of an epoch, the "
                "state is an empty dictionary: read its values with state.get()"
            ) from error

    def snapshot(self) -> dict[str, Any]:
        """Return the result of `state_dict`, which later items do not change; loaders call this after each item.

        Raises:
            StateError: the state is not JSON-serializable.
        """
        state = self.state_dict()
        try:
            frozen: dict[str, Any] = json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise StateError(
                f"The state of {type(self).__name__} must contain only JSON values, such as numbers, strings, lists, "
                f"and dicts with string keys: {error}"
            ) from error
        return frozen

    def source_position(self) -> Callable[[], SamplePosition] | None:
        """Return a function that returns the position of the last item read, or None if that is unknown.

        Call this once, at the start of ``__iter__``, and call the function after each item.
        """
        sources = list(sources_of(self))
        return position_reader_of(sources[0]) if len(sources) == 1 else None


class EngineStage(Stage[T_co]):
    """Base class of this package's stages, whose facts are internal, too; see `Role`."""

    draws_globally = False

    source: Any
    #: The loaded state, until the next iteration starts.
    _loaded: Any = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            checks_calls(cls)

    def __len__(self) -> int:
        """Return the number of items of an epoch in this process."""
        if not self.is_one_to_one:
            return super().__len__()
        if self.on_error != "raise":
            raise TypeError(f"{name_of(self)} has no length, because on_error={self.on_error!r} may skip items")
        return len(self.source)

    def load_resumed_state(self, state: Mapping[str, Any], again: Awaited) -> None:
        """Load a state, and the samples that later stages have buffered, which are yielded first and not counted."""
        self.load_state_dict(state, again)  # type: ignore[call-arg]  # those of this package take both

    def reset_state(self) -> None:
        """Discard a loaded state, so that the next iteration starts from the beginning."""
        if self._loaded is not None:
            self._loaded = None


class FunctionStage(Transform, EngineStage[T_co]):
    """Base class of stages that yield the items of a function, which keeps nothing between two items.

    The constructor of a subclass checks the function's options and passes them to this constructor.

    Args:
        source: the first argument of the function.
        options: the other arguments of the function, by name.

    Attributes:
        function: the function, as a static method.
    """

    function: Callable[..., Iterable[Any]]

    def __init__(self, source: Any, /, **options: Any) -> None:
        if "on_error" in options:
            check_on_error(options["on_error"])
            self.on_error = options["on_error"]
        self.source = source
        self._options = OpaqueValue(options)

    def function_options(self) -> dict[str, Any]:
        """Return the arguments of the function for a new iteration."""
        known = {"on_error": self.counted_errors} if "on_error" in self._options.value else {}
        return {**self._options.value, **known}

    def items_of(self, source: Any) -> Iterable[Any]:
        """Return the items of the function."""
        return self.function(source, **self.function_options())

    def __iter__(self) -> Iterator[T_co]:
        return iter(self.items_of(self.source))


class SnapshotStage(EngineStage[T_co]):
    """Base class of stages that define `snapshot` instead of `state_dict`, because their state may be large.

    A snapshot consists of values that no later item changes, and has `BufferContents` in place of the positions in a
    buffer.
    """

    #: The progress of the iteration.
    _state: Any

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last item yielded, as a JSON-serializable dictionary."""
        state: dict[str, Any] = plain_state(self.snapshot())
        return state

    def snapshot(self) -> dict[str, Any]:
        """Return the state after the last item yielded."""
        raise NotImplementedError

    def _current(self) -> Any:
        """Return the progress from which the next item comes."""
        return self._loaded or self._state

    def _start_progress(self, state: T) -> T:
        """Start an epoch with the loaded progress, or else with ``state``, and return it."""
        self._state, self._loaded = self._loaded or state, None
        started: T = self._state
        return started


class CountingStage(FunctionStage[T_co], SnapshotStage[T_co]):
    """Base class of stages whose function buffers nothing and counts the items that it reads."""

    is_stateless = False
    _state = ItemCounter()

    def snapshot(self) -> dict[str, Any]:
        """Return the number of items read in this epoch."""
        return {"count": self._current().count}

    def load_state_dict(self, state: Mapping[str, Any], again: Awaited = NONE_AWAITED) -> None:
        """Load a state from which the next iteration resumes.

        Args:
            state: the result of `state_dict`, or ``{}`` if only the items of ``again`` remain.
            again: the items that later stages have buffered; they are read again without being counted.
        """
        self._loaded = ItemCounter(state.get("count", 0), again)

    def function_options(self) -> dict[str, Any]:
        """Return the arguments of the function for a new iteration."""
        known = {"counter": self._start_progress(ItemCounter()), "position": position_reader_of(self.source)}
        return {**self._options.value, **known}


def iterated_by_loader(stage: C) -> C:
    """Remove the check for a second iterator from a class, because it takes 0.1 µs per item."""
    stage.__iter__ = stage.__iter__.__wrapped__  # type: ignore[attr-defined, method-assign]
    return stage


def position_reader_of(pipe: Any) -> Callable[[], SamplePosition] | None:
    """Return a function that returns the position of the last item a stage has yielded, or None if that is unknown."""
    while (reader := declared(pipe).position_reader()) is None:
        sources = list(sources_of(pipe))
        if len(sources) != 1:
            return None
        pipe = sources[0]
    return reader


class OpaqueValue(Generic[T]):
    """Wraps a value that torch should not search for datapipes.

    In every epoch, torch pickles each collection in an attribute to find datapipes in it. This takes long for a million
    URLs, and fails for a lambda.

    Attributes:
        value: the value.
    """

    def __init__(self, value: T) -> None:
        self.value = value
