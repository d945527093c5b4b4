"""The length of loaders: the items of an epoch on a rank, if the pipeline knows it."""

from __future__ import annotations

from typing import Any

from wds_datapipes.loading.lightning import training_loop
from wds_datapipes.loading.rank_and_worker import RankIdentity, WorkerIdentity, split_by_rank, split_by_worker
from wds_datapipes.pipes.epochs import EpochSetter, LengthSetter
from wds_datapipes.pipes.sharding import Instance, place_of, share
from wds_datapipes.pipes.state.graph import upstream
from wds_datapipes.user_warnings import warn_user

__all__ = ["length_of_rank", "unknown_length"]


def length_of_rank(pipe: Any, rank: int, ranks: int, workers: int) -> int:
    """Return how many items all workers of a rank yield together: what each of them has rounds its own batches.

    Args:
        pipe: a copy of the pipeline, which is split here.
        rank: the rank.
        ranks: how many there are.
        workers: how many each of them has.

    Raises:
        TypeError: the pipeline does not know its length.
    """
    own = RankIdentity(ranks, rank)
    if ranks > 1:
        split_by_rank(pipe, own)
    said = [(stage, stage.n) for stage in upstream(pipe) if isinstance(stage, EpochSetter | LengthSetter)]
    length = 0
    for worker in range(workers):
        split_by_worker(pipe, WorkerIdentity(workers, worker), own)
        for stage, count in said:  # of all workers of the rank together
            is_shared = isinstance(stage, LengthSetter)
            stage.n = share(count, Instance(rank, workers, worker) if is_shared else place_of(stage.source))
        length += len(pipe)
    return length


def unknown_length(error: TypeError) -> TypeError:
    """Return the error for a pipeline that does not know its length; warn where Lightning needs to know it.

    Lightning takes a batch ahead of a loader without a length, to see whether it is the last, and its checkpoint has
    the state behind that batch.

    Args:
        error: what ``len()`` of the pipeline has raised.
    """
    if training_loop() is not None:
        warn_user(
            "Lightning takes a batch ahead of a loader that has no length, so a checkpoint in the middle of an epoch "
            "counts a batch that was not trained on, and a resumed run never sees it. Declare how many items an epoch "
            "has on this rank with .with_length(n), or end it there with .with_epoch(n)"
        )
    return TypeError(f"{error}. Where you know how many items an epoch has on this rank, declare it: .with_length(n)")
