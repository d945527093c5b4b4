"""The resume state of a pipeline: saving, loading and checking the states of its stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

from wds_datapipes.errors import StateError, WdsError, plural
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.pipes.inspection import call_of, count_yielded, iteration_of, name_of, sources_of
from wds_datapipes.pipes.roles import Role
from wds_datapipes.samples.position_buffer import plain_state
from wds_datapipes.shards.held_samples import NONE_AWAITED, Awaited, Holder
from wds_datapipes.shards.position import Resharding, SamplePosition, unpack_positions

Part = Sequence[Mapping[str, Any] | None]
"""The state of one instance of a pipeline."""

State = list[dict[str, Any]]
"""The states of the stages that have one, from the first stage to the last.

The first one belongs to ``.group_samples()``, or to the last stage that starts its sources itself and whose state
therefore includes theirs (see `Stage.nested_sources`). A pipeline that resumes by replay has a single state.
"""


@contextmanager
def refusing_corrupt_states() -> Iterator[None]:
    """Raise a `StateError` for any error caused by values that no loader has saved; this is also a decorator.

    Raises:
        StateError: the state is corrupt.
    """
    try:
        yield
    except WdsError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise StateError(f"This state of a loader is corrupt: {type(error).__name__}: {error}") from error


def save_state(pipe: Any) -> State:
    """Return the state of a pipeline between two items, as JSON-compatible values.

    Raises:
        StateError: a stage holds samples back and has no state.
    """
    state: State = plain_state([stage.snapshot() for stage in graph_of(pipe).stateful_stages()])
    return state


def replay_reason(pipe: Any, dispatched: Any = None) -> str:
    """Return why a pipeline has no position and must resume by replay; "" if it has one.

    Args:
        pipe: the pipeline.
        dispatched: the pipeline of the dispatching process, whose items it reads, if there is one.

    Raises:
        StateError: the pipeline has no position, and its seeds do not determine an epoch.
    """
    try:
        graph_of(pipe).stateful_stages()
    except StateError as error:
        reason = str(error)
    else:
        return ""
    for each in (pipe,) if dispatched is None else (pipe, dispatched):
        if obstacle := graph_of(each).replay_obstacle:
            raise StateError(f"{reason}. The pipeline cannot be replayed: {obstacle}")
    return reason


def difference_of_ranks(pipe: Any) -> str:
    """Return why the state of a pipeline differs between ranks that are in step; "" if its source can tell."""
    try:
        graph = graph_of(pipe)
        first, *others = graph.stateful_stages()
    except StateError as error:
        return str(error)
    if type(first).is_alike_on_ranks is Role.is_alike_on_ranks:
        return f"each rank has its own state, because {name_of(first)} has a different position on each"
    if others:
        return f"each rank has its own state, as {call_of(others[0])} has a different state on each"
    if (uneven := first_uneven_stage(graph.stages)) is not None:
        return f"each rank has its own state, as {call_of(uneven)} may yield fewer items on some than on others"
    return ""


def first_uneven_stage(stages: Iterable[Any]) -> Any:
    """Return the first of some stages that may drop items or hold them back; None if there is none.

    Args:
        stages: the stages, starting with the last.
    """
    for stage in stages:
        if not declared(stage).is_even():
            return stage
        if declared(stage).phased_source() is not None:
            break  # the stages before it do not change how many items it yields
    return None


@refusing_corrupt_states()
def load_state(pipe: Any, state: Sequence[Mapping[str, Any] | None] | None, again: Awaited = NONE_AWAITED) -> None:
    """Load a state into a pipeline, replacing any earlier one; the next iteration resumes from it.

    Args:
        pipe: the pipeline.
        state: the state to resume from. Stages whose state is None restart; if there is no state, all stages do.
        again: samples to read again first, because stages after the pipeline held them back.

    Raises:
        StateError: as in `save_state`; or the state belongs to other stages or is corrupt.
    """
    # A stage that restarts its sources loads their states itself; in a stream, these may be in the middle of a pass.
    graph = graph_of(pipe)
    nested = [source for stage in graph.stages for source in declared(stage).nested_sources()]
    kept = {id(stage) for source in nested for stage in graph.at(source).stages}
    for stage in graph.stages:
        if id(stage) not in kept:
            declared(stage).reset_state()
        declared(stage).counters.is_tried_again = None
    if state is None:
        return
    stages = graph.stateful_stages()
    if len(stages) != len(state):
        raise StateError(
            f"The state has entries for {plural(len(state), 'stage')}, but the pipeline has "
            f"{plural(len(stages), 'stage')} with a state"
        )
    awaited = again
    for stage, own in reversed(list(zip(stages, state, strict=True))):
        if own is not None:
            stage.load_resumed_state(own, awaited)
        if stage.rereads_samples:
            nearest = _holder_of(stage)
            waiting = dict.fromkeys(unpack_positions((own or {}).get("waiting", ())), nearest)
            awaited = Awaited({**waiting, **awaited}, nearest)


def _holder_of(stage: Any) -> Holder:
    """Return a stage that holds samples back, as the source that reads them again sees it."""
    [source] = sources_of(stage)
    between = [*_after_position(source)]
    return Holder(
        name_of(stage),
        lambda: (iteration_of(source), count_yielded(source)),
        lambda: [call_of(each) for each in between[::-1]],
        [declared(each).counters for each in between],
    )


def _after_position(pipe: Any) -> Iterator[Any]:
    """Yield a stage and those before it, up to those that have the position in the shards."""
    if not declared(pipe).has_position:
        yield pipe
        for source in sources_of(pipe):
            yield from _after_position(source)


def next_epoch_state(state: Sequence[Mapping[str, Any] | None] | None) -> list[dict[str, Any] | None] | None:
    """Return the state at the beginning of the next epoch; None if the pipeline restarts.

    If ``.with_epoch()`` is the first stage, its state holds the part for the next epoch under ``"stream"``.

    Args:
        state: the state at the end of an epoch, or at the point where it was interrupted.
    """
    first, *others = state or [None]
    lasting = (first or {}).get("stream")
    return None if lasting is None else [{"stream": lasting}, *[None for _ in others]]


def check_resharding(pipe: Any) -> None:
    """Check that the rest of a pipeline's epoch can be resharded.

    Raises:
        StateError: it cannot be resharded.
    """
    graph = graph_of(pipe)
    stages = graph.stateful_stages()
    for stage in stages:
        stage.check_resharding()
    for branch in stages[0].nested_sources():
        check_resharding(graph.at(branch))


def reshard_states(pipe: Any, rest: Resharding) -> list[list[dict[str, Any] | None]]:
    """Return the states from which some instances of a pipeline resume after resharding.

    Args:
        pipe: the pipeline, or a source of it.
        rest: the states of all of its stages in the previous instances, and the current instances.
    """
    first, *others = graph_of(pipe).stateful_stages()

    def held(number: int) -> list[SamplePosition]:
        own = [unpack_positions((stage or {}).get("waiting", ())) for stage in rest.states[number] or ()]
        return [*rest.waiting(number), *chain.from_iterable(own)]

    states = [None if part is None else part[0] for part in rest.states]
    firsts = first.reshard_states(replace(rest, states=states, waiting=held))
    return [[each, *[None] * len(others)] for each in firsts]
