"""An epoch of a pipeline in one process, for all kinds of loaders, and the seeds of its stages.

A ``SeedGenerator``, torchdata's or ours, has two sources of seeds: a shared one, which yields the same seeds on every
rank and worker, and one that differs between them. Both depend only on the loader's seed and the epoch's number.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.random  # NumPy would import it at first use, in every worker
import torch

from wds_datapipes.counters import Counters
from wds_datapipes.datapipes import IterDataPipe, MapDataPipe
from wds_datapipes.epoch import Epoch
from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.loading.torchdata_patches.local_functions import pickled_stages
from wds_datapipes.pipes.foreign_iteration import adapt_foreign_stages
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import PipelineGraph, graph_of
from wds_datapipes.pipes.inspection import splits, takes_seed
from wds_datapipes.pipes.state.empty_passes import watch_empty_passes
from wds_datapipes.pipes.state.pipeline_state import load_state, next_epoch_state, save_state
from wds_datapipes.pipes.state.replay import ReplayedItems
from wds_datapipes.pipes.state.seeding import derive_later_seeds
from wds_datapipes.pipes.state.shard_order import guard_listings, remove_listings
from wds_datapipes.seeds import SeedGenerator, derived_seed

#: The last seed drawn in each thread, for a loader without a seed.
_drawn = threading.local()


def seed_of(seed_generator: Any) -> int:
    """Return the seed of a generator."""
    low, high = seed_generator._shared_rng._seed
    return int(low | high << 32)


def seed_loader(seed_generator: Any, seed: int, rank: int | None = None) -> None:
    """Set the seed of a loader's generator, unless it has this seed.

    Args:
        seed_generator: the generator.
        seed: the seed.
        rank: the rank of this process, if another reading service has seeded the ranks.
    """
    if seed_of(seed_generator) != seed:
        seed_generator.seed(seed)
        if rank is not None:
            seed_generator.spawn(rank, inplace=True)


def draw_seed() -> int:
    """Draw the seed of an epoch from torch's generator, for a loader without a seed."""
    _drawn.seed = int(torch.randint(-(2**63), 2**63 - 1, ()).item()) + 2**63
    return int(_drawn.seed)


def is_drawn(seed_generator: Any) -> bool:
    """Whether the seed of a generator was just drawn, because its loader has none."""
    return seed_of(seed_generator) == getattr(_drawn, "seed", None)


def seed_stages(pipe: Any, seed_generator: Any, epoch: Epoch | None = None) -> None:
    """Seed every stage that takes a seed: identically on all workers and ranks before the split, differently after it.

    A stage whose ``shares_seed`` is true has the same seed everywhere, even after the split.

    Any stage with ``apply_sharding`` splits the data. torchdata recognizes only torch's ``ShardingFilter``: with any
    other class, it lets each worker shuffle the shards differently.

    Args:
        pipe: the last stage.
        seed_generator: the seed generator of this worker.
        epoch: the epoch, if the loader counts epochs.
    """
    graph = graph_of(pipe)
    derive_later_seeds(graph)
    # Draw the seeds in the same order as torchdata, so that the order for a given seed does not change.
    before, after = [*graph.before_split.values()], graph.after_split
    for some, draw in ((before, seed_generator.generate_shared_seed), (after, seed_generator.generate_seed)):
        for stage in some:
            if takes_seed(stage):
                stage.set_seed(draw())
    # These seeds are derived rather than drawn, so that the others do not change.
    sharing = [stage for stage in after if declared(stage).shares_seed]
    for number, stage in enumerate(sharing):
        stage.set_seed(derived_seed("shares_seed", seed_of(seed_generator), number))
    if epoch is None:
        return
    first, following = SeedGenerator(epoch.first), epoch.expected_next
    follows = None if following is None else SeedGenerator(following)
    for stage in filter(takes_seed, before):
        stage.current_epoch, stage.first_seed = epoch, first.generate_shared_seed()
        stage.next_seed = None if follows is None else follows.generate_shared_seed()
    for stage in (each for each in after if declared(each).position_log_folder() is not None):
        stage.current_epoch = epoch
    for number, stage in enumerate(sharing):
        stage.current_epoch, stage.first_seed = epoch, derived_seed("shares_seed", epoch.first, number)
        stage.next_seed = None if following is None else derived_seed("shares_seed", following, number)


def refuse_hidden_stages(pipe: Any) -> None:
    """Raise an error if only pickling finds a stage that draws random numbers or splits the data.

    Neither could happen as the loader says. `PipelineGraph` finds stages without pickling: it searches attributes, and
    lists, tuples and dicts in them.

    Raises:
        ValueError: there is such a stage.
    """
    known = {id(stage) for stage in graph_of(pipe).stages}
    for stage in pickled_stages(pipe):
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
        seed = seed_of(start.seeds)  # users may change it
        graph = remove_listings(PipelineGraph(pipe))
        if start.owns_generators:
            _seed_generators(start)
        seed_stages(graph if seeded is None else seeded, start.seeds, start.epoch)
        if start.iter_reset_fn is not None:
            pipe = call_with_pipeline("iter_reset_fn", start.iter_reset_fn(pipe))
        if start.worker_reset_fn is not None:
            pipe = call_with_pipeline("worker_reset_fn", start.worker_reset_fn(pipe, start.info, start.seeds))
        if start.iter_reset_fn is not None or start.worker_reset_fn is not None:
            graph = PipelineGraph(pipe)
        graph = guard_listings(graph, seed)  # after these functions, so that they see only the user's stages
        for each in (graph, *([] if seeded is None else [PipelineGraph(seeded)])):
            adapt_foreign_stages(each)
            watch_empty_passes(each)
        if counters is not None:
            graph.share_counters(counters)
        self.pipe = self.items = pipe
        if start.replay_reason:
            self.items = ReplayedItems(pipe, start.replay_reason)
            graph = PipelineGraph(self.items)
        self.graph = graph
        load_state(graph, None)
        self.spans_epochs = graph.spans_epochs
        self.is_resumed = start.state is not None
        self.base = start.state or (self._continued() if self.spans_epochs else WorkerState())
        if start.state is not None:
            start.state.load(graph)

    def _continued(self) -> WorkerState | str:
        """Return the state from which an epoch continues the previous one, or the reason why there is none."""
        try:
            return WorkerState.of(next_epoch_state(save_state(self.graph)))
        except StateError as error:
            return str(error)


def _seed_generators(start: EpochStart) -> None:
    """Seed the global generators of Python, torch and NumPy.

    An epoch that resumes in the middle gets other seeds, because the same ones would repeat the numbers from its
    beginning.
    """
    seeds = [start.seeds.generate_seed() for _ in range(3)]
    if start.state is not None and (mark := start.state.mark) is not None:
        seeds = [derived_seed("resumed", own, mark) for own in seeds]
    random.seed(seeds[0])
    torch.manual_seed(seeds[1])
    np.random.seed(seeds[2] >> 32)
