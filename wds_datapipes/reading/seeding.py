"""Who gets which seed: from (seed, epoch, rank, worker) to the generators of a pipeline.

A torchdata ``SeedGenerator`` has two sources of numbers. The shared one gives the same on every rank and worker, the
other gives other numbers in each; both follow from the seed of ``DataLoader2`` and the number of the epoch.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torchdata.dataloader2.graph import list_dps, traverse_dps

__all__ = ["advance", "reset_pipeline", "seed_stages"]


def advance(seed_generator: Any) -> None:
    """Move the generator of a loader on, so that the next epoch has another order; it is the same on every rank."""
    seed_generator.seed(seed_generator.generate_shared_seed())


def seed_stages(pipe: Any, seed_generator: Any, *, shared: bool = False) -> None:
    """Seed every stage that takes a seed: the same on every worker and rank before the data is split, another after.

    What splits the data is any stage with ``apply_sharding``. torchdata looks for torch's ``ShardingFilter`` itself,
    and with a stage of any other class lets each worker shuffle the shards in its own way.

    Args:
        pipe: the last stage.
        seed_generator: of this worker.
        shared: seed all stages as if they came before the split.
    """
    graph = traverse_dps(pipe)
    stages = list_dps(graph)
    before = {
        id(stage)
        for splitter in stages
        if inspect.ismethod(getattr(splitter, "apply_sharding", None))
        for stage in list_dps(traverse_dps(splitter))
    }
    # Those before the split draw their seeds first, as in torchdata, so that the orders of a seed stay as they were.
    for shares in (True, False):
        for stage in stages:
            if inspect.ismethod(getattr(stage, "set_seed", None)) and shares == (id(stage) in before or shared):
                seed = seed_generator.generate_shared_seed() if shares else seed_generator.generate_seed()
                stage.set_seed(seed)


def reset_pipeline(
    pipe: Any,
    worker_info: Any,
    seed_generator: Any,
    *,
    iter_reset_fn: Callable[[Any], Any] | None,
    worker_reset_fn: Callable[[Any, Any, Any], Any] | None,
    shared: bool = False,
) -> Any:
    """Begin an epoch in a worker: seed its global generators and its stages, and call what the user gave for that.

    Args:
        pipe: the last stage.
        worker_info: of this worker.
        seed_generator: of this worker.
        iter_reset_fn: another reading service's, called with the pipe, which it returns.
        worker_reset_fn: the user's, called with the pipe, the worker and the generator; it returns the pipe.
        shared: whether every worker gets what this one makes.
    """
    draw = seed_generator.generate_shared_seed if shared else seed_generator.generate_seed
    random.seed(draw())
    torch.manual_seed(draw())
    np.random.seed(draw() >> 32)
    seed_stages(pipe, seed_generator, shared=shared)
    if iter_reset_fn is not None:
        pipe = iter_reset_fn(pipe)
    if worker_reset_fn is not None:
        pipe = worker_reset_fn(pipe, worker_info, seed_generator)
    return pipe
