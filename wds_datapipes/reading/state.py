"""The state of a pipeline: what its stages have to know to go on where they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data.datapipes.iter import Batcher, Collator, Filter, Mapper

from wds_datapipes.core.progress import Address
from wds_datapipes.errors import StateError
from wds_datapipes.pipes.advice import ADVICE, check_replay, name_of
from wds_datapipes.pipes.members import ShardLoader
from wds_datapipes.pipes.samples import SampleGrouper, SampleShuffler
from wds_datapipes.pipes.upstream import sources_of

__all__ = ["State", "check_state", "load_state", "save_state", "stateful"]

State = list[dict[str, Any]]
"""The states of the stages that have one, in the order in which the samples pass them."""

#: Stages of torch that hold nothing back once they have yielded an item.
HOLDING_NOTHING = (Batcher, Collator, Filter, Mapper)

#: What to use instead of stages that hold samples back.
INSTEAD = {
    **ADVICE,
    "CachedSamples": "Leave it out where a state is needed, and the samples are read from the shards again",
    "ColumnAdder": "Use .associate() with a table, or write the fields of all its shards into one",
    "EpochCutter": (
        "Leave it out, and let .resample_wds_shards(count) draw so many shards for an epoch, or let the loop count and "
        "save a state there"
    ),
    "SampleMixer": "Mix the shards instead, before .load_wds_shards(): DatasetSpec draws from several datasets",
    "StreamComposer": (
        "Use .map_samples() or .filter(), or write a class of your own, which holds nothing back between two items or "
        "has state_dict() and load_state_dict()"
    ),
    "SampleUnbatcher": ADVICE["UnBatcher"],
}


def save_state(pipe: Any) -> State:
    """Return the state of a pipeline between two items.

    Raises:
        StateError: a stage holds samples back, and has no state.
    """
    return [stage.state_dict() for stage in stateful(pipe)]


def check_state(pipe: Any) -> None:
    """Make sure that a pipeline has a state.

    Raises:
        StateError: a stage holds samples back, and has no state.
    """
    stateful(pipe)


def load_state(pipe: Any, state: Sequence[Mapping[str, Any] | None]) -> None:
    """Have a pipeline go on from a state when it is iterated next. A stage whose state is None begins anew.

    Raises:
        StateError: as `save_state`; or the state is one of other stages.
    """
    stages = stateful(pipe)
    if len(stages) != len(state):
        raise StateError(f"The state has {len(state)} stages, and the pipeline has {len(stages)} that have one")
    waiting: list[Address] = []  # in the stages behind
    for stage, own in reversed(list(zip(stages, state, strict=True))):
        if own is None:
            continue
        stage.load_state_dict(own, waiting)
        waiting += [Address(*address) for address in own.get("waiting", ())]


def _stages_of(pipe: Any) -> Iterator[Any]:
    """Yield the stages of a pipeline from the last to the one that reads the shards.

    Raises:
        StateError: there is none, or there are branches.
    """
    while True:
        yield pipe
        if isinstance(pipe, ShardLoader):
            return
        sources = list(sources_of(pipe))
        if len(sources) != 1:
            what = f"has {len(sources)} sources" if sources else "is no .load_wds_shards(), and has no source"
            raise StateError(
                f"The place in a pipeline is known by the shards that it reads, and {type(pipe).__name__} {what}"
            )
        pipe = sources[0]


def stateful(pipe: Any) -> list[Any]:
    """Return the stages that have a state, in the order in which the samples pass them."""
    found: list[Any] = []
    for stage in _stages_of(pipe):
        if isinstance(stage, ShardLoader):
            check_replay(stage)
            break
        if isinstance(stage, Batcher) and any(isinstance(behind, SampleShuffler) for behind in found):
            raise StateError(
                "shuffle_samples can tell where single samples are that wait in it, and here it is behind .batch(). "
                "Put .shuffle_samples() before .batch()"
            )
        if callable(getattr(stage, "state_dict", None)):
            found.append(stage)
        elif not (isinstance(stage, HOLDING_NOTHING) or getattr(stage, "holds_nothing", False) or _is_users(stage)):
            name = name_of(stage)
            instead = INSTEAD.get(name, "Leave it out, or put it behind the loader")
            raise StateError(f"{name} may hold samples back, and cannot tell which. {instead}")
    if not (found and isinstance(found[-1], SampleGrouper)):
        raise StateError("The place in a pipeline is known where samples are gathered: it needs .group_samples()")
    return found[::-1]


def _is_users(stage: object) -> bool:
    """Whether a stage's class is neither torch's nor torchdata's nor of this package."""
    return type(stage).__module__.partition(".")[0] not in ("torch", "torchdata", "wds_datapipes")
