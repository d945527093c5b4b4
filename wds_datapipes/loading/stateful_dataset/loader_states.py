"""The states that a ``StatefulDataLoader`` saves, for the checks that are added to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wds_datapipes.loading.checkpoint.counted_epoch import counts_epoch
from wds_datapipes.loading.splitting import has_own_stage
from wds_datapipes.loading.stateful_dataset.dataset import StatefulShards


def missing_position(loader: Any, state: Mapping[str, Any]) -> str:
    """Return why a ``StatefulDataLoader`` cannot resume from a state that it has saved, or ""."""
    steps = state.get("_num_yielded"), state.get("_steps_since_snapshot"), state.get("_snapshot", {})
    if not (any(steps[:2]) or steps[2].get("_snapshot_step")) or not has_own_stage(loader.dataset):
        return ""
    return (
        "This state of a StatefulDataLoader was saved after the first batch, and does not contain the position of its "
        "pipeline in the epoch: some samples would be repeated and others lost. Pass StatefulShards(pipe) instead of "
        "the pipeline: the state of StatefulDataLoader(StatefulShards(pipe), ...) is exact in the middle of an epoch"
    )


def load_ended_epoch(data: Any, state: Mapping[str, Any]) -> bool:
    """Load a state of a ``StatefulDataLoader`` into its dataset if a trainer has counted its epoch.

    Otherwise, the loader would begin that epoch again without any items, and the trainer would treat it as the next
    one.

    Args:
        data: the dataset of the loader.
        state: the state to load.

    Returns:
        bool: whether the dataset has loaded it.

    Raises:
        StateError: the state belongs to another rank, or to one whose epoch ended while other ranks may have been
            mid-epoch.
    """
    if not state or not isinstance(data, StatefulShards):
        return False
    state = {**state, "_steps_since_snapshot": 0}  # the loader itself repeats these steps
    data.epochs.state.check(state)
    if not counts_epoch(state):
        return False
    data.load_state_dict(state)
    return True
