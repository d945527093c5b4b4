"""Reading the progress of Lightning's training loop, for states that it saves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from wds_datapipes.loading.checkpoint.format import Checkpoint
from wds_datapipes.seeds import derived_seed

__all__ = ["training_loop", "without_ended_epoch"]

#: How many calls are looked at between Lightning's loop and a loader.
DEPTH = 16


def training_loop() -> Any:
    """Return the ``FitLoop`` of Lightning that has called the caller, or None."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(DEPTH):
        if frame is None:
            break
        package, _, module = str(frame.f_globals.get("__name__")).partition(".")
        if package in ("lightning", "pytorch_lightning") and module.endswith("loops.fit_loop"):
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


def without_ended_epoch(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return what a loader loads: the end of the epoch, where Lightning has saved its state at the last step of one.

    The loop counts the steps, and begins the next epoch then. The loader has met no end, and would have none left.
    """
    loop = training_loop()
    progress = getattr(getattr(loop, "epoch_loop", None), "batch_progress", None)
    if not getattr(progress, "is_last_batch", False):
        return list(checkpoints)
    return [
        each if each.is_over else replace(each, is_over=True, wanted=each.epoch + 1 if _is_chosen(each) else None)
        for each in checkpoints
    ]


def _is_chosen(checkpoint: Checkpoint) -> bool:
    """Whether an epoch was chosen by its number, as the next one will be."""
    return checkpoint.seed == derived_seed("epoch", checkpoint.first, checkpoint.epoch)
