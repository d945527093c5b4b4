"""Resharding of states, to resume with a different number of ranks or workers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from wds_datapipes.arguments import checks_calls
from wds_datapipes.epoch import Epoch
from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import ADVICE, Checkpoint, WorkerState, checkpoints_in, is_all, state_of
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.pipes.state.pipeline_state import (
    check_resharding,
    difference_of_ranks,
    refusing_corrupt_states,
    replay_reason,
    reshard_states,
)
from wds_datapipes.pipes.state.replay import is_replayed
from wds_datapipes.received_epochs import received_by_all
from wds_datapipes.shards.packed_rows import OUTLINE
from wds_datapipes.shards.position import Resharding
from wds_datapipes.types import Instance

#: The maximum number of ranks of a run.
MAX_RANKS = 1 << 20
#: Why the state of a rank is not that of all if that depends only on the position.
AT_THE_END = "each rank has its own state at the end of an epoch whose last batch is not whole"


@checks_calls
@refusing_corrupt_states()
def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Merge the states of all ranks of a run, saved between the same steps.

    The merged state can be loaded with any number of ranks and workers; all ranks load the same state. If the numbers
    have not changed, each rank resumes exactly where it left off. Otherwise, the rest of the epoch is resharded: every
    sample that no rank has received yet is yielded once, in a different order, and the next epoch is complete again.

    Args:
        states: the return value of ``state_dict()`` of ``DataLoader2``, `ShardReadingService`, `StatefulShards` or
            ``StatefulDataLoader`` on each rank, in any order. Ranks that read the same data, as in tensor parallelism,
            have equal states; passing one of them suffices.

    Returns:
        A state for ``load_state_dict()`` of any of these but ``StatefulDataLoader``.

    Raises:
        StateError: a rank's state is missing, ranks that read the same data have different states, or the states are
            from different pipelines or epochs.

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
    checkpoints: dict[str, Checkpoint] = {}
    # A rank that has loaded a merged state but has not started yet saves that state, including those of other ranks.
    for checkpoint in chain.from_iterable(map(checkpoints_in, states)):
        known = checkpoints.setdefault(checkpoint.owner, checkpoint)
        if known != checkpoint:
            raise StateError(
                f"There are two different states of {checkpoint.owner}. Ranks that read the "
                "same data must save their states after the same step of the same run, and states of loaders with "
                "distributed=False cannot be merged"
            )
    check_complete([*checkpoints.values()])
    return state_of([*checkpoints.values()])


@refusing_corrupt_states()
def outline_state(state: Mapping[str, Any]) -> dict[str, str]:
    """Return a state without the positions of waiting samples: a few hundred bytes for each worker.

    Given the outlines of all ranks, `ranks_to_read` returns the ranks whose full states are needed to resume with a
    different number of ranks. `merge_states` accepts an outline in place of a state. A rank that would have to resume
    from an outline raises a `StateError`.

    Args:
        state: the state of a loader, as for `merge_states`.

    Raises:
        StateError: it is not a state.
    """
    return state_of(_with_waiting(OUTLINE, checkpoints_in(state)))


def _with_waiting(waiting: Any, saved: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Replace the positions of waiting samples at any depth, because a mixture nests the states of its sources."""

    def replaced(part: WorkerState) -> WorkerState:
        hook = lambda state: {**state, **{name: waiting for name in ("waiting", "held") if state.get(name)}}  # noqa: E731
        return WorkerState.of(json.loads(part.text, object_hook=hook))

    return [replace(each, parts=[*map(replaced, each.parts)]) for each in saved]


@refusing_corrupt_states()
def ranks_to_read(
    outlines: Sequence[Mapping[str, Any] | str], pipe: Any, *, rank: int, ranks: int, workers: int = 0
) -> list[int]:
    """Return the previous ranks whose full states a rank needs to resume, in addition to the outlines of all ranks.

    Args:
        outlines: the results of `outline_state` for all ranks that have saved their states, or the texts in them.
        pipe: the pipeline of the loader.
        rank: the number of this rank.
        ranks: the current number of ranks.
        workers: the current number of worker processes per rank.

    Raises:
        StateError: an outline is missing, or the pipeline cannot be resharded.
    """
    saved, taken = _with_waiting([], chain.from_iterable(map(checkpoints_in, outlines))), set[int]()
    instance, before = Instance(rank, ranks, workers=workers), saved[0].instance
    if (instance.ranks, instance.count) == (before.ranks, before.count):
        return [rank]

    def take(number: int) -> tuple[()]:
        taken.add(number % before.ranks)
        return ()

    if not all(checkpoint.is_over for checkpoint in saved):
        _reshard(saved, pipe, instance, take)
    return sorted(taken)


