"""States at the last step of an epoch that a trainer has already counted, so that it continues with the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from wds_datapipes.epoch import Epoch
from wds_datapipes.loading.checkpoint.format import Checkpoint
from wds_datapipes.loading.checkpoint.received import leave

#: The key that marks such a state, beside its other keys.
COUNTED = "counts_epoch"


def counts_epoch(state: Any) -> bool:
    """Whether a state is marked as that of an epoch that its trainer has counted."""
    return isinstance(state, Mapping) and bool(state.get(COUNTED))


def without_counted_epoch(checkpoints: Sequence[Checkpoint], state: Any, pipe: Any) -> list[Checkpoint]:
    """Return the checkpoints to load: if the trainer has counted their epoch, it is over.

    The loader has not reached the end of the epoch, and would resume with no items left.

    Args:
        checkpoints: the checkpoints of a state.
        state: the state.
        pipe: the pipeline.
    """
    if not counts_epoch(state):
        return list(checkpoints)
    return [
        each
        if each.is_over
        else replace(
            each,
            is_over=True,
            epoch=replace(leave(each, pipe), wanted=each.epoch.number + 1 if _is_chosen(each.epoch) else None),
        )
        for each in checkpoints
    ]


def _is_chosen(epoch: Epoch) -> bool:
    """Whether the epoch was selected by its number, as the next one will be.

    Lightning creates the first iterator before it calls the hook that selects the first epoch, so this selection is
    still pending.
    """
    is_pending = epoch.wanted == epoch.number
    return is_pending or epoch.is_selected
