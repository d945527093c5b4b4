"""What stages promise about what they hold back, and which stages are believed."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch.utils.data import IterableDataset, IterDataPipe
from torch.utils.data.datapipes.iter import Batcher, Collator, Filter, Mapper

from wds_datapipes.errors import StateError
from wds_datapipes.fingerprint.code import is_users as is_users_module
from wds_datapipes.pipes.state.unsupported import ADVICE, name_of

__all__ = ["check_promise", "has_state", "holds_nothing", "is_users", "takes_state_alone"]

#: Stages of torch that hold nothing back once they have yielded an item.
HOLDING_NOTHING = (Batcher, Collator, Filter, Mapper)

#: Classes whose loop is yet to be written.
WITHOUT_LOOP = (IterDataPipe, IterableDataset)

#: What to use instead of stages that hold samples back.
INSTEAD = {
    **ADVICE,
    "StreamComposer": (
        "If what its functions yield follows from each item alone, pass each_alone=True. If not, write a class of your "
        "own, with state_dict() and load_state_dict()"
    ),
    "SampleWriter": "Go on with write_wds_shards(resume=True), which keeps a journal of the finished shards",
}


def has_state(stage: Any) -> bool:
    """Return whether a stage has a state."""
    return (
        callable(getattr(stage, "state_dict", None))
        and getattr(stage, "has_state", True)
        and _is_promised(stage, "state_dict")
    )


def holds_nothing(stage: Any) -> bool:
    """Return whether a stage without a state holds nothing back once it has yielded an item."""
    if getattr(stage, "holds_nothing", False) and _is_promised(stage, "holds_nothing"):
        return True
    return _loop_of(type(stage)) in HOLDING_NOTHING


def is_users(stage: object) -> bool:
    """Return whether a stage's class is neither torch's nor torchdata's nor of this package."""
    return is_users_module(type(stage).__module__)


def takes_state_alone(stage: Any) -> bool:
    """Return whether ``load_state_dict`` of a stage can be called with the state as the only argument."""
    return _takes(stage, {})


def check_promise(stage: Any, behind: Sequence[Any]) -> None:
    """Make sure that it is known what a stage holds back, or that it holds nothing back.

    Args:
        stage: the stage.
        behind: the stages behind it.

    Raises:
        StateError: it is not known.
    """
    if not has_state(stage):
        if not holds_nothing(stage):
            raise StateError(_refusal(stage))
        return
    if not is_users(stage):
        return
    name = _full_name(stage)
    if not callable(getattr(stage, "load_state_dict", None)):
        raise StateError(f"{name} has state_dict() and no load_state_dict(), so that its state could not be loaded")
    if not takes_state_alone(stage) and not _takes(stage, {}, ()):
        raise StateError(
            f"{name}.load_state_dict{inspect.signature(stage.load_state_dict)} cannot be called with the state as its "
            "only argument, so that its state could not be loaded"
        )
    reader = next((each for each in reversed(behind) if getattr(each, "reads_samples_again", False)), None)
    if reader is not None and not (_takes(stage, {}, ()) and callable(getattr(stage, "address", None))):
        raise StateError(
            f"{name} has a state of its own, and is before {name_of(reader)}. To resume, the samples that wait there "
            f"are read from their shards again, and would pass {type(stage).__name__} a second time, which would "
            f"change its state. Put {type(stage).__name__} behind {name_of(reader)}"
        )


def _refusal(stage: Any) -> str:
    if not is_users(stage):
        name = name_of(stage)
        instead = INSTEAD.get(name, "Leave it out, or put it behind the loader")
        return f"{name} may hold samples back, and cannot tell which. {instead}"
    known = next((each for each in type(stage).__mro__ if not is_users_module(each.__module__)), IterDataPipe)
    inherited = "" if known in WITHOUT_LOOP else f" What is known of {known.__name__} says nothing of another __iter__."
    return (
        f"{_full_name(stage)} may hold samples back, and a state that lacks them would lose them.{inherited} If it "
        "keeps nothing from one item to the next, and yields at most one item before it reads on, say so in its class: "
        "holds_nothing = True. If it keeps something, add state_dict(), which returns that as values that JSON has, "
        "and load_state_dict(state). Or put it behind the loader"
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


def _takes(stage: Any, *arguments: Any) -> bool:
    try:
        inspect.signature(stage.load_state_dict).bind(*arguments)
    except TypeError:
        return False
    return True


def _full_name(stage: Any) -> str:
    return f"{type(stage).__module__}.{type(stage).__qualname__}"
