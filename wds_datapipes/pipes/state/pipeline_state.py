"""The state of a pipeline: what its stages have to know to go on where they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch.utils.data.datapipes.iter import Batcher

from wds_datapipes.errors import StateError
from wds_datapipes.pipes.grouping import SampleGrouper, SampleShuffler
from wds_datapipes.pipes.loading import ShardLoader
from wds_datapipes.pipes.state.graph import as_stage, sources_of, upstream
from wds_datapipes.pipes.state.recording import Record, Recorder
from wds_datapipes.pipes.state.replay import ReplayedItems, is_replayable
from wds_datapipes.pipes.state.stateless import check_promise, has_state, is_users
from wds_datapipes.pipes.state.unsupported import check_replay, name_of
from wds_datapipes.samples.derived_position import unpack_positions
from wds_datapipes.shards.position import SamplePosition

__all__ = [
    "State",
    "check_state",
    "load_state",
    "next_epoch_state",
    "nothing_else",
    "record_beginning",
    "record_state",
    "replay_reason",
    "save_state",
    "spans_epochs",
    "stateful",
]

State = list[dict[str, Any]]
"""The states of the stages that have one, in the order in which the samples pass them.

They begin at ``.group_samples()``; or at the stage nearest to the end that begins its sources by itself, and therefore
holds their states in its own (see `Stage.nested_sources`), or that reads its source again from the beginning.
"""

#: What is a number in the states of our stages, and what it is below.
COUNTS, LIMIT = ("check", "draws", "given", "passed", "room", "turn"), 1 << 63


def save_state(pipe: Any, recorder: Recorder | None = None) -> State:
    """Return the state of a pipeline between two items.

    Args:
        pipe: the pipeline.
        recorder: of the record that is to have it, if it is one. What is returned is the form of the state then.

    Raises:
        StateError: a stage holds samples back, and has no state.
    """
    if recorder is None:
        return [stage.state_dict() for stage in stateful(pipe)]
    savers = recorder.chains.get(id(pipe))
    if savers is None:  # to find the stages takes longer than their states
        savers = recorder.chains[id(pipe)] = [partial(stage.record_state, recorder) for stage in stateful(pipe)]
    return [save() for save in savers]


def record_state(pipe: Any, recorder: Recorder, is_first: bool = False) -> Record:
    """Return where a pipeline is between two items.

    Args:
        pipe: the pipeline.
        recorder: of the records before it.
        is_first: whether it has to be the first of a run.
    """
    try:
        return recorder.refused() if recorder.refusal else recorder.record(save_state, pipe, is_first)
    except StateError as error:
        return recorder.refuse(str(error))


def record_beginning(pipe: Any) -> Record:
    """Return where a pipeline begins an epoch that resumes where the last one has ended."""
    recorder = Recorder()
    try:
        beginning = next_epoch_state(save_state(pipe))
    except StateError as error:
        return recorder.refuse(str(error))
    return recorder.record(lambda _, recorder: recorder.keep_equal("beginning", beginning), pipe, True)


def check_state(pipe: Any) -> None:
    """Make sure that a pipeline has a state.

    Raises:
        StateError: a stage holds samples back, and has no state.
    """
    stateful(pipe)


def replay_reason(pipe: Any, behind: Sequence[Any] = ()) -> str:
    """Return why a pipeline has no position, and resumes by replay; "" if it has one.

    Args:
        pipe: the pipeline.
        behind: stages after it that have no state.

    Raises:
        StateError: it has no position, and an epoch does not follow from its seeds.
    """
    try:
        stateful(pipe)
        if not behind:
            return ""
        reason = f"{name_of(behind[0])} runs in the main process, where no stage has a state"
    except StateError as error:
        reason = str(error)
    if not all(map(is_replayable, (pipe, *behind))):
        raise StateError(reason)
    return reason


def load_state(
    pipe: Any, state: Sequence[Mapping[str, Any] | None] | None, again: Iterable[SamplePosition] = ()
) -> None:
    """Have a pipeline go on from a state when it is iterated next, whatever was loaded before.

    Args:
        pipe: the pipeline.
        state: where to go on. A stage whose state is None begins anew; so do all without a state.
        again: samples that come again, before all others: stages behind the pipeline wait for them.

    Raises:
        StateError: as `save_state`; or the state is one of other stages.
    """
    for stage in upstream(pipe):
        as_stage(stage).reset_state()
    if state is None:
        return
    stages = stateful(pipe)
    if len(stages) != len(state):
        raise StateError(f"The state has {len(state)} stages, and the pipeline has {len(stages)} that have one")
    waiting = list(again)
    for stage, own in reversed(list(zip(stages, state, strict=True))):
        if own is None:
            continue
        try:
            if not is_users(stage):
                _check_numbers(own)
            stage.load_state_dict(own, waiting)
            waiting = stage.positions_before(waiting)
            if stage.rereads_samples:
                waiting = list(dict.fromkeys([*waiting, *unpack_positions(own.get("waiting", ()))]))
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            if is_users(stage) or isinstance(error, StateError):
                raise
            raise StateError(f"The state of {type(stage).__name__} is not whole: {error}") from error


def _check_numbers(state: Mapping[str, Any]) -> None:
    """Make sure that the state of a stage of ours has numbers where such stages count.

    Raises:
        ValueError: it has not.
    """
    shard, offset = state.get("next", (0, 0))
    counts = [shard, offset, *(state.get(name, 0) for name in COUNTS)]
    if not all(type(count) is int and 0 <= count < LIMIT for count in counts):
        raise ValueError(f"it counts by {counts!r:.200}")


def next_epoch_state(state: Sequence[Mapping[str, Any] | None] | None) -> list[dict[str, Any] | None] | None:
    """Return the state at the beginning of the next epoch; None if all begins anew.

    What a stage keeps for the next epoch is in its state as ``"lasting"``.

    Args:
        state: that of the end of an epoch, or where it was broken off.
    """
    kept = [_lasting_state(own) for own in state or ()]
    return [None if lasting is None else {"lasting": lasting} for lasting in kept] if any(kept) else None


def _lasting_state(state: Any) -> Any:
    """Return what of the state of a stage lasts beyond the epoch, if anything does."""
    return state.get("lasting") if isinstance(state, Mapping) else None


def nothing_else(pipe: Any, state: Sequence[Mapping[str, Any] | None] | None) -> list[dict[str, Any]]:
    """Return the state by which a pipeline yields samples that come again, and then ends.

    Args:
        pipe: the pipeline.
        state: where it is. A stage that goes on from one epoch to the next makes samples again by what it has there.
    """
    own = state or [None for _ in stateful(pipe)]
    return [{"ends": True, "lasting": each["lasting"]} if each and each.get("lasting") else {} for each in own]


def spans_epochs(pipe: Any) -> bool:
    """Whether an epoch of a pipeline goes on where the last one has ended."""
    return any(as_stage(stage).spans_epochs for stage in upstream(pipe))


def _stages_of(pipe: Any) -> Iterator[Any]:
    """Yield the stages of a pipeline from the last to the one that reads the shards, or that begins its sources.

    Raises:
        StateError: there is none.
    """
    while True:
        yield pipe
        own = as_stage(pipe)
        if isinstance(pipe, ShardLoader) or own.nested_sources() or own.rereads_source:
            return
        sources = list(sources_of(pipe))
        if len(sources) != 1:
            what = f"has {len(sources)} sources" if sources else "is no .load_wds_shards(), and has no source"
            raise StateError(
                f"The place in a pipeline is known by the shards that it reads, and {type(pipe).__name__} {what}"
            )
        pipe = sources[0]


def stateful(pipe: Any, behind: Sequence[Any] = ()) -> list[Any]:
    """Return the stages that have a state, in the order in which the samples pass them.

    Args:
        pipe: the pipeline.
        behind: the stages behind it.

    Raises:
        StateError: one of the stages holds samples back, and has no state.
    """
    found: list[Any] = []
    later = list(behind)
    for stage in _stages_of(pipe):
        if isinstance(stage, ShardLoader):
            check_replay(stage)
            break
        if isinstance(stage, SampleGrouper) and type(stage.source) is not ShardLoader:
            raise StateError(
                "group_samples knows its position only directly after load_wds_shards, and here it is after "
                f"{type(stage.source).__name__}"
            )
        if isinstance(stage, Batcher):
            _check_batches(later)
        check_promise(stage, later)
        later.append(stage)
        if has_state(stage):
            found.append(stage)
        for branch in as_stage(stage).nested_sources():
            stateful(branch, later)
        if as_stage(stage).rereads_source and not isinstance(stage, ReplayedItems):
            check_replay(stage)
    first = found[-1] if found else None
    if not (isinstance(first, SampleGrouper) or as_stage(first).nested_sources() or as_stage(first).rereads_source):
        raise StateError("The place in a pipeline is known where samples are gathered: it needs .group_samples()")
    return found[::-1]


def _check_batches(behind: Sequence[Any]) -> None:
    """Make sure that no stage behind ``.batch()`` has to tell where batches are: only samples can be read again.

    Args:
        behind: the stages behind it, the last first.

    Raises:
        StateError: one has.
    """
    for number in reversed(range(len(behind))):
        stage = behind[number]
        if as_stage(stage).is_expanding:
            return
        if isinstance(stage, SampleShuffler) or (is_users(stage) and as_stage(stage).rereads_samples):
            name = ".shuffle_samples()" if isinstance(stage, SampleShuffler) else type(stage).__name__
            raise StateError(
                f"{name} knows the positions of single samples that wait in it, and here it is after .batch(). Put "
                f"{name} before .batch()"
            )
        if has_state(stage) and any(as_stage(each).is_expanding for each in behind[:number]):
            raise StateError(
                f"What is taken apart behind .batch() is known by the samples of each batch, and here "
                f"{type(stage).__name__} is between the two, which counts batches. Put it before .batch(), or behind "
                f"what takes the batches apart"
            )
