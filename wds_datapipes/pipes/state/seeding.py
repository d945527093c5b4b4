"""Seeds of random stages: a loader sets one for each epoch, from which those of later passes are derived."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.random  # NumPy would import it at first use, in every worker
import torch

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.epoch import Epoch
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.pipes.inspection import library_of, takes_seed
from wds_datapipes.seeds import SeedGenerator, derived_seed, seed_of

if TYPE_CHECKING:
    from typing_extensions import Self


#: The attribute of a stage of another package that holds the last seed set and whether a pass has begun with it, and
#: the attribute that marks a wrapped method.
SEED, _MARK = "_wds_datapipes_seed", "_derives_later_seeds"
#: The attributes of a `SeededStage` that hold seeds.
SEEDS = frozenset({"_seed", "_last_seed", "_own_seed", "next_seed", "first_seed", "current_epoch"})


class SeededStage:
    """A random stage: a loader sets the seed of a pass, from which the seeds of later passes are derived.

    A loader sets seeds once per epoch, but a later stage, such as ``.cycle(2)``, may restart this stage more often.
    Even then, stages before the split must draw the same numbers in all workers and ranks.

    Attributes:
        next_seed: the seed of the next epoch, if the loader knows it, so that a stage can prepare for that epoch.
        current_epoch: the epoch, in its first pass, if the loader counts epochs.
        first_seed: the seed of this stage in epoch 0, if so.
    """

    next_seed: int | None = None
    current_epoch: Epoch | None = None
    first_seed: int | None = None
    _seed: int | None = None
    _last_seed: int | None = None

    def set_seed(self, seed: int) -> Self:
        """Set the seed of the next pass; called by loaders."""
        self._seed, self.next_seed, self.first_seed, self.current_epoch = seed, None, None, None
        return self

    def take_epoch(self) -> Epoch | None:
        """Return the epoch of the pass; None for all but the first pass of an epoch."""
        epoch, self.current_epoch = self.current_epoch, None
        return epoch

    def take_seed(self) -> int:
        """Return the seed of a new pass, or one from torch's generator if no loader has ever set a seed."""
        seed, self._seed = self._seed, None
        if seed is None:
            if self._last_seed is None:
                return int(torch.empty((), dtype=torch.int64).random_().item())
            seed = later_seed(self._last_seed)
        self._last_seed = seed
        return seed


def seed_process(
    pipe: Any,
    seed_generator: Any,
    epoch: Epoch | None = None,
    *,
    owns_generators: bool = False,
    mark: int | None = None,
) -> None:
    """Seed the stages of a pipeline, and before them the global generators of this process if they belong to it.

    Args:
        pipe: as for `seed_stages`.
        seed_generator: likewise.
        epoch: likewise.
        owns_generators: whether the global generators belong to the pipeline, as in a worker.
        mark: a number that identifies the position in the epoch at which the pipeline resumes, if it does. It gives
            the global generators other seeds, because the same ones would repeat their numbers from the beginning of
            the epoch.
    """
    if owns_generators:
        _seed_global_generators(seed_generator, mark)
    seed_stages(pipe, seed_generator, epoch)


def draw_global_seeds(seed_generator: Any) -> list[int]:
    """Return the seeds of the global generators of a worker, which it draws before those of its stages."""
    return [seed_generator.generate_seed() for _ in range(3)]


def _seed_global_generators(seed_generator: Any, mark: int | None) -> None:
    """Seed the generators of Python, torch and NumPy."""
    seeds = draw_global_seeds(seed_generator)
    if mark is not None:
        seeds = [derived_seed("resumed", own, mark) for own in seeds]
    random.seed(seeds[0])
    torch.manual_seed(seeds[1])
    np.random.seed(seeds[2] >> 32)


