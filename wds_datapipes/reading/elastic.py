"""States that go on with another number of ranks or workers: the rest of the epoch is dealt anew."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import graph_settings
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2.graph._serialization import clone
from torchdata.dataloader2.random import SeedGenerator
from torchdata.dataloader2.utils import WorkerInfo

from wds_datapipes.errors import StateError
from wds_datapipes.pipes.mixing import SampleMixer
from wds_datapipes.pipes.samples import SampleGrouper, SampleShuffler
from wds_datapipes.pipes.state import State, branches_of, save_state, stateful
from wds_datapipes.pipes.upstream import unsplit
from wds_datapipes.reading.checkpoint import Checkpoint
from wds_datapipes.reading.dealing import dealt_states
from wds_datapipes.reading.resuming import Resumed
from wds_datapipes.reading.saved import KEY, checkpoints_in, state_of
from wds_datapipes.reading.seeding import reset_pipeline, returned
from wds_datapipes.reading.serving import split

__all__ = ["Workplace", "behind_delivered", "dealt_anew", "merge_states", "placed"]

#: The rank, of how many, whether the service splits among them, and the workers.
Place = tuple[int, int, bool, int]

T = TypeVar("T", bytes, dict[str, Any])


def merge_states(states: Sequence[T]) -> T:
    """Put the states together that the ranks of a run have saved, each its own, between the same steps.

    The result can be loaded with any number of ranks and workers, on each rank the same. Where there are as many as
    before, each rank goes on exactly where it was. Otherwise what is left of the epoch is dealt anew: every sample that
    no rank had got comes once, in another order, and the next epoch is whole again.

    Args:
        states: what ``state_dict()`` of ``DataLoader2``, `ShardReadingService`, `StatefulShards` or
            ``StatefulDataLoader`` has returned on each rank, in any order.

    Returns:
        What ``DataLoader2.load_state_dict()`` takes, if the states are those of ``DataLoader2``. Otherwise what
        `ShardReadingService` and `StatefulShards` take.

    Raises:
        StateError: a rank's state is missing or there twice, or they are of several pipelines or epochs.

    Examples:
        >>> from torchdata.dataloader2 import DataLoader2
        >>> pipe = ShardList("{a..c}.tar").sharding_filter().load_wds_shards().group_samples()
        >>> with DataLoader2(pipe, reading_service=ShardReadingService()) as loader:
        ...     state = merge_states([loader.state_dict()])
        >>> sorted(state)
        ['randomness_state', 'reading_service_state', 'serialized_datapipe']
    """
    if not states:
        raise StateError("There are no states to merge")
    first: Any = states[0]
    checkpoints = [checkpoint for state in states for checkpoint in checkpoints_in(state)]
    _check_whole(checkpoints)
    merged: Any = state_of(checkpoints, is_one=False)
    if isinstance(first, dict) and KEY not in first:
        return cast(T, merged)
    text = json.dumps(merged, separators=(",", ":")).encode()
    return cast(T, {**first, KEY: text} if isinstance(first, dict) else text)


@dataclass(frozen=True)
class Workplace:
    """What a worker runs.

    Attributes:
        pipe: the pipeline, before it is split.
        init_fn: the user's, called with the pipe and the worker.
        reset_fn: the user's, called with the pipe, the worker and the seed generator when an epoch begins.
    """

    pipe: Any
    init_fn: Callable[[Any, Any], Any] | None = None
    reset_fn: Callable[[Any, Any, Any], Any] | None = None


def placed(saved: Sequence[Checkpoint], old: Workplace, place: Place) -> Checkpoint:
    """Return where a rank goes on: where it was, if there are as many ranks and workers as before.

    Args:
        saved: the states of all ranks; or its own, if there are as many as before.
        old: what each worker has run, and will run.
        place: of this rank, among those that there are now.

    Raises:
        StateError: a rank's state is missing, or the pipeline cannot be dealt anew.
    """
    same = [checkpoint for checkpoint in saved if checkpoint.place == place]
    if not same and all(checkpoint.is_over for checkpoint in saved):
        same = list(saved)
    found = same[0] if same else dealt_anew(saved, old, place)
    if not found.is_over:
        return found
    parts = [part.renewed() for part in found.parts]
    if not any(part.stages for part in parts):
        return replace(found, parts=[])
    if found.place != place:
        raise StateError(
            "The next epoch goes on where each worker was in its own stream, as with_epoch has it, which means nothing "
            "where there is another number of them. Go on with as many ranks and workers as before"
        )
    return replace(found, parts=parts, turn=0)


def dealt_anew(saved: Sequence[Checkpoint], old: Workplace, place: Place) -> Checkpoint:
    """Return where a rank goes on when there are other ranks or workers than before.

    Args:
        saved: the states of all ranks.
        old: what each worker has run, and will run.
        place: of this rank, among those that there are now.

    Raises:
        StateError: a rank's state is missing, or the pipeline cannot be dealt anew.
    """
    rank, ranks, distributed, workers = place
    _check_whole(saved)
    _check_dealable(old.pipe)
    by_rank = sorted(saved, key=lambda checkpoint: checkpoint.rank)
    # In the order in which instances are numbered: the first worker of every rank, then the second.
    parts = [
        behind_delivered(checkpoint, number, checkpoint.parts[number], old)
        for number in range(len(by_rank[0].parts))
        for checkpoint in by_rank
    ]
    try:
        states = dealt_states(old.pipe, parts, [[] for _ in parts], ranks * max(workers, 1))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"What is left of the epoch cannot be dealt, as a state is not whole: {error}") from error
    resumed = [Resumed(0, 0, state) for state in states[rank::ranks]]
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
        if type(stage) is SampleMixer and stage.stop != "all":
            raise StateError(
                f'What is left of mix_samples(stop="{stage.stop}") follows from what each worker has mixed, which '
                f"means nothing where there is another number of them. Go on with as many ranks and workers as before, "
                f'or mix with stop="all"'
            )
        if type(stage) not in (SampleGrouper, SampleShuffler, SampleMixer):
            raise StateError(
                f"{type(stage).__name__} knows what each worker has read, or counts it, which means nothing where "
                f"there is another number of them. Go on with as many ranks and workers as before, or leave it out"
            )
    for branch in branches_of(stages[0]):
        _check_dealable(branch)
    if not branches_of(stages[0]):
        unsplit(stages[0].source.source)


def behind_delivered(checkpoint: Checkpoint, number: int, part: Resumed, old: Workplace) -> State | None:
    """Return the state of a worker behind the last item that was delivered, which may be some items behind its own."""
    if not part.skip:
        return cast("State | None", part.state)
    pipe = clone(old.pipe)
    pipe = graph_settings.apply_sharding(pipe, checkpoint.ranks, checkpoint.rank, SHARDING_PRIORITIES.DISTRIBUTED)
    info = WorkerInfo(checkpoint.workers, number)
    with _same_generators():
        pipe = split(pipe, info, None)
        if old.init_fn is not None:
            pipe = returned("worker_init_fn", old.init_fn(pipe, info))
        generator = SeedGenerator(checkpoint.seed)
        if checkpoint.distributed:
            generator = generator.spawn(checkpoint.rank, inplace=True)
        pipe = reset_pipeline(pipe, info, generator.spawn(number), iter_reset_fn=None, worker_reset_fn=old.reset_fn)
        part.load(pipe)
        iterator = part.pass_over(pipe)
        state = save_state(pipe)
        del iterator  # closes the shard that it reads
    return state


@contextmanager
def _same_generators() -> Iterator[None]:
    """Leave the generators of this process as they are."""
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        np.random.set_state(states[2])
