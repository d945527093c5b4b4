"""The beginning of an epoch of a pipeline in one process, whatever the loader."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.random  # NumPy would import it at first use, in every worker
import torch

from wds_datapipes.counters import Counters
from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.loading.seeding import call_with_pipeline, seed_of, seed_stages
from wds_datapipes.pipes.stage import share_counters
from wds_datapipes.pipes.state.pipeline_state import load_state, next_epoch_state, save_state, spans_epochs
from wds_datapipes.pipes.state.replay import ReplayedItems
from wds_datapipes.pipes.state.shard_order import guard_listings, remove_listings, seed_listings
from wds_datapipes.seeds import derived_seed


@dataclass(frozen=True)
class EpochStart:
    """How an epoch begins in a process.

    Attributes:
        seeds: the seed generator of this process.
        state: the state from which the epoch resumes; ``None`` at its beginning.
        replay_reason: why the pipeline resumes by replay; "" if it has a position, or the main process replays it.
        owns_generators: whether the global generators of this process belong to the pipeline, as in a worker.
        is_shared: whether all workers share the items of this process.
        iter_reset_fn: the reset function of another reading service, called with the pipe, which it returns.
        worker_reset_fn: the user's, called with the pipe, the worker and the generator; it returns the pipe.
        info: the ``WorkerInfo`` of this process.
    """

    seeds: Any
    state: WorkerState | None = None
    replay_reason: str = ""
    owns_generators: bool = False
    is_shared: bool = False
    iter_reset_fn: Callable[[Any], Any] | None = None
    worker_reset_fn: Callable[[Any, Any, Any], Any] | None = None
    info: Any = None


class EpochRun:
    """An epoch of a pipeline in one process: seeded, with its lists guarded and its state loaded.

    Args:
        pipe: the pipeline, split between ranks and workers.
        start: how the epoch begins.
        counters: the counters of all stages; by default, each keeps its own.
        seeded: the pipeline with the stages to seed, if some stages after ``pipe`` run in this process, too.

    Attributes:
        pipe: the pipeline, as the user's functions have returned it.
        items: yields the items: the pipeline, or a stage that replays it.
        spans_epochs: whether the epoch continues the previous one.
        is_resumed: whether it resumes from a state.
        base: the state at which it begins; or why it has none.

    Raises:
        StateError: the state belongs to another pipeline.
        TypeError: a reset function returns no pipeline.
    """

    def __init__(
        self, pipe: Any, start: EpochStart, *, counters: Counters | None = None, seeded: Any | None = None
    ) -> None:
        seed = seed_of(start.seeds)  # users may change it
        remove_listings(pipe)
        if start.owns_generators:
            _seed_generators(start)
        seed_stages(pipe if seeded is None else seeded, start.seeds, shared=start.is_shared)
        if start.iter_reset_fn is not None:
            pipe = call_with_pipeline("iter_reset_fn", start.iter_reset_fn(pipe))
        if start.worker_reset_fn is not None:
            pipe = call_with_pipeline("worker_reset_fn", start.worker_reset_fn(pipe, start.info, start.seeds))
        guard_listings(pipe)  # after these functions, so that they find only their own stages
        seed_listings(pipe, seed)
        if counters is not None:
            share_counters(pipe, counters)
        self.pipe = pipe
        self.items = ReplayedItems(pipe, start.replay_reason) if start.replay_reason else pipe
        load_state(self.items, None)
        self.spans_epochs = spans_epochs(pipe)
        self.is_resumed = start.state is not None
        self.base = start.state or (self._continued() if self.spans_epochs else WorkerState(None))
        if start.state is not None:
            start.state.load(self.items)

    def _continued(self) -> WorkerState | str:
        """Return the state at which an epoch begins that continues the previous one; or why there is none."""
        try:
            return WorkerState(next_epoch_state(save_state(self.items)))
        except StateError as error:
            return str(error)


def _seed_generators(start: EpochStart) -> None:
    """Seed the global generators of Python, torch and NumPy.

    An epoch that is resumed in its middle has other numbers, since it would repeat those from its beginning.
    """
    draw = start.seeds.generate_shared_seed if start.is_shared else start.seeds.generate_seed
    seeds = [draw() for _ in range(3)]
    if start.state is not None and (mark := start.state.mark) is not None:
        seeds = [derived_seed("resumed", own, mark) for own in seeds]
    random.seed(seeds[0])
    torch.manual_seed(seeds[1])
    np.random.seed(seeds[2] >> 32)
