"""What the loaders return as their states: the checkpoints in it, whichever loader it comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from wds_datapipes.errors import StateError
from wds_datapipes.reading.checkpoint import Checkpoint

__all__ = ["KEY", "STREAM", "checkpoints_in", "state_of"]

FORMAT = "wds-datapipes states"
#: The format of what stands for the state of a worker that does not know which part of its stream the loop will have.
STREAM = "wds-datapipes stream"
#: Where ``DataLoader2`` has the state of its reading service.
KEY = "reading_service_state"


def state_of(checkpoints: Sequence[Checkpoint], *, is_one: bool) -> dict[str, Any]:
    """Return checkpoints as plain values, which JSON has.

    Args:
        checkpoints: of the ranks.
        is_one: whether the checkpoint of one rank is given as it is.
    """
    if is_one and len(checkpoints) == 1:
        return checkpoints[0].as_dict()
    return {"format": FORMAT, "states": [checkpoint.as_dict() for checkpoint in checkpoints]}


def checkpoints_in(state: Any) -> list[Checkpoint]:
    """Return the checkpoints that a state holds, one of each rank that it is of.

    Args:
        state: of a ``DataLoader2``, a ``StatefulDataLoader``, a `ShardReadingService` or a `StatefulShards`; or what
            `merge_states` has made of them.

    Raises:
        StateError: it holds none.
    """
    try:
        found = _found(state)
    except StateError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise StateError(f"This state of a loader is not whole: {type(error).__name__}: {error}") from None
    if not found:
        raise StateError("This is no state of a loader: it is one of no rank")
    return found


def _found(state: Any) -> list[Checkpoint]:
    if isinstance(state, bytes | str):
        try:
            state = json.loads(state)
        except (ValueError, RecursionError) as error:
            raise StateError(f"This is no state of a loader, since it is no JSON: {error}") from None
    if not isinstance(state, Mapping):
        raise StateError("This is no state of a loader: it does not say that it is one")
    if KEY in state:
        return _found(state[KEY])
    if "_snapshot" in state:
        return [_of_workers(state)]
    if "dataset_state" in state:
        return [replace(_only(state), is_over=bool(state["_iterator_finished"]))]
    if state.get("format") == STREAM:
        raise StateError(
            "A StatefulDataLoader does not know where a pipeline goes on that with_epoch cuts into epochs. Loop over "
            "data.tracked(loader), and save and load the data set: data.state_dict(), data.load_state_dict(state)"
        )
    if state.get("format") == FORMAT:
        return [Checkpoint.of_dict(each) for each in state["states"]]
    return [Checkpoint.of_dict(state)]


def _of_workers(state: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint in what a ``StatefulDataLoader`` with workers has returned."""
    if state["_steps_since_snapshot"]:
        raise StateError(
            f"This state of a StatefulDataLoader tells where its workers were {state['_steps_since_snapshot']} steps "
            f"before it was saved, and only a StatefulDataLoader can make those steps again. Save it with "
            f"snapshot_every_n_steps=1 to load it elsewhere"
        )
    snapshot = state["_snapshot"]
    found = snapshot["_worker_snapshots"]
    workers = [_only(found[f"worker_{number}"]) for number in range(len(found))]
    # The processes may have other numbers than the workers, whose turn it was when an epoch went on.
    turn = workers[(snapshot["_last_yielded_worker_id"] + 1) % len(workers)].worker or 0
    parts = [part for each in sorted(workers, key=lambda each: each.worker or 0) for part in each.parts]
    return replace(workers[0], worker=None, turn=turn, parts=parts, is_over=bool(state["_iterator_finished"]))


def _only(state: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint that a data set has returned to a ``StatefulDataLoader``."""
    if not isinstance(found := state.get("dataset_state"), Mapping):
        raise StateError("This is the state of a StatefulDataLoader whose data set is no StatefulShards")
    return _found(found)[0]
