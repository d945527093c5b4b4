"""An epoch of a pipeline in one process, for all kinds of loaders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wds_datapipes.counters import Counters
from wds_datapipes.datapipes import IterDataPipe, MapDataPipe
from wds_datapipes.epoch import Epoch
from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.loading.torchdata_patches.local_functions import pickled_stages
from wds_datapipes.pipes.graph import PipelineGraph, graph_of
from wds_datapipes.pipes.inspection import splits, takes_seed
from wds_datapipes.pipes.state.pipeline_state import load_state, next_epoch_state, save_state
from wds_datapipes.pipes.state.preparation import prepare_stages
from wds_datapipes.pipes.state.replay import ReplayedItems
from wds_datapipes.pipes.state.seeding import seed_process
from wds_datapipes.pipes.state.shard_order import remove_listings
from wds_datapipes.seeds import seed_of


def refuse_hidden_stages(pipe: Any) -> None:
    """Raise an error if only pickling finds a stage that draws random numbers or splits the data.

    Neither could happen as the loader says. `PipelineGraph` finds stages without pickling: it searches attributes, and
    lists, tuples and dicts in them.

    Raises:
        ValueError: there is such a stage.
    """
    graph = graph_of(pipe)
    known = {id(stage) for stage in graph.stages}
    for stage in pickled_stages(graph.pipe):
        if id(stage) not in known and (takes_seed(stage) or splits(stage)):
            raise ValueError(
                f"{type(stage).__name__} {'draws random numbers' if takes_seed(stage) else 'splits the data'}, but a "
                "stage after it hides it from loaders: store it in an attribute, or in a list, tuple or dict in one"
            )


def call_with_pipeline(name: str, pipe: Any) -> Any:
    """Return the result of a function that must return a pipeline.

    Args:
        name: the name of the function, for the error.
        pipe: its result.

    Raises:
        TypeError: the result is not a pipeline.
    """
    if not isinstance(pipe, (IterDataPipe, MapDataPipe)):
        raise TypeError(f"{name} must return the pipeline, but returned {pipe!r}")
    return pipe


@dataclass(frozen=True)
class EpochStart:
    """The beginning of an epoch in a process.

    Attributes:
        seeds: the seed generator of this process.
        state: the state from which the epoch resumes; ``None`` if it starts from the beginning.
        replay_reason: why the pipeline resumes by replay; "" if it has a position.
        owns_generators: whether the global random generators of this process belong to the pipeline, as in a worker.
        iter_reset_fn: the reset function of another reading service; it takes and returns the pipe.
        worker_reset_fn: the user's function; it takes the pipe, the worker and the generator, and returns the pipe.
        info: the ``WorkerInfo`` of this process.
        epoch: the epoch, if the loader counts epochs.
    """

    seeds: Any
    state: WorkerState | None = None
    replay_reason: str = ""
    owns_generators: bool = False
    iter_reset_fn: Callable[[Any], Any] | None = None
    worker_reset_fn: Callable[[Any, Any, Any], Any] | None = None
    info: Any = None
    epoch: Epoch | None = None


class EpochRun:
    """An epoch of a pipeline in one process: seeded, with its lists guarded and its state loaded.

    Args:
        pipe: the pipeline, split between ranks and workers.
        start: how the epoch begins.
        counters: the counters of all stages; by default, each keeps its own.
        seeded: the pipeline whose stages are seeded, if stages after ``pipe`` run in this process, too.

    Attributes:
        pipe: the pipeline that the user's functions have returned.
        items: yields the items: the pipeline, or a stage that replays it.
        graph: the stages up to ``items`` in this epoch.
        spans_epochs: whether the epoch continues the previous one.
        is_resumed: whether it resumes from a state.
        base: the state from which it starts, or the reason why there is none.

    Raises:
        StateError: the state belongs to another pipeline.
        TypeError: a reset function returns no pipeline.
    """

    def __init__(
        self, pipe: Any, start: EpochStart, *, counters: Counters | None = None, seeded: Any | None = None
    ) -> None:
        seed, state = seed_of(start.seeds), start.state  # users may change the seed
        graph = remove_listings(PipelineGraph(pipe))
        seed_process(
            graph if seeded is None else seeded,
            start.seeds,
            start.epoch,
            owns_generators=start.owns_generators,
            mark=None if state is None else state.mark,
        )
        if start.iter_reset_fn is not None:
            pipe = call_with_pipeline("iter_reset_fn", start.iter_reset_fn(pipe))
        if start.worker_reset_fn is not None:
            pipe = call_with_pipeline("worker_reset_fn", start.worker_reset_fn(pipe, start.info, start.seeds))
        self.pipe = pipe
        self.items = ReplayedItems(pipe, start.replay_reason) if start.replay_reason else pipe
        if start.iter_reset_fn is not None or start.worker_reset_fn is not None or start.replay_reason:
            graph = PipelineGraph(self.items)
        # After these functions, so that they see only the user's stages.
        self.graph = graph = prepare_stages(graph, seed, counters, seeded)
        load_state(graph, None if state is None else state.stages)
        self.spans_epochs = graph.spans_epochs
        self.is_resumed = state is not None
        self.base = state or (self._continued() if self.spans_epochs else WorkerState())

    def _continued(self) -> WorkerState | str:
        """Return the state from which an epoch continues the previous one, or the reason why there is none."""
        try:
            return WorkerState.of(next_epoch_state(save_state(self.graph)))
        except StateError as error:
            return str(error)
