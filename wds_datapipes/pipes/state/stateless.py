"""The promises of stages: which of them have a state, and which are stateless."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch.utils.data import IterableDataset, IterDataPipe
from torch.utils.data.datapipes.iter import Batcher, Collator, Filter, Mapper

from wds_datapipes.errors import StateError
from wds_datapipes.fingerprint.code import is_users as is_users_module
from wds_datapipes.pipes.stage import Stage
from wds_datapipes.pipes.state.graph import as_stage
from wds_datapipes.pipes.state.unsupported import ADVICE, name_of

__all__ = ["check_promise", "has_state", "is_stateless", "is_users"]

#: Stages of torch that keep nothing between two items.
STATELESS = (Batcher, Collator, Filter, Mapper)

#: Classes whose loop is yet to be written.
WITHOUT_LOOP = (IterDataPipe, IterableDataset, Stage)

#: What to use instead of stages that hold samples back.
INSTEAD = {
    **ADVICE,
    "StreamComposer": (
        "If what its functions yield follows from each item alone, pass each_alone=True. If not, derive a class from "
        "wds_datapipes.Stage that defines state_dict() and load_state_dict()"
    ),
    "SampleWriter": "Go on with write_wds_shards(resume=True), which keeps a journal of the finished shards",
}


def has_state(stage: Any) -> bool:
    """Return whether a stage has a state."""
    return as_stage(stage).has_state and _is_promised(stage, "state_dict")


def is_stateless(stage: Any) -> bool:
    """Return whether a stage keeps nothing between two items."""
    if as_stage(stage).is_stateless and _is_promised(stage, "is_stateless"):
        return True
    return _loop_of(type(stage)) in STATELESS


def is_users(stage: object) -> bool:
    """Return whether a stage's class is neither torch's nor torchdata's nor of this package."""
    return is_users_module(type(stage).__module__)


def check_promise(stage: Any, behind: Sequence[Any]) -> None:
    """Make sure that a stage has a state or is stateless.

    Args:
        stage: the stage.
        behind: the stages after it.

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
        raise StateError(f"{name} has state_dict() and no load_state_dict(), so its state could not be loaded")
    try:
        inspect.signature(stage.load_state_dict).bind({}, ())
    except TypeError:
        raise StateError(
            f"{name}.load_state_dict{inspect.signature(stage.load_state_dict)} does not take a state and the "
            "positions of samples that come again, as in load_state_dict(self, state, again=())"
        ) from None
    reader = next((each for each in reversed(behind) if as_stage(each).rereads_samples), None)
    if reader is not None and own.position_reader is Stage.position_reader:
        raise StateError(
            f"{name} has a state of its own, and is before {name_of(reader)}. To resume, the samples that wait there "
            f"are read from their shards again, and would pass {own.__name__} a second time, which would change its "
            f"state. Put {own.__name__} after {name_of(reader)}, or define position_reader() and skip these samples"
        )


def _refusal(stage: Any) -> str:
    if not is_users(stage):
        name = name_of(stage)
        instead = INSTEAD.get(name, "Leave it out, or put it after the loader")
        return f"{name} may hold samples back, and cannot tell which. {instead}"
    known = next((each for each in type(stage).__mro__ if not is_users_module(each.__module__)), IterDataPipe)
    inherited = "" if known in WITHOUT_LOOP else f" What is known of {known.__name__} says nothing of another __iter__."
    return (
        f"{_full_name(stage)} may hold samples back, and a state that lacks them would lose them.{inherited} Derive it "
        "from wds_datapipes.Stage. If it keeps nothing between two items, and yields at most one for each that it "
        "reads, set is_stateless = True in its class. Otherwise define state_dict() and load_state_dict(state, again). "
        "Or put it after the loader"
    )


def _is_promised(stage: Any, name: str) -> bool:
    """Return whether what a class says of itself is said of the loop that the stage has.

    A class that inherits the promise and has a loop of its own has promised nothing.
    """
    if name in vars(stage):
        return True
    loop = _loop_of(type(stage))
    definer = next((each for each in type(stage).__mro__ if name in vars(each)), None)
    return definer is not None and _loop_of(definer) in (None, loop)


def _loop_of(kind: type) -> type | None:
    """Return the class that has defined ``__iter__``, or None if none has."""
    found = next((each for each in kind.__mro__ if "__iter__" in vars(each)), None)
    return None if found in WITHOUT_LOOP else found


def _full_name(stage: Any) -> str:
    return f"{type(stage).__module__}.{type(stage).__qualname__}"
