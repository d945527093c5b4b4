"""States that go on with another number of ranks or workers: the rest of the epoch is dealt anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import Checkpoint, WorkerState
from wds_datapipes.loading.checkpoint.loader_states import checkpoints_in, state_of
from wds_datapipes.loading.checkpoint.shard_assignment import dealt_states
from wds_datapipes.loading.stateful_dataset.state_checks import check_ranks
from wds_datapipes.pipes.mixing import SampleMixer
from wds_datapipes.pipes.sharding import unsplit
from wds_datapipes.pipes.state.pipeline_state import replay_reason, stateful
from wds_datapipes.pipes.state.replay import ReplayedItems

__all__ = ["dealt_anew", "merge_states", "state_of_rank"]

#: The rank, of how many, whether the service splits among them, and the workers.
Place = tuple[int, int, bool, int]


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Put the states together that the ranks of a run have saved, each its own, between the same steps.

    The result can be loaded with any number of ranks and workers, on each rank the same. Where there are as many as
    before, each rank goes on exactly where it was. Otherwise what is left of the epoch is dealt anew: every sample that
    no rank had got comes once, in another order, and the next epoch is whole again.

    Args:
        states: what ``state_dict()`` of ``DataLoader2``, `ShardReadingService`, `StatefulShards` or
            ``StatefulDataLoader`` has returned on each rank, in any order.

    Returns:
        What ``load_state_dict()`` of all of them but ``StatefulDataLoader`` takes.

    Raises:
        StateError: a rank's state is missing or there twice, or they are of several pipelines or epochs.

    Examples:
        >>> from torchdata.dataloader2 import DataLoader2
        >>> pipe = ShardList("{a..c}.tar").sharding_filter().load_wds_shards().group_samples()
        >>> with DataLoader2(pipe, reading_service=ShardReadingService()) as loader:
        ...     state = merge_states([loader.state_dict()])
        >>> sorted(state)
        ['wds_datapipes']
    """
    if not states:
        raise StateError("There are no states to merge")
    checkpoints = list[Checkpoint]()
    for state in states:
        found = checkpoints_in(state)
        # A rank that has not begun since it has loaded a merged state saves that.
        if found != checkpoints[: len(found)]:
            checkpoints += found
    _check_whole(checkpoints)
    return state_of(checkpoints)


def state_of_rank(saved: Sequence[Checkpoint], pipe: Any, place: Place) -> Checkpoint:
    """Return where a rank goes on: where it was, if there are as many ranks and workers as before.

    Args:
        saved: the states of all ranks; or its own, if there are as many as before.
        pipe: the pipeline, before it is split.
        place: of this rank, among those that there are now.

    Raises:
        StateError: a rank's state is missing, or the pipeline cannot be dealt anew.
    """
    same = [checkpoint for checkpoint in saved if checkpoint.place == place]
    if not same and all(checkpoint.is_over for checkpoint in saved):
        check_ranks(saved, place[0], place[1])
        same = list(saved)
    found = same[0] if same else dealt_anew(saved, pipe, place)
    if not found.is_over:
        return found
    parts = [part.renewed() for part in found.parts]
    if not any(part.stages for part in parts):
        rank, ranks, distributed, workers = place
        return replace(found, parts=[], rank=rank, ranks=ranks, distributed=distributed, workers=workers)
    if found.place != place:
        raise StateError(
            "The next epoch goes on where each worker was in its own stream, as with_epoch has it, which means nothing "
            "where there is another number of them. Go on with as many ranks and workers as before"
        )
    return replace(found, parts=parts, turn=0)


def dealt_anew(saved: Sequence[Checkpoint], pipe: Any, place: Place) -> Checkpoint:
    """Return where a rank goes on when there are other ranks or workers than before.

    Args:
        saved: the states of all ranks.
        pipe: the pipeline, before it is split.
        place: of this rank, among those that there are now.

    Raises:
        StateError: a rank's state is missing, or the pipeline cannot be dealt anew.
    """
    rank, ranks, distributed, workers = place
    _check_whole(saved)
    if any(checkpoint.replay is not None for checkpoint in saved):
        raise StateError(
            f"{replay_reason(pipe)}. So the pipeline resumes by making its items again, which is possible only with as "
            "many ranks and workers as before"
        )
    _check_dealable(pipe)
    by_rank = sorted(saved, key=lambda checkpoint: checkpoint.rank)
    # In the order in which instances are numbered: the first worker of every rank, then the second.
    parts = [checkpoint.parts[number].state for number in range(len(by_rank[0].parts)) for checkpoint in by_rank]
    try:
        states = dealt_states(pipe, parts, [[] for _ in parts], ranks * max(workers, 1))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"What is left of the epoch cannot be dealt, as a state is not whole: {error}") from error
    resumed = [WorkerState(state) for state in states[rank::ranks]]
    running = next(checkpoint for checkpoint in saved if not checkpoint.is_over)
    return replace(
        running, rank=rank, ranks=ranks, distributed=distributed, workers=workers, turn=0, parts=resumed, engines=None
    )


def _check_whole(saved: Sequence[Checkpoint]) -> None:
    """Make sure that there are the states of all ranks, of one epoch."""
    first = saved[0]
    found = sorted(checkpoint.rank for checkpoint in saved)
    if any(checkpoint.ranks != first.ranks for checkpoint in saved) or found != list(range(first.ranks)):
        raise StateError(
            f"There are states of the ranks {', '.join(map(str, found))}, and they come from runs with "
            f"{', '.join(sorted({str(checkpoint.ranks) for checkpoint in saved}))}. To go on with another number of "
            f"ranks or workers takes one of each rank: merge_states([...])"
        )
    workers = [max(checkpoint.workers, 1) for checkpoint in saved]
    if len({*workers}) > 1:
        raise StateError(
            f"The ranks had {', '.join(map(str, workers))} workers, and shards are dealt to as many on each rank. Give "
            "every rank the same num_workers"
        )
    if any(checkpoint.engines is not None for checkpoint in saved):
        raise StateError(
            "The state comes from behind another reading service, and only ShardReadingService(distributed=True) knows "
            "which part each rank has"
        )
    of_one = {(tuple(each.stages), each.seed, each.epoch) for each in saved}
    if len(of_one) > 1:
        raise StateError("The states are not of one epoch: they were saved between different steps, or in several runs")


def _check_dealable(pipe: Any) -> None:
    """Make sure that what is left of a pipeline's epoch can be dealt anew."""
    stages = stateful(pipe)
    for stage in stages:
        if isinstance(stage, SampleMixer) and stage.stop != "all":
            raise StateError(
                f'What is left of mix_samples(stop="{stage.stop}") follows from what each worker has mixed, which '
                f"means nothing where there is another number of them. Go on with as many ranks and workers as before, "
                f'or mix with stop="all"'
            )
        if isinstance(stage, ReplayedItems):
            raise StateError(
                f"{stage.reason}. So the pipeline resumes by making its items again, which is possible only with as "
                "many ranks and workers as before"
            )
        if not stage.can_reshard:
            raise StateError(
                f"{type(stage).__name__} knows what each worker has read, or counts it, which means nothing where "
                f"there is another number of them. Go on with as many ranks and workers as before, or leave it out"
            )
    for branch in stages[0].nested_sources():
        _check_dealable(branch)
    if not stages[0].nested_sources():
        unsplit(stages[0].source.source)
