"""Access to the progress of Lightning's training loop, for the states that it saves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from traceback import walk_stack
from typing import Any

from wds_datapipes.loading.checkpoint.format import Checkpoint
from wds_datapipes.loading.checkpoint.received import leave
from wds_datapipes.seeds import derived_seed
from wds_datapipes.user_warnings import warn_user

#: The maximum number of stack frames to search for Lightning's loop.
DEPTH = 16


def training_loop() -> Any:
    """Return Lightning's ``FitLoop`` in the call stack, or ``None``."""
    for frame, _ in islice(walk_stack(sys._getframe(1)), DEPTH):
        package, _, module = str(frame.f_globals.get("__name__")).partition(".")
        if package in ("lightning", "pytorch_lightning") and module.endswith("loops.fit_loop"):
            return frame.f_locals.get("self")
    return None


def resumes_after_last_step() -> bool:
    """Whether Lightning is loading a state that it saved at the last step of an epoch."""
    progress = getattr(getattr(training_loop(), "epoch_loop", None), "batch_progress", None)
    return bool(getattr(progress, "is_last_batch", False))


def without_ended_epoch(checkpoints: Sequence[Checkpoint], pipe: Any) -> list[Checkpoint]:
    """Return the checkpoints to load; if Lightning saved them at the last step of an epoch, the epoch counts as over.

    Lightning's loop counts its steps and starts the next epoch after that step, but the loader has not reached its end,
    and would resume with no items left.

    Args:
        checkpoints: the checkpoints of a state.
        pipe: the pipeline.
    """
    if not resumes_after_last_step():
        return list(checkpoints)
    return [
        each
        if each.is_over
        else replace(
            each, is_over=True, wanted=each.epoch + 1 if _is_chosen(each) else None, received=leave(each, pipe).rows
        )
        for each in checkpoints
    ]


def _is_chosen(checkpoint: Checkpoint) -> bool:
    """Whether the epoch was selected by its number, as the next one will be.

    Lightning creates the first iterator before it calls the hook that selects the first epoch, so this selection is
    still pending.
    """
    is_pending = checkpoint.wanted == checkpoint.epoch
    return is_pending or checkpoint.seed == derived_seed("epoch", checkpoint.first, checkpoint.epoch)


def unknown_length_error(error: TypeError) -> TypeError:
    """Return the error for a pipeline of unknown length; warn if Lightning needs the length.

    Lightning fetches one batch ahead from a loader without a length, to detect the last one, so its checkpoint contains
    the state after that batch.

    Args:
        error: the exception that ``len()`` of the pipeline raised.
    """
    if training_loop() is not None:
        warn_user(
            "Lightning fetches one batch ahead from a loader that has no length, so a checkpoint in the middle of an "
            "epoch counts a batch that was not trained on, and a resumed run skips it. End the epoch after n items "
            "with .with_epoch(n), with the same n on every rank"
        )
    return TypeError(
        f"{error}. End each epoch after n items with .with_epoch(n), with the same n on every rank; or, on a single "
        "rank, declare the number of its items with .with_length(n), if you know it"
    )
