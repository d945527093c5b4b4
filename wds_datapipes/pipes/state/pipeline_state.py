"""The state of a pipeline: what its stages have to know to go on where they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch.utils.data.datapipes.iter import Batcher

from wds_datapipes.errors import StateError
from wds_datapipes.pipes.grouping import SampleGrouper, SampleShuffler
from wds_datapipes.pipes.loading import ShardLoader
from wds_datapipes.pipes.state.graph import sources_of, upstream
from wds_datapipes.pipes.state.recording import Form, Record, RecordedItem, Recorder, users_form
from wds_datapipes.pipes.state.stateless import check_promise, has_state, is_users, takes_state_alone
from wds_datapipes.pipes.state.unsupported import check_replay
from wds_datapipes.samples.derived_position import addresses_in
from wds_datapipes.shards.position import SamplePosition

__all__ = [
    "State",
    "branches_of",
    "check_state",
    "lasts",
    "load_state",
    "next_epoch_state",
    "nothing_else",
    "record_beginning",
    "record_state",
    "save_state",
    "stateful",
]

State = list[dict[str, Any]]
"""The states of the stages that have one, in the order in which the samples pass them.

They begin at ``.group_samples()``; or at the stage nearest to the end that begins its sources by itself, and therefore
holds their states in its own (see `branches_of`), or that reads its source again from the beginning.
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
        savers = recorder.chains[id(pipe)] = [_saver(stage, recorder) for stage in stateful(pipe)]
    return [save() for save in savers]


def _saver(stage: Any, recorder: Recorder) -> Callable[[], Form]:
    """Return what returns the form of the state of a stage."""
    if isinstance(stage, RecordedItem):
        return partial(stage.recorded_state, recorder)
    return partial(users_form if is_users(stage) else _form_of, stage, recorder)


def _form_of(stage: Any, recorder: Recorder) -> Form:
    """Return the form of a state of few values."""
    return {
        name: recorder.number(value) if type(value) is int else recorder.keep_equal((id(stage), name), value)
        for name, value in stage.state_dict().items()
    }


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
        if callable(forget := getattr(stage, "forget_state", None)):
            forget()
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
            if is_users(stage):
                stage.load_state_dict(own, *([waiting] if waiting or not takes_state_alone(stage) else ()))
                continue
            _check_numbers(own)
            stage.load_state_dict(own, waiting)
            if callable(needed_for := getattr(stage, "needed_for", None)):
                waiting = needed_for(waiting)
            waiting = list(dict.fromkeys([*waiting, *addresses_in(own.get("waiting", ()))]))
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


def lasts(pipe: Any) -> bool:
    """Whether an epoch of a pipeline goes on where the last one has ended."""
    return any(getattr(stage, "lasts", False) for stage in upstream(pipe))


def branches_of(stage: Any) -> Sequence[Any]:
    """Return the sources that a stage begins by itself, at any time, so that it has to keep their states."""
    branches = getattr(stage, "state_branches", None)
    return branches() if callable(branches) else ()


def _stages_of(pipe: Any) -> Iterator[Any]:
    """Yield the stages of a pipeline from the last to the one that reads the shards, or that begins its sources.

    Raises:
        StateError: there is none.
    """
    while True:
        yield pipe
        if isinstance(pipe, ShardLoader) or branches_of(pipe) or _reads_again(pipe):
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
        if isinstance(stage, Batcher):
            _check_batches(later)
        check_promise(stage, later)
        later.append(stage)
        if has_state(stage):
            found.append(stage)
        for branch in branches_of(stage):
            stateful(branch, later)
        if _reads_again(stage):
            check_replay(stage)
    if not (found and (isinstance(found[-1], SampleGrouper) or branches_of(found[-1]) or _reads_again(found[-1]))):
        raise StateError("The place in a pipeline is known where samples are gathered: it needs .group_samples()")
    return found[::-1]


def _reads_again(stage: Any) -> bool:
    """Whether a stage goes on by reading its source from the beginning, or what it has kept of it."""
    return getattr(stage, "reads_again", False)


def _takes_apart(stage: Any) -> bool:
    """Whether a stage makes several items of one, and makes them again of what they were made of."""
    return getattr(stage, "takes_apart", False)


def _check_batches(behind: Sequence[Any]) -> None:
    """Make sure that no stage behind ``.batch()`` has to tell where batches are: only samples can be read again.

    Args:
        behind: the stages behind it, the last first.

    Raises:
        StateError: one has.
    """
    for number in reversed(range(len(behind))):
        stage = behind[number]
        if _takes_apart(stage):
            return
        if isinstance(stage, SampleShuffler):
            raise StateError(
                "shuffle_samples can tell where single samples are that wait in it, and here it is behind .batch(). "
                "Put .shuffle_samples() before .batch()"
            )
        if has_state(stage) and any(map(_takes_apart, behind[:number])):
            raise StateError(
                f"What is taken apart behind .batch() is known by the samples of each batch, and here "
                f"{type(stage).__name__} is between the two, which counts batches. Put it before .batch(), or behind "
                f"what takes the batches apart"
            )
