"""Checks whether stages have a state or are stateless."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch.utils.data import IterableDataset

from wds_datapipes.datapipes import Batcher, Collator, Filter, IterDataPipe, Mapper
from wds_datapipes.errors import StateError
from wds_datapipes.fingerprint import is_users as is_users_module
from wds_datapipes.pipes.graph import name_of
from wds_datapipes.pipes.stage import SnapshotStage, Stage, as_stage

__all__ = ["check_declaration", "has_state", "is_stateless", "is_users"]

#: Stages of torch that keep nothing between two items.
STATELESS = (Batcher, Collator, Filter, Mapper)

#: Abstract classes, which define no loop.
WITHOUT_LOOP = (IterDataPipe, IterableDataset, Stage)

_MIXED = "Use .mix_samples(), or mix the shards before .load_wds_shards()"

#: Alternatives to stages without a position, by the names of their classes.
ALTERNATIVES = {
    "BatchMapper": "Use .batch(n) and .map()",
    "Concater": _MIXED,
    "Header": "Use .slice_samples(n)",
    "LengthSetter": "Use .with_length(n)",
    "Multiplexer": _MIXED,
    "PinMemory": "Use ShardReadingService(pin_memory=True)",
    "Prefetcher": "The workers of ShardReadingService prefetch items already",
    "SampleWriter": "Resume with write_wds_shards(resume=True), which keeps a journal of the finished shards",
    "ShardingFilter": "Put .sharding_filter() before .load_wds_shards()",
    "Shuffler": "Use .shuffle_samples(n) for samples; .shuffle() belongs before .load_wds_shards()",
    "Zipper": "Use .associate() with a table, or write all fields of a sample to one shard",
}


def has_state(stage: Any) -> bool:
    """Whether a stage has a state."""
    if isinstance(stage, SnapshotStage):
        return type(stage).state_dict is SnapshotStage.state_dict and _is_declared(stage, "snapshot")
    is_own = isinstance(stage, Stage) and type(stage).state_dict is not Stage.state_dict
    return is_own and _is_declared(stage, "state_dict")


def is_stateless(stage: Any) -> bool:
    """Whether a stage keeps nothing between two items."""
    if as_stage(stage).is_stateless and _is_declared(stage, "is_stateless"):
        return True
    return _loop_of(type(stage)) in STATELESS


def is_users(stage: object) -> bool:
    """Whether the class of a stage belongs neither to torch, nor to torchdata, nor to this package."""
    return is_users_module(type(stage).__module__)


def check_declaration(stage: Any, later_stages: Sequence[Any]) -> None:
    """Make sure that a stage has a state or is declared stateless.

    Args:
        stage: the stage.
        later_stages: the stages after it.

    Raises:
        StateError: it is neither, or its state cannot be loaded.
    """
    if not has_state(stage):
        if not is_stateless(stage):
            raise StateError(_refusal(stage))
        return
    if not is_users(stage):
        return
    name, own = _full_name(stage), type(stage)
    if own.load_state_dict is Stage.load_state_dict:
        raise StateError(f"{name} has state_dict() but no load_state_dict(), so its state cannot be loaded")
    try:
        inspect.signature(stage.load_state_dict).bind({}, ())
    except TypeError:
        raise StateError(
            f"{name}.load_state_dict{inspect.signature(stage.load_state_dict)} does not accept a state and the "
            "positions of samples to read again. Define it as load_state_dict(self, state, again=())"
        ) from None
    reader = next((each for each in reversed(later_stages) if as_stage(each).rereads_samples), None)
    if reader is not None and own.position_reader is Stage.position_reader:
        raise StateError(
            f"{name} has its own state, and comes before {name_of(reader)}. On resume, the samples held back there "
            f"are read from their shards again, and would pass through {own.__name__} a second time, which would "
            f"change its state. Put {own.__name__} after {name_of(reader)}, or define position_reader() and skip these "
            "samples"
        )


def _refusal(stage: Any) -> str:
    if not is_users(stage):
        name = name_of(stage)
        return ". ".join([f"{name} has no position in the shards", *filter(None, [ALTERNATIVES.get(name)])])
    known = next((each for each in type(stage).__mro__ if not is_users_module(each.__module__)), IterDataPipe)
    inherited = (
        "" if known in WITHOUT_LOOP else f" The declarations of {known.__name__} do not apply to another __iter__."
    )
    return (
        f"{_full_name(stage)} may hold samples back, and a state without them would lose them.{inherited} Derive it "
        "from wds_datapipes.Stage. If it keeps nothing between two items, and yields at most one item per item that it "
        "reads, set is_stateless = True in its class. Otherwise define state_dict() and load_state_dict(state, again). "
        "Or put it after the loader"
    )


def _is_declared(stage: Any, name: str) -> bool:
    """Whether a declaration of a class applies to the loop of the stage.

    It does not if the class inherits the declaration and defines its own loop.
    """
    if name in vars(stage):
        return True
    loop = _loop_of(type(stage))
    definer = next((each for each in type(stage).__mro__ if name in vars(each)), None)
    return definer is not None and _loop_of(definer) in (None, loop)


def _loop_of(kind: type) -> type | None:
    """Return the class that defines ``__iter__``, or None if none does."""
    found = next((each for each in kind.__mro__ if "__iter__" in vars(each)), None)
    return None if found in WITHOUT_LOOP else found


def _full_name(stage: Any) -> str:
    return f"{type(stage).__module__}.{type(stage).__qualname__}"
