"""The steps that a loop has received of an epoch that it leaves, for the record of the run in its states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from math import prod
from typing import Any

from wds_datapipes.epoch import Epoch
from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import Checkpoint, WorkerState
from wds_datapipes.loading.checkpoint.resharding import states_of_instances
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.pipes.inspection import attribute_of
from wds_datapipes.pipes.state.description import run_source
from wds_datapipes.pipes.state.pipeline_state import difference_of_ranks, reshard_states
from wds_datapipes.pipes.state.replay import is_replayed
from wds_datapipes.received_epochs import UNKNOWN, Left
from wds_datapipes.shards.position import Resharding


class LoggedBatches:
    """The batches that the stages after a log of positions make of its samples.

    Args:
        stages: the stages of a pipeline, the last one first.

    Attributes:
        folder: the folder of the log; None if the pipeline has no log.
        size: the number of samples in a batch.
        later: the stages after the log.
    """

    def __init__(self, stages: Sequence[Any]) -> None:
        self.later = [*takewhile(lambda stage: declared(stage).position_log_folder() is None, stages)]
        has_log = len(self.later) < len(stages)
        self.folder = declared(stages[len(self.later)]).position_log_folder() if has_log else None
        self.size = prod(declared(stage).count_in_batch() or 1 for stage in self.later)
        self._rest = 0 if any(attribute_of(stage, "drop_last") for stage in self.later) else self.size - 1

    def count(self, samples: Any) -> Any:
        """Return the number of batches that some samples make at the end of an epoch."""
        return (samples + self._rest) // self.size


def counts_steps(pipe: Any) -> bool:
    """Whether the states of a pipeline record the steps that its loop has received."""
    graph = graph_of(pipe)
    return run_source(graph) is not None or LoggedBatches(graph.chain).folder is not None


def steps_received(saved: Checkpoint, pipe: Any) -> Left:
    """Return how many steps of its epoch a loop has received when it leaves the epoch; None for all.

    Args:
        saved: its state on a rank.
        pipe: the pipeline, which `counts_steps`.
    """
    try:
        if (source := run_source(pipe)) is None:
            return None if saved.is_over else _steps_of_log(saved, pipe)
        if saved.instance.ranks > 1 and difference_of_ranks(pipe):  # others may be elsewhere
            return None if saved.is_over else UNKNOWN
        source.load_phases(saved.phases, saved.epoch)
        states = states_of_instances([_of_all_in_step(saved, source)])
        begun = [state["rest"] for state in (stages and stages[0] for stages in states) if state and "rest" in state]
        [stages] = reshard_states(pipe, Resharding(states, lambda _: (), 1, range(1)))
        rest = (stages[0] or {})["rest"]
        ranks = saved.instance.ranks
        left: Left = source.steps_received(saved.epoch.number, ranks, begun[0] if begun else None, rest)
    except StateError:  # it has no state, or cannot be resharded
        return None if saved.is_over else UNKNOWN
    return left


def _of_all_in_step(saved: Checkpoint, source: Any) -> Checkpoint:
    """Return a state as that of all ranks, which are in step, even if they share the last batch unevenly."""
    parts = [
        WorkerState.of([source.state_of_most(part.stages[0], each, is_over=saved.is_over), *part.stages[1:]])
        if part.stages and part.stages[0]
        else part
        for part, each in zip(saved.parts, saved.instances(), strict=False)
    ]
    return replace(saved, parts=parts).of_all_ranks()


def _steps_of_log(saved: Checkpoint, pipe: Any) -> Left:
    """Return the number of batches whose samples a log has recorded until a state."""
    if any(is_replayed(part.stages) for part in saved.parts):
        return UNKNOWN
    graph = graph_of(pipe)
    batches = LoggedBatches(graph.chain)
    number = [declared(stage).position_log_folder() is not None for stage in graph.stateful_stages()].index(True)
    samples = [(part.stages[number] or {}).get("count", 0) for part in saved.parts if part.stages]
    steps = sum(map(batches.count, samples))
    return steps, steps


def leave(saved: Checkpoint, pipe: Any) -> Epoch:
    """Return the epoch of a state, with the record that its loop leaves it there."""
    if not counts_steps(pipe):
        return saved.epoch
    return replace(saved.epoch, received=saved.epoch.received.leave(steps_received(saved, pipe)))
