"""The error of ``len()`` of a loader whose pipeline does not know its length."""

from __future__ import annotations

import sys

from wds_datapipes.user_warnings import warn_user

#: The packages of PyTorch Lightning.
LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


def unknown_length_error(error: TypeError) -> TypeError:
    """Return the error for a pipeline of unknown length; warn in a program that has imported Lightning.

    Lightning fetches one batch ahead from a loader without a length, to detect the last one, so its checkpoint contains
    the state after that batch.

    Args:
        error: the exception that ``len()`` of the pipeline raised.
    """
    if any(package in sys.modules for package in LIGHTNING):
        warn_user(
            "Lightning fetches one batch ahead from a loader that has no length, so a checkpoint in the middle of an "
            "epoch counts a batch that was not trained on, and a resumed run skips it. End the epoch after n items "
            "with .with_epoch(n), with the same n on every rank"
        )
    return TypeError(
        f"{error}. End each epoch after n items with .with_epoch(n), with the same n on every rank; or, on a single "
        "rank, declare the number of its items with .with_length(n), if you know it"
    )
