"""Checks of the states that a `StatefulShards` loads: their pipeline, seed, ranks and worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import Checkpoint
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import PipelineGraph

#: Advice for programs with several ranks.
ADVICE = (
    "Gather the states of all ranks, and load the same merge_states([...]) on each; or save each rank's state under "
    "its own name, and load it on that rank. torch.distributed.checkpoint keeps one value per key, and loads that of "
    "rank 0 on all ranks"
)


def check_seed(checkpoint: Checkpoint, seeds: Sequence[int]) -> None:
    """Check that the orders of a state were drawn from the current seed, and that only this dataset splits the data.

    Args:
        checkpoint: the state of a rank.
        seeds: the possible seeds of the first epoch; the first is the actual one.

    Raises:
        StateError: they do not.
    """
    if checkpoint.next is not None and checkpoint.first not in seeds:
        raise StateError(
            f"The state was saved with seed {checkpoint.first}, but the seed here is {seeds[0]}. Pass StatefulShards "
            f"the seed of the loader that saved the state"
        )
    if checkpoint.engines is not None:
        raise StateError(
            "The state was saved after another reading service, whose share of the data is unknown here. Use "
            "ShardReadingService(distributed=True) instead of that service"
        )


def check_replay(checkpoint: Checkpoint) -> None:
    """Check that a state does not count the items of all workers together.

    Raises:
        StateError: it does.
    """
    if checkpoint.replay is not None and not checkpoint.is_over:
        raise StateError(
            "This is a state of ShardReadingService, which resumes by replaying the items of all workers together. "
            "Load it into one"
        )


def check_identity(checkpoint: Checkpoint, identity: tuple[int, int, bool, int] | None) -> None:
    """Check that the state of a single worker belongs to this worker.

    Args:
        checkpoint: the state of a rank, or of one of its workers.
        identity: the identity of this process, if it is a worker.

    Raises:
        StateError: it belongs to another one.
    """
    if checkpoint.worker is not None and checkpoint.identity != identity:
        raise StateError(
            f"This is the state of one worker, {checkpoint.worker} of {checkpoint.workers} on rank {checkpoint.rank} "
            f"of {checkpoint.ranks}, and only the same worker can resume from it. Load the whole state of the loader. "
            f"{ADVICE}"
        )


def check_ranks(
    loaded: Sequence[Checkpoint], rank: int, ranks: int, end_together: Callable[[], bool] = lambda: True
) -> None:
    """Check that this rank can resume from the states: they are of all ranks, or its own.

    A rank whose epoch has ended cannot know from its own state whether other ranks are still in that epoch.

    Args:
        loaded: the states of some ranks.
        rank: the number of this rank.
        ranks: the current number of ranks.
        end_together: returns whether epochs have the same number of items on each rank, or are known to have ended on
            all.

    Raises:
        StateError: it cannot.
    """
    first = loaded[0]
    if sorted(checkpoint.rank for checkpoint in loaded) == [*range(first.ranks)]:
        return
    if all(checkpoint.is_over and (checkpoint.epoch < 0 or checkpoint.next is None) for checkpoint in loaded):
        return  # none of them has started
    own = [checkpoint for checkpoint in loaded if (checkpoint.rank, checkpoint.ranks) == (rank, ranks)]
    if not own:
        raise StateError(
            f"This is the state of rank {first.rank} of {first.ranks}, but it was loaded on rank {rank} of {ranks}. "
            f"{ADVICE}"
        )
    if own[0].is_over and not end_together():
        raise StateError(
            f"The epoch of rank {rank} had ended when this state was saved, but the state does not record whether "
            f"those of the other {ranks - 1} had: this rank must either wait for them or begin the next epoch. Load "
            f"merge_states([...]) of the states that all ranks have saved between the same steps"
        )


def ends_together(pipe: Any) -> bool:
    """Whether an epoch of a pipeline has the same number of items on each rank, as with ``with_epoch``."""
    try:
        len(pipe)
    except TypeError:  # as after a filter
        return False
    for stage in PipelineGraph(pipe).chain:
        if declared(stage).declares_length:
            return False
        if declared(stage).spans_epochs:
            return True
    return False
