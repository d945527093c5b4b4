"""The base class of stages, their registration, and values that torch must not look into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch.utils.data import IterDataPipe

from wds_datapipes.samples.derived_position import pack_positions, unpack_positions
from wds_datapipes.shards.position import SamplePosition, SkippedCount

if TYPE_CHECKING:
    from wds_datapipes.pipes.sharding import Groups
    from wds_datapipes.pipes.state.recording import Form, Recorder

__all__ = ["CountingStage", "OpaqueValue", "Stage", "pack_positions", "register_stage", "unpack_positions"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
C = TypeVar("C", bound=type[IterDataPipe[Any]])


class Stage(IterDataPipe[T_co]):
    """Base class of stages that take part in the state of a pipeline.

    A state lets a run resume in the middle of an epoch. It holds the position in the shards, and what each stage adds
    to it. A subclass defines ``__iter__``, keeps the stage that it reads from in an attribute, and declares one of
    two things:

    - It is **stateless**: between two items it keeps nothing, and it yields at most one item for each that it reads.
      It sets ``is_stateless = True``, and there is nothing else to do.
    - It has a **state**: it defines `state_dict` and `load_state_dict`, and `reset_state` if it keeps a loaded state.

    Both promises hold for the loop of the class that makes them. A subclass that redefines ``__iter__`` makes its own.
    A pipeline with a stage that promises nothing resumes by replay: it makes the items of the epoch again.

    **State.** Loaders call `state_dict` after an item, often after each, so it has to be cheap. It returns a dictionary
    of values that JSON has. `load_state_dict` gets this dictionary before iteration begins, or ``{}`` if the stage
    only has to hand on items that later stages wait for. `reset_state` discards a loaded state. What is stored as
    ``"lasting"`` is loaded at the beginning of the next epoch, too.

    **Samples that wait.** A stage that holds samples back, such as a shuffle, does not store them. It sets
    ``rereads_samples = True`` and stores their positions as ``"waiting"``: ``pack_positions([...])`` of what the
    function returns that `source_position` provides, called after each item. When the state is loaded, the stages
    before yield the samples at these positions once more, before all others, in the order of their positions.

    **Position.** `position_reader` returns a function that returns the position of the item that was yielded last.
    The default, None, is right for a stage that yields an item before it reads another one: the position is that of
    the stage before. A stage with a state that defines it accepts ``again`` in `load_state_dict`: the positions of
    samples that later stages wait for, which it yields first, without counting them.

    **Seed.** A stage that draws defines ``set_seed(seed)``, as torch's ``.shuffle()`` does; loaders call it before
    each epoch. All ranks and workers get one seed before the data is split, and different ones after that, unless
    ``shares_seed`` is true.

    **Length.** ``__len__`` returns the number of items of an epoch in this process, and is left out if it is unknown.

    Attributes:
        is_stateless: whether it keeps nothing between two items, and yields at most one for each that it reads.
        rereads_samples: whether the samples at the ``"waiting"`` positions of its state are read again to resume.
        rereads_source: whether it resumes by reading its source from the beginning of the epoch.
        is_expanding: whether it makes several items of one, and makes them again from the same samples to resume.
        spans_epochs: whether an epoch begins where the last one ended.
        can_reshard: whether what is left of an epoch can be assigned to another number of workers: its state holds
            ``"waiting"`` samples, and nothing else that matters.
        is_transparent: whether it never affects which samples come, so that a state is valid with or without it.
        is_remote: whether its items come from another process, so that only the loader can restart it.
        shares_seed: whether all ranks and workers get one seed also after the data is split.
        repeats_shards: whether a shard may come more than once in an epoch.
        moves_share: of a stage that splits the data, whether `move_share` gives it the share of another worker.
        skipped_shards: how many shards it skips before it reads one, to resume.
        groups: of a stage that splits the data, among how many ranks and workers it does, and which this one is.

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

    # torch asks every stage for each item whether it is one of several that a stage makes. Where the class does not
    # have the answer, that is a search among the functional names, and an exception.
    _is_child_datapipe = False

    is_stateless: bool = False
    rereads_samples: bool = False
    rereads_source: bool = False
    is_expanding: bool = False
    spans_epochs: bool = False
    can_reshard: bool = False
    is_transparent: bool = False
    is_remote: bool = False
    shares_seed: bool = False
    repeats_shards: bool = False
    moves_share: bool = False
    skipped_shards: int = 0
    groups: Groups | None = None

    @property
    def has_state(self) -> bool:
        """Whether it has a state: by default, whether its class defines `state_dict`."""
        return type(self).state_dict is not Stage.state_dict

    def state_dict(self) -> dict[str, Any]:
        """Return what the stage needs to resume after the item that it has yielded last, as values that JSON has."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], again: Iterable[SamplePosition] = ()) -> None:
        """Resume from a state when it is iterated next.

        Args:
            state: what `state_dict` has returned; or ``{}``, if only the samples of ``again`` are left.
            again: positions of samples that later stages wait for, and that are yielded first.
        """
        raise NotImplementedError(f"{type(self).__name__} has no load_state_dict()")

    def reset_state(self) -> None:
        """Discard a loaded state, and start from the beginning when it is iterated next."""

    def record_state(self, recorder: Recorder) -> Form:
        """Return the form of what `state_dict` returns, for the records that loaders keep of each item.

        The default serves every stage; one with a large state overrides it to record what has changed alone.
        """
        return recorder.keep_json(self, self.state_dict())

    def position_reader(self) -> Callable[[], SamplePosition] | None:
        """Return a function that returns the position of the item that was yielded last.

        None stands for the position of the stage before; it is the default.
        """
        return None

    def source_position(self) -> Callable[[], SamplePosition] | None:
        """Return a function that returns the position of the item that was read last; None if it is not known.

        Call this once, at the beginning of ``__iter__``, and the function after each item.
        """
        from wds_datapipes.pipes.state.graph import position_reader_of, sources_of

        sources = list(sources_of(self))
        return position_reader_of(sources[0]) if len(sources) == 1 else None

    def positions_before(self, again: Sequence[SamplePosition]) -> list[SamplePosition]:
        """Return the positions that samples have before this stage, of those that they have after it."""
        return [*again]

    def nested_sources(self) -> Sequence[IterDataPipe[Any]]:
        """Return the sources that it starts by itself, at any time, and whose states are part of its own."""
        return ()

    def move_share(self, turn: int) -> None:
        """Take the share of the worker that is ``turn`` numbers further, if shares depend on this stage."""


class CountingStage(Stage[T_co]):
    """Base class of stages that hold nothing back, and count the items that pass."""

    _passed = SkippedCount()
    _loaded: SkippedCount | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return how many items have passed in this epoch."""
        return {"passed": (self._loaded or self._passed).count}

    def record_state(self, recorder: Recorder) -> Form:
        """Return the form of what `state_dict` returns."""
        return recorder.keep_values(self, self.state_dict())

    def load_state_dict(self, state: Mapping[str, Any], again: Iterable[SamplePosition] = ()) -> None:
        """Resume from a state when it is iterated next.

        Args:
            state: what `state_dict` has returned; or ``{}``, if only the items of ``again`` are left.
            again: positions of items that have passed, wait in later stages, and pass once more.
        """
        self._loaded = SkippedCount(state.get("passed", 0), again)

    def reset_state(self) -> None:
        """Discard a loaded state, and start from the beginning when it is iterated next."""
        self._loaded = None

    def _begin_counting(self) -> SkippedCount:
        """Begin an epoch, where a loaded state says if there is one."""
        self._passed, self._loaded = self._loaded or SkippedCount(), None
        return self._passed


def register_stage(name: str) -> Callable[[C], C]:
    """Register a class as a stage, as torch's ``functional_datapipe`` does, and leave all keywords to the class.

    torch builds the stage in a function with parameters called ``cls`` and ``source_dp``, so a keyword of that name
    is a TypeError there; and ``cls`` is among the most common fields.

    Raises:
        ValueError: the name is taken.
    """

    def register(stage: C) -> C:
        if name in IterDataPipe.functions:
            raise ValueError(f"the stage name {name!r} is taken already, so {stage.__name__} cannot have it")

        construct: Callable[..., IterDataPipe[Any]] = stage

        def build(source: IterDataPipe[Any], /, *arguments: Any, **options: Any) -> IterDataPipe[Any]:
            return construct(source, *arguments, **options)

        IterDataPipe.register_function(name, update_wrapper(build, stage, assigned=("__doc__",), updated=()))
        return stage

    return register


class OpaqueValue(Generic[T]):
    """A value that torch does not search for datapipes.

    torch pickles every collection in an attribute to find datapipes in it, again for each epoch. That takes long with
    a million URLs, and is an error with a lambda.

    Attributes:
        value: the value.
    """

    def __init__(self, value: T) -> None:
        self.value = value