def seed_stages(pipe: Any, seed_generator: Any, epoch: Epoch | None = None) -> None:
    """Seed every stage that takes a seed: identically on all workers and ranks before the split, differently after it.

    A stage whose ``shares_seed`` is true has the same seed everywhere, even after the split.

    Any stage with ``apply_sharding`` splits the data. torchdata recognizes only torch's ``ShardingFilter``: with any
    other class, it lets each worker shuffle the shards differently.

    Args:
        pipe: the last stage, or the graph of the pipeline.
        seed_generator: the seed generator of this process, ours or torchdata's. Of its two sources of seeds, one yields
            the same seeds on every rank and worker, and the other differs between them. Both depend only on the seed of
            the loader and the number of the epoch.
        epoch: the epoch, if the loader counts epochs.
    """
    graph = graph_of(pipe)
    derive_later_seeds(graph)
    # Draw the seeds in the same order as torchdata, so that the order for a given seed does not change.
    before, after = [*filter(takes_seed, graph.before_split.values())], graph.after_split
    for stage in before:
        stage.set_seed(seed_generator.generate_shared_seed())
    for stage in filter(takes_seed, after):
        stage.set_seed(seed_generator.generate_seed())
    # These seeds are derived rather than drawn, so that the others do not change.
    sharing = [stage for stage in after if declared(stage).shares_seed]
    for number, stage in enumerate(sharing):
        stage.set_seed(derived_seed("shares_seed", seed_of(seed_generator), number))
    if epoch is None:
        return
    first, following = SeedGenerator(epoch.first), epoch.expected_next
    follows = None if following is None else SeedGenerator(following)
    for stage in before:
        stage.current_epoch, stage.first_seed = epoch, first.generate_shared_seed()
        stage.next_seed = None if follows is None else follows.generate_shared_seed()
    for stage in (each for each in after if declared(each).position_log_folder() is not None):
        stage.current_epoch = epoch
    for number, stage in enumerate(sharing):
        stage.current_epoch, stage.first_seed = epoch, derived_seed("shares_seed", epoch.first, number)
        stage.next_seed = None if following is None else derived_seed("shares_seed", following, number)


def later_seed(seed: int) -> int:
    """Return the seed of the pass after the one with this seed."""
    return derived_seed("later pass", seed)


def pending_seed(stage: Any) -> int | None:
    """Return the seed set for the next iteration of a stage; None if there is none or it is unknown."""
    if SEED in vars(stage):
        seed, is_used = vars(stage)[SEED]
        return None if is_used else seed
    found: int | None = vars(stage).get("_seed")  # set by SeededStage and torch's .shuffle()
    return found


def derive_later_seeds(pipe: Any) -> None:
    """Make stages of other packages derive the seeds of later passes like `SeededStage`.

    torch's ``.shuffle()`` forgets its seed when a pass begins. For the next pass, it draws one from torch's generator,
    which differs between workers, so each worker would split a different order. Once per process, this function wraps
    the methods with which a class takes its seed and begins a pass. Loaders call it before they seed a pipeline.

    Args:
        pipe: the last stage.
    """
    for stage in graph_of(pipe).stages:
        if not takes_seed(stage) or isinstance(stage, SeededStage):
            continue
        for name, wrapped in {"set_seed": _recording_set_seed, "reset": _reseeding_reset}.items():
            # Wrap it in the class that defines it: a new method in another class would change that one's fingerprint.
            kind = next((each for each in type(stage).__mro__ if name in vars(each)), None)
            if kind is None or library_of(kind) == "wds_datapipes":
                continue
            method = vars(kind)[name]
            if not getattr(method, _MARK, False):
                setattr(type(stage) if kind is IterDataPipe else kind, name, wrapped(method))


def _recording_set_seed(set_seed: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``set_seed`` that records the seed."""

    @functools.wraps(set_seed)
    def set_and_record(self: Any, seed: int, *args: Any, **kwargs: Any) -> Any:
        vars(self)[SEED] = seed, False
        return set_seed(self, seed, *args, **kwargs)

    setattr(set_and_record, _MARK, True)
    return set_and_record


def _reseeding_reset(reset: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``reset`` that sets a seed if none was set since the previous pass began."""

    @functools.wraps(reset)
    def seed_and_reset(self: Any) -> None:
        seed, is_used = vars(self).get(SEED, (None, False))
        if is_used:
            self.set_seed(later_seed(seed))
        reset(self)
        # Set after the call, because the method may call that of the base class.
        if seed is not None:
            vars(self)[SEED] = vars(self)[SEED][0], True

    setattr(seed_and_reset, _MARK, True)
    return seed_and_reset
