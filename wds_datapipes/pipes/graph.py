"""The graph of a pipeline: its stages in a fixed order, and what follows from their declarations."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

from wds_datapipes.counters import Counters
from wds_datapipes.errors import StateError
from wds_datapipes.fingerprint import is_users
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.inspection import call_of, loop_of, name_of, sources_of, splits, takes_seed
from wds_datapipes.pipes.roles import Role
from wds_datapipes.pipes.stage import Stage


class PipelineGraph:
    """The stages of a pipeline at the time of creation. Create a new graph if the pipeline changes.

    A pipeline changes at three points of an epoch: a user's reset functions may return another one, and the loader
    inserts stages. What follows from its stages is computed from the graph that was made there, as searching the
    attributes of all stages takes longer.

    Args:
        pipe: the last stage.
        sources: the sources of each stage by its ID, if they are known.

    Attributes:
        pipe: the last stage.
        stages: all stages, each once, starting with the last, branch by branch: every copy has the same order.
        nearest_first: all stages by the number of stages in between, the order in which torchdata draws their seeds.
    """

    def __init__(self, pipe: Any, sources: dict[int, list[Any]] | None = None) -> None:
        self.pipe = pipe
        self._sources = {} if sources is None else sources
        self._parts = dict[int, PipelineGraph]()
        found: dict[int, tuple[tuple[int, ...], Any]] = {id(pipe): ((), pipe)}
        waiting = deque(found.values())
        while waiting:
            path, stage = waiting.popleft()
            for number, source in enumerate(self.sources_of(stage)):
                if id(source) not in found:
                    found[id(source)] = (*path, number), source
                    waiting.append(found[id(source)])
        self.nearest_first = [stage for _, stage in found.values()]
        self.stages = [stage for _, stage in sorted(found.values(), key=itemgetter(0))]

    def __reduce__(self) -> tuple[type[PipelineGraph], tuple[Any]]:
        return type(self), (self.pipe,)  # a copy has other IDs

    def sources_of(self, stage: Any) -> list[Any]:
        """Return the stages that a stage of the pipeline reads from."""
        if id(stage) not in self._sources:
            self._sources[id(stage)] = [*sources_of(stage)]
        return self._sources[id(stage)]

    def at(self, stage: Any) -> PipelineGraph:
        """Return the graph that ends with a stage of the pipeline."""
        if stage is self.pipe:
            return self
        if id(stage) not in self._parts:
            self._parts[id(stage)] = PipelineGraph(stage, self._sources)
        return self._parts[id(stage)]

    @cached_property
    def splitters(self) -> list[Any]:
        """The stages that split the data."""
        return [stage for stage in self.stages if splits(stage)]

    @cached_property
    def before_split(self) -> dict[int, Any]:
        """The stages up to each splitter, by ID; they must yield the same items in all processes.

        Like those of `after_split`, they are in the order in which torchdata draws their seeds.
        """
        return {id(stage): stage for splitter in self.splitters for stage in self.at(splitter).nearest_first}

    @property
    def after_split(self) -> list[Any]:
        """The stages that are not before a splitter."""
        return [stage for stage in self.nearest_first if id(stage) not in self.before_split]

    @cached_property
    def random_stages(self) -> list[Any]:
        """The stages that take a seed."""
        return [stage for stage in self.stages if takes_seed(stage)]

    @property
    def spans_epochs(self) -> bool:
        """Whether an epoch continues the previous one."""
        return any(declared(stage).spans_epochs for stage in self.stages)

    @cached_property
    def chain(self) -> list[Any]:
        """The stages from the last one up to one with several sources, or none."""
        chain = [self.pipe]
        while len(sources := self.sources_of(chain[-1])) == 1:
            chain += sources
        return chain

    @property
    def replay_obstacle(self) -> str:
        """Why the seeds do not determine an epoch, so that it cannot be replayed; "" if they do."""
        for stage in self.stages:
            if obstacle := declared(stage).replay_obstacle(self.at(stage).stages):
                return f"{name_of(stage)} {obstacle}"
        return ""

    def stateful_stages(self) -> list[Any]:
        """Return the stages that have a state, from the first to the last.

        The first one has the position in the shards: it reads them, or starts its own sources.

        Raises:
            StateError: the position is unknown, or a stage holds samples back and has no state.
        """
        return _stateful(self, [])

    def share_counters(self, counters: Counters) -> None:
        """Make all stages update the same counters; loaders call this at the beginning of an epoch."""
        for stage in self.stages:
            declared(stage).counters = counters


def graph_of(pipe: Any) -> PipelineGraph:
    """Return the graph of a pipeline, given its last stage or the graph itself."""
    return pipe if isinstance(pipe, PipelineGraph) else PipelineGraph(pipe)


def _stateful(graph: PipelineGraph, later_stages: Sequence[Any]) -> list[Any]:
    """Return the stages of a pipeline that have a state, from the first to the last.

    Args:
        graph: the pipeline.
        later_stages: the stages after it, starting with the last.
    """
    later, found = list(later_stages), list[Any]()
    for stage in graph.chain:
        known = declared(stage)
        known.check_position()
        _check_declarations(stage, known, later)
        later.append(stage)
        if known.has_state:
            found.append(stage)
        for branch in known.nested_sources():
            _refuse_spanning(
                graph.at(branch), f", so it has no position before {name_of(stage)}. Put it at the end of the pipeline"
            )
            _stateful(graph.at(branch), later)
        if known.has_position or known.nested_sources():
            return found[::-1]
        if known.shard_access == "read":
            break
    else:
        count = len(graph.sources_of(stage))
        what = f"has {count} sources" if count else "has no source and is not .load_wds_shards()"
        raise StateError(f"{type(stage).__name__} {what}, so the position of the pipeline in its shards is unknown")
    raise StateError(
        ".group_samples() or .load_wds_records() records the position of a pipeline, but this one has neither"
    )


def check_shard_list(pipe: Any) -> None:
    """Check that the list of shards can be reproduced from its seeds.

    Args:
        pipe: the stage that yields the list.

    Raises:
        StateError: the seeds of an epoch do not determine the list.
    """
    graph = graph_of(pipe)
    _refuse_spanning(
        graph, ", but before .load_wds_shards() the seeds must determine each epoch. Put it after .group_samples()"
    )
    for stage in graph.stages:
        if not declared(stage).restarts_once() and any(map(takes_seed, graph.at(stage).stages[1:])):
            raise StateError(
                f"{name_of(stage)} does not restart its source exactly once per epoch, and a stage before it draws "
                "random numbers, so the seed does not determine the order of the shards. Put "
                f"{name_of(stage)} before the random stage"
            )


def _refuse_spanning(graph: PipelineGraph, advice: str) -> None:
    """Check that a source does not continue from one epoch to the next.

    Raises:
        StateError: it continues.
    """
    for stage in graph.stages:
        if declared(stage).spans_epochs:
            raise StateError(f"{name_of(stage)} continues from one epoch to the next{advice}")


def _check_declarations(stage: Any, known: Role, later_stages: Sequence[Any]) -> None:
    """Check that a stage has a state or is stateless, and that later stages can read its items again.

    Raises:
        StateError: neither is the case, its state cannot be loaded, or its items cannot be read again.
    """
    reader = next((each for each in reversed(later_stages) if declared(each).rereads_samples), None)
    if known.combines_samples and reader is not None:
        is_planned = known.phased_source() is not None
        advice = "Leave it out, as the source shuffles the rows" if is_planned else f"Put it before {call_of(stage)}"
        raise StateError(
            f"{name_of(reader)} records the positions of the individual samples that it holds back, but it comes "
            f"after {call_of(stage)}. {advice}"
        )
    if not (known.has_state or known.is_stateless):
        raise StateError(_refusal(stage, known))
    name, own = f"{type(stage).__module__}.{type(stage).__qualname__}", type(stage)
    if known.has_state and own.load_state_dict is Stage.load_state_dict:
        raise StateError(f"{name} has state_dict() but no load_state_dict(), so its state cannot be loaded")
    if known.has_state and reader is not None and own.load_resumed_state is Stage.load_resumed_state:
        raise StateError(
            f"{name} has its own state and comes before {name_of(reader)}. On resume, the samples held back there "
            f"are read again from their shards and would pass through {own.__name__} a second time, which would "
            f"change its state. Put {own.__name__} after {name_of(reader)}"
        )


def _refusal(stage: Any, known: Role) -> str:
    kind = type(stage)
    loop = loop_of(*kind.__mro__) or kind
    if not is_users(loop.__module__):
        alternative = getattr(known, "alternative", "")  # of stages of other packages
        return f"{name_of(stage)} has no position in the shards{alternative and '. '}{alternative}"
    base = loop_of(*loop.__mro__[1:])
    inherited = "" if base is None else f" The declarations of {base.__name__} do not apply to another __iter__."
    return (
        f"{kind.__module__}.{kind.__qualname__} may hold samples back, which a state would then lose."
        f"{inherited} Derive it from wds_datapipes.Stage. If it keeps nothing between two items and yields at most "
        "one item per item that it reads, set is_stateless = True in its class. Otherwise, define state_dict() and "
        "load_state_dict(state), or put it after the loader"
    )
