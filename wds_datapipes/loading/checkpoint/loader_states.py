"""States of loaders, and the checkpoints in them, for all kinds of loaders.

A state is a dictionary with one JSON text. So it always has the same shape, and anything that saves dictionaries keeps
it unchanged: torch's distributed checkpoints load only the keys that they find in the state of a loader that has not
started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import Checkpoint

#: The only key of a state.
STATE = "wds_datapipes"
#: The version of the format.
VERSION = 7
#: Replaces the state of a worker that does not know which part of its stream the loop will receive.
STREAM = "stream"
#: The key of the pickled pipeline in the state of a ``DataLoader2`` with a reading service of torchdata.
PICKLE = "serialized_datapipe"
#: The keys at which ``torchdata.nodes`` keep the state of their source.
NODES = ("root", "it_state", "source", "snapshot", "iterable")


def state_of(checkpoints: Sequence[Checkpoint]) -> dict[str, str]:
    """Return the state that holds the checkpoints of some ranks."""
    return {STATE: text_of(checkpoints)}


def text_of(checkpoints: Sequence[Checkpoint]) -> str:
    """Return the text of a state."""
    return _encode([checkpoint.as_dict() for checkpoint in checkpoints])


def state_of_stream() -> dict[str, str]:
    """Return the state of a worker that does not know which part of its stream the loop will receive."""
    return {STATE: _encode(STREAM)}


def _encode(ranks: Any) -> str:
    return json.dumps({"version": VERSION, "crc32": _crc32(ranks), "ranks": ranks}, separators=(",", ":"))


def _crc32(ranks: Any) -> int:
    return crc32(json.dumps(ranks).encode())


def checkpoints_in(state: Any) -> list[Checkpoint]:
    """Return the checkpoints in a state, one for each of its ranks.

    Args:
        state: the state of a ``DataLoader2``, a ``StatefulDataLoader``, a `ShardReadingService` or a `StatefulShards`;
            or the result of `merge_states`; or the text of a state.

    Raises:
        StateError: it contains none.
    """
    try:
        found = _find_checkpoints(state)
    except StateError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise StateError(f"This state of a loader is corrupt: {type(error).__name__}: {error}") from None
    if not found:
        raise StateError("This is not the state of a loader: it contains no ranks")
    return found


def _find_checkpoints(state: Any) -> list[Checkpoint]:
    if isinstance(state, bytes | str):
        return _decode(state)
    if not isinstance(state, Mapping):
        raise StateError(f"This is not the state of a loader, a dictionary with the key {STATE!r}: {state!r:.100}")
    if STATE in state:
        # A run that loads the state of an earlier run does not hold any of its items.
        return [replace(checkpoint, is_drained=False) for checkpoint in _decode(state[STATE])]
    if "_snapshot" in state:
        return [_of_workers(state)]
    if "dataset_state" in state:
        is_over = bool(state["_iterator_finished"])
        return [_of_main_process(checkpoint, is_over) for checkpoint in _of_dataset(state)]
    if inner := [state[key] for key in NODES if key in state]:
        if state.get("steps_since_snapshot") or state.get("batch_idx"):
            raise StateError(
                "This state of torchdata.nodes was saved some items after the position of its source, and only the "
                "same nodes can continue there. Save it with snapshot_frequency=1, and without Unbatcher"
            )
        return _find_checkpoints(inner[0])
    if PICKLE in state:
        raise StateError(
            "This is a state of torchdata: a pickled pipeline, without the position of the loop in the epoch. Save the "
            "state of a DataLoader2 with ShardReadingService, which contains the position"
        )
    keys = ", ".join(map(repr, state)) or "none"
    raise StateError(f"This is not the state of a loader, which has the key {STATE!r}; its keys: {keys:.200}")


def _decode(text: Any) -> list[Checkpoint]:
    """Return the checkpoints in the text of a state."""
    try:
        found = json.loads(text)
        version = found["version"]
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise StateError(f"This is not the state of a loader, a JSON text with its version: {error}") from None
    if version != VERSION:
        raise StateError(
            f"This state has version {version}, but this release of wds-datapipes reads only version {VERSION}. Load "
            "it with the release that saved it, or restart the epoch"
        )
    if found.get("crc32") != _crc32(found.get("ranks")):
        raise StateError("This state of a loader is corrupt: its checksum differs. Load another one")
    if found["ranks"] == STREAM:
        raise StateError(
            "A StatefulDataLoader cannot determine the position of a pipeline that with_epoch cuts into epochs. Loop "
            "over data.tracked(loader), and save and load the dataset: data.state_dict(), data.load_state_dict(state)"
        )
    return [Checkpoint.of_dict(each) for each in found["ranks"]]


def _of_main_process(checkpoint: Checkpoint, is_over: bool) -> Checkpoint:
    """Return the checkpoint of a ``StatefulDataLoader`` without workers.

    Args:
        checkpoint: the checkpoint of its dataset.
        is_over: whether the loop has ended.
    """
    if checkpoint.is_drained and not is_over:
        checkpoint = replace(checkpoint, is_over=False)
    return replace(checkpoint, is_drained=False)


def _of_workers(state: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint in the state of a ``StatefulDataLoader`` with workers."""
    if state["_steps_since_snapshot"]:
        raise StateError(
            f"This state of a StatefulDataLoader contains the positions of its workers "
            f"{state['_steps_since_snapshot']} steps before it was saved, and only a StatefulDataLoader can repeat "
            f"these steps. To load it elsewhere, save it with snapshot_every_n_steps=1"
        )
    snapshot = state["_snapshot"]
    found = snapshot["_worker_snapshots"]
    workers = [_of_dataset(found[f"worker_{number}"])[0] for number in range(len(found))]
    own = sorted(workers, key=lambda each: each.worker or 0)
    if [each.worker for each in own] != [*range(own[0].workers)]:
        raise StateError(
            f"This state of a StatefulDataLoader is incomplete: it belongs to {own[0].workers} workers, and contains "
            f"the states of these: {', '.join(str(each.worker) for each in own)}"
        )
    # If an epoch was resumed, the numbers of the processes may differ from those of the workers.
    turn = workers[(snapshot["_last_yielded_worker_id"] + 1) % len(workers)].worker or 0
    parts = [part for each in own for part in each.parts]
    return replace(workers[0], worker=None, turn=turn, parts=parts, is_over=bool(state["_iterator_finished"]))


def _of_dataset(state: Mapping[str, Any]) -> list[Checkpoint]:
    """Return the checkpoints in the state of a dataset within that of a ``StatefulDataLoader``.

    Raises:
        StateError: the dataset is not a `StatefulShards`.
    """
    found = state.get("dataset_state")
    if not isinstance(found, Mapping) or STATE not in found:
        raise StateError("This is the state of a StatefulDataLoader whose dataset is not a StatefulShards")
    return _decode(found[STATE])


def has_begun(state: Mapping[str, Any]) -> bool:
    """Whether a state of a ``StatefulDataLoader`` was saved after the first batch."""
    steps = state.get("_num_yielded", 0), state.get("_steps_since_snapshot", 0)
    return any(steps) or state.get("_snapshot", {}).get("_snapshot_step", 0) > 0