def of_all_ranks(saved: Checkpoint, pipe: Any) -> Checkpoint:
    """Mark a state as that of all ranks if it does not depend on the rank.

    Args:
        saved: the state of a rank, or of one of its workers.
        pipe: the pipeline, for which `difference_of_ranks` returns "".
    """
    source = graph_of(pipe).chain[-1]
    states = [(part.stages[0], each) for part, each in zip(saved.parts, saved.instances(), strict=False) if part.stages]
    is_alike = all(state is None or source.is_alike_on_ranks(state, each) for state, each in states)
    return saved.of_all_ranks() if is_alike else saved


def place_of(saved: Sequence[Checkpoint], source: Any) -> tuple[int, int, dict[str, Any] | None]:
    """Return the epoch in which a run resumes, and the position of the first batch that no rank has begun.

    Args:
        saved: the states of all ranks, or of one that stands for all. For the state of a single worker, the position is
            0.
        source: the source that holds the phases of the run, or None.

    Returns:
        The epoch, the position, and the state there of a source that a single process reads; None if the position is 0.
    """
    first = saved[0]
    if all(each.is_over for each in saved):
        return first.epoch.number + 1, 0, None
    if source is None or first.is_of_worker:
        return first.epoch.number, 0, None
    alike = saved if _are_of_all(saved) else [first.of_all_ranks()]
    states = [stages and stages[0] for stages in states_of_instances(alike)]
    [rest] = source.reshard_states(Resharding(states, lambda _: (), 1, range(1)))
    return first.epoch.number, rest["rest"]["start"], rest


@refusing_corrupt_states()
def state_of_rank(saved: Sequence[Checkpoint], pipe: Any, instance: Instance) -> Checkpoint:
    """Return the state from which a rank resumes: its own, if the numbers of ranks and workers are unchanged.

    Args:
        saved: the states of all ranks, or only its own, if the number of ranks is unchanged.
        pipe: the pipeline, before the split.
        instance: this rank, among the current ranks, and its number of workers.

    Raises:
        StateError: a rank's state is missing, or the pipeline cannot be resharded.
    """
    on_rank = [checkpoint.on_rank(instance.rank) for checkpoint in saved]
    same = [checkpoint for checkpoint in on_rank if checkpoint.is_of(instance)]
    if not same and all(checkpoint.is_over for checkpoint in saved):
        check_ranks(saved, instance)
        same = list(saved)
    found = same[0] if same else _reshard(saved, pipe, instance)
    if not found.is_over:
        return found
    parts = [part.renewed() for part in found.parts]
    if not any(part.stages for part in parts):
        return found.on(instance, parts=[], epoch=found.epoch if found.is_of(instance) else epoch_of_all(saved, found))
    if not found.is_of(instance):
        raise StateError(
            "With with_epoch, the next epoch continues the stream of each worker, so the state is invalid with a "
            "different number of ranks or workers. Resume with as many ranks and workers as before"
        )
    return replace(found, parts=parts, next_worker=0)


def _reshard(saved: Sequence[Checkpoint], pipe: Any, instance: Instance, waiting: Any = lambda _: ()) -> Checkpoint:
    """Return the state from which a rank resumes with a different number of ranks or workers.

    Args:
        saved: the states of all ranks.
        pipe: the pipeline.
        instance: this rank and its number of workers.
        waiting: called with the number of each previous worker whose samples it takes over.
    """
    check_complete(saved, pipe)
    parts = [part for checkpoint in saved for part in checkpoint.parts]
    if any(is_replayed(part.stages) for part in parts):
        raise StateError(
            f"{replay_reason(pipe)}. The pipeline therefore resumes by replaying its items, which requires as many "
            "ranks and workers as before"
        )
    check_resharding(pipe)
    own = states_of_instances(saved)
    rest = Resharding(own, waiting, instance.count, range(instance.rank, instance.count, instance.ranks))
    resumed = [*map(WorkerState.of, reshard_states(pipe, rest))]
    running = next(checkpoint for checkpoint in saved if not checkpoint.is_over)
    return running.on(instance, next_worker=0, parts=resumed, epoch=epoch_of_all(saved, running))


