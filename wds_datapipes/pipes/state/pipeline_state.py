"""The resume state of a pipeline: saving, loading and checking the states of its stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from wds_datapipes.datapipes import Batcher
from wds_datapipes.errors import StateError
from wds_datapipes.pipes.graph import name_of, sources_of, takes_seed, upstream
from wds_datapipes.pipes.samples.grouping import SampleGrouper
from wds_datapipes.pipes.shards.loading import ShardLoader, ShardReadingStage
from wds_datapipes.pipes.stage import as_stage
from wds_datapipes.pipes.state.replay import ReplayedItems, obstacle_to_replay
from wds_datapipes.pipes.state.stateless import check_declaration, has_state, is_users
from wds_datapipes.samples.position_buffer import plain_state
from wds_datapipes.shards.position import SamplePosition, unpack_positions

__all__ = [
    "State",
    "check_state",
    "load_state",
    "next_epoch_state",
    "replay_reason",
    "save_state",
    "spans_epochs",
    "stateful",
]

State = list[dict[str, Any]]
"""The states of the stages that have one, from the first stage to the last.

The first one belongs to ``.group_samples()``, or to the last stage that starts its sources itself and therefore
includes their states (see `Stage.nested_sources`). A pipeline that resumes by replay has a single state.
"""

#: Stages that restart their source within an epoch, or never.
NOT_RESTARTED_EACH_EPOCH = ("Cycler", "InMemoryCacheHolder", "SampleCacher")

#: The numbers in the states of this package's stages, and their upper bounds.
COUNTS, LIMIT = ("cut", "draws", "given", "passed", "room", "turn"), 1 << 63


def save_state(pipe: Any) -> State:
    """Return the state of a pipeline between two items, as JSON-compatible values.

    Raises:
        StateError: a stage holds samples back and has no state.
    """
    state: State = plain_state([stage.snapshot() for stage in stateful(pipe)])
    return state


def check_state(pipe: Any) -> None:
    """Make sure that a pipeline has a state.

    Raises:
        StateError: a stage holds samples back and has no state.
    """
    stateful(pipe)


def replay_reason(pipe: Any, later_stages: Sequence[Any] = (), dispatching: Any = None) -> str:
    """Return why a pipeline has no position and must resume by replay; "" if it has one.

    Args:
        pipe: the pipeline.
        later_stages: stages after it, which have no state.
        dispatching: the part of the pipeline that a dispatching process runs, if there is one.

    Raises:
        StateError: it has no position, and its seeds do not determine an epoch.
    """
    try:
        if dispatching is not None:
            raise StateError("sharding_round_robin_dispatch has no position in the shards")
        stateful(pipe)
        if not later_stages:
            return ""
        reason = f"{name_of(later_stages[0])} runs in the main process, where no stage has a state"
    except StateError as error:
        reason = str(error)
    if obstacle := obstacle_to_replay(pipe, *later_stages, *([] if dispatching is None else [dispatching])):
        raise StateError(f"{reason}. The pipeline cannot be replayed: {obstacle}")
    return reason


def load_state(
    pipe: Any, state: Sequence[Mapping[str, Any] | None] | None, again: Iterable[SamplePosition] = ()
) -> None:
    """Load a state into a pipeline, replacing any earlier one; the next iteration resumes from it.

    Args:
        pipe: the pipeline.
        state: the state to resume from. Stages whose state is None restart; without a state, all do.
        again: samples to read again first, because stages after the pipeline wait for them.

    Raises:
        StateError: as in `save_state`; or the state belongs to other stages.
    """
    for stage in upstream(pipe):
        as_stage(stage).reset_state()
    if state is None:
        return
    stages = stateful(pipe)
    if len(stages) != len(state):
        raise StateError(
            f"The state has entries for {len(state)} stages, but {len(stages)} stages of the pipeline have a state"
        )
    waiting = list(again)
    for stage, own in reversed(list(zip(stages, state, strict=True))):
        if own is None:
            continue
        try:
            if not is_users(stage):
                _check_numbers(own)
            stage.load_state_dict(own, waiting)
            if stage.rereads_samples:
                waiting = list(dict.fromkeys([*waiting, *unpack_positions(own.get("waiting", ()))]))
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            if is_users(stage) or isinstance(error, StateError):
                raise
            raise StateError(f"The state of {type(stage).__name__} is corrupt: {error}") from error


def _check_numbers(state: Mapping[str, Any]) -> None:
    """Make sure that the counters in the state of a stage of this package are valid numbers.

    Raises:
        ValueError: they are not.
    """
    counts = [state.get(name, 0) for name in COUNTS]
    if not all(type(count) is int and 0 <= count < LIMIT for count in counts):
        raise ValueError(f"its counters are invalid: {counts!r:.200}")


def next_epoch_state(state: Sequence[Mapping[str, Any] | None] | None) -> list[dict[str, Any] | None] | None:
    """Return the state at the beginning of the next epoch; None if the pipeline restarts.

    ``.with_epoch()``, which is then the first stage, keeps the part for the next epoch in its state as ``"lasting"``.

    Args:
        state: the state at the end of an epoch, or at the point where it was interrupted.
    """
    first, *others = state or [None]
    lasting = (first or {}).get("lasting")
    return None if lasting is None else [{"lasting": lasting}, *[None for _ in others]]


def spans_epochs(pipe: Any) -> bool:
    """Whether an epoch of a pipeline continues the previous one."""
    return any(as_stage(stage).spans_epochs for stage in upstream(pipe))


def _stages_of(pipe: Any) -> Iterator[Any]:
    """Yield the stages of a pipeline from the last one to the one that reads the shards or begins its sources.

    Raises:
        StateError: there is no such stage.
    """
    while True:
        yield pipe
        if isinstance(pipe, ShardReadingStage | ReplayedItems) or as_stage(pipe).nested_sources():
            return
        sources = list(sources_of(pipe))
        if not sources and as_stage(pipe).has_position:
            return
        if len(sources) != 1:
            what = f"has {len(sources)} sources" if sources else "has no source, and is not .load_wds_shards()"
            raise StateError(f"{type(pipe).__name__} {what}, so the position of the pipeline in its shards is unknown")
        pipe = sources[0]


def stateful(pipe: Any, later_stages: Sequence[Any] = ()) -> list[Any]:
    """Return the stages that have a state, from the first to the last.

    Args:
        pipe: the pipeline.
        later_stages: the stages after it.

    Raises:
        StateError: one of the stages holds samples back and has no state.
    """
    found: list[Any] = []
    later = list(later_stages)
    for stage in _stages_of(pipe):
        if isinstance(stage, ShardReadingStage):
            _check_shard_list(stage)
            if not stage.has_position:
                break
        if isinstance(stage, SampleGrouper) and type(stage.source) is not ShardLoader:
            raise StateError(
                "group_samples can determine its position only directly after load_wds_shards, but here it comes after "
                f"{type(stage.source).__name__}"
            )
        if isinstance(stage, Batcher) or as_stage(stage).combines_samples:
            _check_batches(stage, later)
        check_declaration(stage, later)
        later.append(stage)
        if has_state(stage):
            found.append(stage)
        for branch in as_stage(stage).nested_sources():
            _check_epochs(branch, stage)
            stateful(branch, later)
    first = found[-1] if found else None
    if not (as_stage(first).has_position or as_stage(first).nested_sources()):
        raise StateError(
            "The position of a pipeline is recorded by .group_samples() or .load_wds_records(), which is missing here"
        )
    return found[::-1]


def _check_shard_list(loader: Any) -> None:
    """Make sure that the list of shards can be reproduced from its seeds.

    Args:
        loader: the stage that loads the shards.

    Raises:
        StateError: the seeds of an epoch do not determine its list.
    """
    for stage in upstream(loader.source):
        if as_stage(stage).spans_epochs:
            raise StateError(
                f"{name_of(stage)} continues from one epoch to the next, but before .load_wds_shards() the seeds must "
                "determine each epoch. Put it after .group_samples()"
            )
        if name_of(stage) in NOT_RESTARTED_EACH_EPOCH and any(
            each is not stage and takes_seed(each) for each in upstream(stage)
        ):
            raise StateError(
                f"{name_of(stage)} does not restart its source exactly once per epoch, and a stage before it draws "
                "random numbers, so the seed does not determine the order of the shards. Put "
                f"{name_of(stage)} before the random stage"
            )


def _check_batches(batcher: Any, later_stages: Sequence[Any]) -> None:
    """Make sure that no stage after one that makes batches records their positions: only samples can be read again.

    Args:
        batcher: the stage that makes batches.
        later_stages: the stages after it.

    Raises:
        StateError: a stage does.
    """
    name = ".batch()" if isinstance(batcher, Batcher) else name_of(batcher)
    for stage in later_stages:
        if as_stage(stage).rereads_samples:
            raise StateError(
                f"{name_of(stage)} records the positions of the single samples that it holds back, but here it comes "
                f"after {name}. Put it before {name}"
            )


def _check_epochs(source: Any, reader: Any) -> None:
    """Make sure that a source started by another stage does not continue from one epoch to the next.

    Raises:
        StateError: it does.
    """
    for stage in upstream(source):
        if as_stage(stage).spans_epochs:
            raise StateError(
                f"{name_of(stage)} continues from one epoch to the next, and has no position before "
                f"{name_of(reader)}. Put it at the end of the pipeline"
            )
