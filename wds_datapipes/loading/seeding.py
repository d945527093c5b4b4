"""Seeding: from (seed, epoch, rank, worker) to the generators of a pipeline.

A ``SeedGenerator``, torchdata's or ours, has two sources of numbers. The shared one gives the same on every rank and
worker, the other gives other numbers in each; both follow from the seed of the loader and the number of the epoch.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.random  # NumPy imports it when it is first used, and that would be in every worker
import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.graph import DataPipeGraph, traverse_dps

from wds_datapipes.loading.philox import SeedGenerator
from wds_datapipes.pipes.sharding import splits
from wds_datapipes.pipes.state.graph import as_stage, takes_seed
from wds_datapipes.pipes.state.seeding import derive_later_seeds
from wds_datapipes.pipes.state.shard_order import guard_listings, remove_listings, seed_listings
from wds_datapipes.seeds import derived_seed

__all__ = ["EpochSeeds", "call_with_pipeline", "guard_lists", "reset_pipeline", "seed_of", "seed_stages"]


class EpochSeeds:
    """The seeds of the epochs. Each follows from the one before, and the first is that of the loader.

    They are those of torchdata, whose generator (Philox) is the same in every release of Python and torch.

    Attributes:
        seed: of the present epoch.
        epoch: its number since the loader was seeded, from 0.
        first: the seed of the first epoch.
        next: the seed of the next one, unless the loader is seeded before it.
        wanted: the number that was chosen for the next one, or None.
    """

    def __init__(self) -> None:
        self.seed = 0
        self.epoch = 0
        self.first = 0
        self.next: int | None = None
        #: The generator's two engines as the epoch found them, where another reading service has used it before.
        self.engines: list[list[int]] | None = None
        self.wanted: int | None = None

    def begin(self, seed_generator: Any, meet: Callable[[int], int] | None = None, *, rank: int = 0) -> None:
        """Begin an epoch.

        Args:
            seed_generator: of the loader, as the last epoch or somebody who has seeded it meanwhile has left it.
            meet: returns the number of rank 0, of one on each rank; None if there is one rank.
            rank: of this process, if another reading service has given the ranks their seeds.
        """
        if meet is not None:
            seed_generator.seed(meet(seed_generator.generate_shared_seed()))
        # Ranks that share a seed draw it from that of the loader. It is judged by what all of them have, so that all
        # count alike also where rank 0 alone was seeded anew.
        is_next = self.next is not None and seed_of(seed_generator) in (
            self.next,
            SeedGenerator(self.next).generate_shared_seed(),
        )
        self.epoch = self.epoch + 1 if is_next else 0
        self.first = self.first if is_next else seed_of(seed_generator)
        if self.wanted is not None:
            self.epoch, self.wanted = self.wanted, None
            is_plain = _engines_of(seed_generator) is None
            seed_generator.seed(derived_seed("epoch", self.first, self.epoch))
            if not is_plain:
                seed_generator.spawn(rank, inplace=True)
        self.seed = seed_of(seed_generator)
        self.engines = _engines_of(seed_generator)

    def resume(
        self,
        seed_generator: Any,
        *,
        seed: int,
        epoch: int,
        first: int,
        engines: list[list[int]] | None,
        wanted: int | None = None,
    ) -> None:
        """Begin an epoch that was begun before."""
        self.seed, self.epoch, self.first, self.engines, self.wanted = seed, epoch, first, engines, wanted
        seed_generator.seed(seed)
        for engine, facts in zip(seed_generator.__getstate__(), engines or [], strict=False):
            _set_engine(engine, facts)

    def follow(self, *, epoch: int, first: int, next: int | None, wanted: int | None = None) -> None:  # noqa: A002 - as the attribute is called
        """Let the next epoch be the one after an epoch of another loader."""
        self.epoch, self.first, self.next, self.wanted = epoch, first, next, wanted

    def end(self, seed_generator: Any) -> None:
        """Move the generator on, so that the next epoch has another order; it is the same on every rank."""
        seed_generator.seed(seed_generator.generate_shared_seed())
        self.next = seed_of(seed_generator)

    def set_epoch(self, epoch: int) -> None:
        """Choose the number of the next epoch."""
        self.wanted = epoch


def seed_of(seed_generator: Any) -> int:
    """Return what a generator was seeded with."""
    low, high = seed_generator._shared_rng._seed
    return int(low | high << 32)


def _engines_of(seed_generator: Any) -> list[list[int]] | None:
    """Return where the engines of a generator are; None if it was seeded, and nothing more."""
    here, seeded = (
        [_facts_of(engine) for engine in generator.__getstate__()]
        for generator in (seed_generator, SeedGenerator(seed_of(seed_generator)))
    )
    return None if here == seeded else here


def _facts_of(engine: Any) -> list[int]:
    """Return all that the numbers depend on which an engine will generate."""
    return [*engine._seed, *engine._ctr, *(engine._generated_seeds or ())]


def _set_engine(engine: Any, facts: Sequence[int]) -> None:
    """Have an engine generate the same as the one whose `_facts_of` are given."""
    low, high, *others = facts
    engine.seed(low | high << 32)
    engine._ctr, engine._generated_seeds = others[:4], others[4:] or None


def seed_stages(pipe: Any, seed_generator: Any, *, shared: bool = False) -> None:
    """Seed every stage that takes a seed: the same on every worker and rank before the data is split, another after.

    A stage whose ``shares_seed`` is true gets the same everywhere behind the split, too.

    What splits the data is any stage with ``apply_sharding``. torchdata looks for torch's ``ShardingFilter`` itself,
    and with a stage of any other class lets each worker shuffle the shards in its own way.

    Args:
        pipe: the last stage.
        seed_generator: of this worker.
        shared: seed all stages as if they came before the split.
    """
    derive_later_seeds(pipe)
    graph = traverse_dps(pipe)
    stages = _stages_in(graph)
    # The stages draw their seeds in the same order as in torchdata, so that the orders of a seed stay as they were.
    before = (
        stages
        if shared
        else {key: stage for each in _splitters(graph) for key, stage in _stages_in(traverse_dps(each)).items()}
    )
    after = {key: stage for key, stage in stages.items() if key not in before}
    for some, draw in ((before, seed_generator.generate_shared_seed), (after, seed_generator.generate_seed)):
        for stage in some.values():
            if takes_seed(stage):
                stage.set_seed(draw())
    # These seeds are not drawn, so that the others stay as they are.
    sharing = [stage for stage in after.values() if as_stage(stage).shares_seed]
    for number, stage in enumerate(sharing):
        stage.set_seed(derived_seed("shares_seed", seed_of(seed_generator), number))


def guard_lists(pipe: Any, seed: int) -> None:
    """Insert a `Listing` before what splits the data, and have it draw the same on every worker and rank.

    It comes behind the functions of the user, which find only their own stages in a pipeline.

    Args:
        pipe: the last stage.
        seed: of the epoch, which all workers and ranks share.
    """
    guard_listings(pipe)
    seed_listings(pipe, seed)


def _stages_in(graph: DataPipeGraph) -> dict[int, Any]:
    """Return the stages of a graph by their identities, breadth first, as torchdata lists them."""
    found: dict[int, Any] = {}
    graphs = deque([graph])
    while graphs:
        for key, (stage, sources) in graphs.popleft().items():
            if key not in found:
                found[key] = stage
                graphs.append(sources)
    return found


def _splitters(graph: dict[int, Any], seen: set[int] | None = None) -> Iterator[Any]:
    """Yield the stages that split the data, depth first."""
    seen = set() if seen is None else seen
    for key, (stage, sources) in graph.items():
        if key not in seen:
            seen.add(key)
            if splits(stage):
                yield stage
            yield from _splitters(sources, seen)


def call_with_pipeline(name: str, pipe: Any) -> Any:
    """Return what a function has returned that was given a pipeline.

    Args:
        name: what the error calls the function.
        pipe: what it has returned.

    Raises:
        TypeError: it is no pipeline.
    """
    if not isinstance(pipe, (IterDataPipe, MapDataPipe)):
        raise TypeError(f"{name} has to return the pipeline, and has returned {pipe!r}")
    return pipe


def reset_pipeline(
    pipe: Any,
    worker_info: Any,
    seed_generator: Any,
    *,
    iter_reset_fn: Callable[[Any], Any] | None,
    worker_reset_fn: Callable[[Any, Any, Any], Any] | None,
    shared: bool = False,
    mark: int | None = None,
) -> Any:
    """Begin an epoch in a worker: seed its global generators and its stages, and call what the user gave for that.

    Args:
        pipe: the last stage.
        worker_info: of this worker.
        seed_generator: of this worker.
        iter_reset_fn: another reading service's, called with the pipe, which it returns.
        worker_reset_fn: the user's, called with the pipe, the worker and the generator; it returns the pipe.
        shared: whether every worker gets what this one makes.
        mark: identifies where the epoch is resumed; None at its beginning. With another one, the global generators
            draw other numbers, as they would otherwise repeat those of the beginning.
    """
    remove_listings(pipe)
    draw = seed_generator.generate_shared_seed if shared else seed_generator.generate_seed
    seed = seed_of(seed_generator)  # users may change it
    seeds = [draw() for _ in range(3)]
    if mark is not None:
        seeds = [derived_seed("resumed", seed, mark) for seed in seeds]
    random.seed(seeds[0])
    torch.manual_seed(seeds[1])
    np.random.seed(seeds[2] >> 32)
    seed_stages(pipe, seed_generator, shared=shared)
    if iter_reset_fn is not None:
        pipe = call_with_pipeline("iter_reset_fn", iter_reset_fn(pipe))
    if worker_reset_fn is not None:
        pipe = call_with_pipeline("worker_reset_fn", worker_reset_fn(pipe, worker_info, seed_generator))
    guard_lists(pipe, seed)
    return pipe
