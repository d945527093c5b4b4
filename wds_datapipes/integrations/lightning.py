"""The checkpoints of PyTorch Lightning, which contain the states of loaders."""

from __future__ import annotations

from typing import Any

from wds_datapipes.loading.checkpoint.counted_epoch import COUNTED


def count_last_step(checkpoint: dict[str, Any]) -> None:
    """Let loaders begin the next epoch if Lightning saved a checkpoint at the last step of one.

    Lightning's loop has then counted the epoch, but the loaders have not reached its end, and would resume with no
    batches left. Call this in ``on_load_checkpoint`` of the ``LightningModule``, which Lightning calls before it loads
    the states of the loaders. A checkpoint of another step does not change.

    Args:
        checkpoint: the checkpoint, which changes in place.

    Examples:
        >>> class Model(lightning.LightningModule):  # doctest: +SKIP
        ...     def on_load_checkpoint(self, checkpoint):
        ...         count_last_step(checkpoint)
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    if loop.get("epoch_loop.batch_progress", {}).get("is_last_batch"):
        states = loop.get("state_dict", {})
        states["combined_loader"] = [{**state, COUNTED: True} for state in states.get("combined_loader", ())]