def epoch_of_all(saved: Sequence[Checkpoint], own: Checkpoint | None = None) -> Epoch:
    """Return the epoch of some ranks, by default of the first, with what the loops of all have received."""
    received = received_by_all([each.epoch.received for each in saved])
    return replace((own or saved[0]).epoch, received=received)


def states_of_instances(saved: Sequence[Checkpoint]) -> list[Sequence[Mapping[str, Any] | None] | None]:
    """Return the pipeline states of all instances: of the first worker of each rank, then of the second, and so on.

    Raises:
        StateError: a rank's state is missing.
    """
    check_complete(saved)
    if saved[0].is_of_all_ranks:
        by_rank = [saved[0]] * saved[0].instance.ranks
    else:
        by_rank = sorted(saved, key=lambda each: each.instance.rank)
    return [checkpoint.parts[number].stages for number in range(len(by_rank[0].parts)) for checkpoint in by_rank]


def _are_of_all(saved: Sequence[Checkpoint]) -> bool:
    """Whether the states, or a single one that all share, are those of all ranks of a run."""
    ranks = saved[0].instance.ranks
    if saved[0].is_of_all_ranks:
        return len(saved) == 1 and 0 < ranks <= MAX_RANKS
    if any(each.is_of_all_ranks or each.instance.ranks != ranks for each in saved):
        return False
    return is_all(sorted(each.instance.rank for each in saved), ranks)


def check_complete(saved: Sequence[Checkpoint], pipe: Any = None) -> None:
    """Check that the states are those of all ranks, in the same epoch; ``pipe`` explains why one does not suffice."""
    if not _are_of_all(saved):
        why = "" if pipe is None else f", as {difference_of_ranks(pipe) or AT_THE_END}"
        raise StateError(
            f"There are states of {', '.join(sorted(each.owner for each in saved))}. Resuming with a different number "
            f"of ranks or workers requires one state per rank: merge_states([...]){why}"
        )
    workers = [max(checkpoint.instance.workers, 1) for checkpoint in saved]
    if len({*workers}) > 1:
        raise StateError(
            f"The ranks had {', '.join(map(str, workers))} workers, but shards are assigned to the same number of "
            "workers on each rank. Give every rank the same num_workers"
        )
    of_one = {(tuple(each.stages), each.epoch.seed, each.epoch.number) for each in saved}
    if len(of_one) > 1:
        raise StateError(
            "The states are from different epochs: they were saved after different steps, or in different runs"
        )


def check_ranks(loaded: Sequence[Checkpoint], instance: Instance, pipe: Any = None) -> None:
    """Check that this rank can resume from the states, which must be those of all ranks or its own.

    If the epoch of a rank has ended, its own state does not show whether other ranks are still in that epoch.

    Args:
        loaded: the states of some ranks.
        instance: this rank, among the current ranks.
        pipe: the pipeline, unless its epoch is known to have ended on all ranks.

    Raises:
        StateError: it cannot.
    """
    if _are_of_all(loaded):
        return
    if all(
        checkpoint.is_over and (checkpoint.epoch.number < 0 or checkpoint.epoch.next is None) for checkpoint in loaded
    ):
        return  # none of the ranks has started
    here = f"rank {instance.rank} of {instance.ranks}"
    own = [checkpoint for checkpoint in loaded if checkpoint.owner == here]
    if not own:
        raise StateError(
            f"This is the state of {loaded[0].owner}, but it was loaded on {here}"
            f"{'' if pipe is None else f', and {difference_of_ranks(pipe) or AT_THE_END}'}. {ADVICE}"
        )
    if own[0].is_over and pipe is not None and not _ends_together(pipe):
        raise StateError(
            f"The epoch of rank {instance.rank} had ended when this state was saved, but the state does not record "
            f"whether those of the other {instance.ranks - 1} had: this rank must either wait for them or begin the "
            "next epoch. Load merge_states([...]) of the states that all ranks have saved between the same steps"
        )


def _ends_together(pipe: Any) -> bool:
    """Whether an epoch of a pipeline has the same number of items on each rank, as with ``with_epoch``."""
    graph = graph_of(pipe)
    try:
        len(graph.pipe)
    except TypeError:  # for example, after a filter
        return False
    for stage in graph.chain:
        if declared(stage).declares_length():
            return False
        if declared(stage).spans_epochs:
            return True
    return False
