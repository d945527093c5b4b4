"""Patches of the seeds, orders and states of torchdata's ``DataLoader2``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from wds_datapipes.loading.torchdata_patches.replace import PatchRecord, replace

__all__ = ["LOADER_REPAIRS", "TORCH_REPAIRS"]

LOADER_REPAIRS = PatchRecord()

#: What is patched in torch itself, whatever torchdata is installed.
TORCH_REPAIRS = PatchRecord()


@TORCH_REPAIRS.repair(issue=None)
def later_passes() -> None:
    """A ``.shuffle()`` that is iterated twice in an epoch of torch's ``DataLoader`` has another order in each worker.

    The seed that all workers share serves the first pass alone. With ``.sharding_filter().cycle(2)`` behind it, some
    samples of the second pass come from several workers, and others from none. The seed of each later pass follows
    from that of the pass before it now. What draws from the global generators before the split, such as a
    ``RandomSampler``, draws the same in all workers.
    """
    import torch
    from torch.utils.data import graph_settings

    from wds_datapipes.pipes.state.seeding import derive_later_seeds
    from wds_datapipes.pipes.state.shard_order import guard_listings, seed_listings

    apply_random_seed = graph_settings.apply_random_seed

    @functools.wraps(apply_random_seed)
    def apply_seeds_of_all_passes(datapipe: Any, rng: Any) -> Any:
        derive_later_seeds(datapipe)
        guard_listings(datapipe, drawn_only=True)
        # A number is drawn from a copy, so that importing this package changes no order.
        copied = torch.Generator()
        copied.set_state(rng.get_state())
        seed_listings(datapipe, int(torch.empty((), dtype=torch.int64).random_(generator=copied).item()))
        return apply_random_seed(datapipe, rng)

    replace(graph_settings, "apply_random_seed", apply_seeds_of_all_passes)


@TORCH_REPAIRS.repair(issue=None)
def unknown_place() -> None:
    """``StatefulDataLoader`` saves states of a pipeline in the middle of an epoch, and loses and repeats samples.

    It asks the last stage alone, or counts batches and drops as many of an epoch with another order. To save such a
    state is a warning now, and to load it a ``StateError``; both name `StatefulShards`. So is the state of a
    `StatefulShards` that is loaded on another rank.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return

    state_dict, load_state_dict = StatefulDataLoader.state_dict, StatefulDataLoader.load_state_dict

    @functools.wraps(state_dict)
    def save_and_check(self: Any) -> dict[str, Any]:
        from wds_datapipes.loading.stateful_dataset.stateful_dataloader import check_saved

        state: dict[str, Any] = state_dict(self)
        check_saved(self, state)
        return state

    @functools.wraps(load_state_dict)
    def check_and_load(self: Any, state_dict: dict[str, Any]) -> None:
        from wds_datapipes.loading.stateful_dataset.stateful_dataloader import check_loaded

        check_loaded(self, state_dict)
        load_state_dict(self, state_dict)

    replace(StatefulDataLoader, "state_dict", save_and_check)
    replace(StatefulDataLoader, "load_state_dict", check_and_load)


@LOADER_REPAIRS.repair(issue=None)
def repeated_order() -> None:
    """Every epoch has the order of the first, with and without ``DataLoader2.seed``.

    With a seed: the workers draw from copies of the loader's generator, and the original never advances. It is seeded
    anew after each epoch has begun, from itself: one ``seed()`` makes a whole run reproducible, and its first epoch is
    the one it always was.

    Without a seed: from 0.8.0 on a seed is drawn from torch's generator inside ``fork_rng``, which puts the generator
    back. It is drawn without it, as in 0.7.1 and as by torch's ``DataLoader``. ``torch.manual_seed`` still makes a run
    reproducible; each epoch takes one number from torch's generator.
    """
    from torchdata.dataloader2.random import seed_generator as seeding
    from torchdata.dataloader2.reading_service import MultiProcessingReadingService

    initialize_iteration = MultiProcessingReadingService.initialize_iteration

    @functools.wraps(initialize_iteration)
    def initialize_iteration_and_advance(self: Any, seed_generator: Any, iter_reset_fn: Any = None) -> Any:
        next_reset_fn = initialize_iteration(self, seed_generator, iter_reset_fn)
        if self._mp:
            seed_generator.seed(seed_generator.generate_shared_seed())
        return next_reset_fn

    def torch_random_seed() -> int:
        import torch

        return int(torch.randint(-(2**63), 2**63 - 1, ()).item()) + 2**63

    replace(MultiProcessingReadingService, "initialize_iteration", initialize_iteration_and_advance)
    replace(seeding, "_get_torch_random_seed", torch_random_seed)


@LOADER_REPAIRS.repair(issue=None)
def uneven_ranks() -> None:
    """Shards that are left over after an even deal all go to the first ranks.

    Instances are numbered by rank and then by worker, so 6 shards on 2 ranks with 2 workers each are split into 4 and
    2, where torch's ``DataLoader`` gives 3 to each. They are numbered as there now.
    """
    from torchdata.dataloader2 import reading_service

    from wds_datapipes.loading.torchdata_patches.worker_processes import process_init_fn

    replace(reading_service, "process_init_fn", process_init_fn)


@LOADER_REPAIRS.repair(issue=None)
def lists_drawn_in_workers() -> None:
    """What draws from the global generators before the split makes another list in each worker.

    The generators differ between workers, so a ``random.shuffle`` of the user, or a ``RandomSampler``, repeats some
    items and leaves out others. While the list is made, the generators follow from the seed of the epoch now.
    """
    from torchdata.dataloader2.utils import worker

    from wds_datapipes.loading.seeding import seed_of
    from wds_datapipes.pipes.state.shard_order import seed_listings

    set_graph_random_seed = worker.set_graph_random_seed

    @functools.wraps(set_graph_random_seed)
    def set_seeds_of_lists_too(datapipe: Any, seed_generator: Any) -> Any:
        seed_listings(datapipe, seed_of(seed_generator))
        return set_graph_random_seed(datapipe, seed_generator)

    replace(worker, "set_graph_random_seed", set_seeds_of_lists_too)


@LOADER_REPAIRS.repair(issue=None)
def unseeded_service() -> None:
    """``DataLoader2.seed`` has no effect without a reading service.

    Seeds reach the pipeline through a reading service. ``InProcessReadingService``, which its own documentation calls
    the default, takes the place of none when a seed is set.
    """
    from torchdata.dataloader2 import DataLoader2, InProcessReadingService

    seed = DataLoader2.seed

    @functools.wraps(seed)
    def seed_through_service(self: Any, value: int) -> None:
        seed(self, value)
        if self.reading_service is None:
            self.reading_service = InProcessReadingService()

    replace(DataLoader2, "seed", seed_through_service)


@LOADER_REPAIRS.repair(issue=None)
def pickled_pipeline() -> None:
    """``DataLoader2.load_state_dict`` resumes the pipeline that is pickled in the state, and not that of the loader.

    So a transform or a token that has changed since is replaced by the old one, and credentials are in checkpoints.
    With a ``ShardReadingService``, the state is that of the service, without a pickle. Loading it compares the
    pipelines, and resumes that of the loader, also after the loader was iterated. ``DataLoader2.from_state`` has no
    pipeline to resume, and says so.

    Other services do not know where the loop is. A warning says so where a state is asked for in the middle of an
    epoch.
    """
    from torchdata.dataloader2 import DataLoader2
    from torchdata.dataloader2.dataloader2 import DataLoader2Iterator

    from_state, next_item = DataLoader2.from_state.__func__, DataLoader2Iterator.__next__
    state_dict, load_state_dict = DataLoader2.state_dict, DataLoader2.load_state_dict

    @functools.wraps(state_dict)
    def save(self: Any) -> dict[str, Any]:
        from wds_datapipes.loading.service.loader import own_service, save_state, warn_of_lost_position

        if (service := own_service(self)) is not None:
            return save_state(self, service)
        warn_of_lost_position(self, getattr(self, "_ended_iterator_id", None))
        state: dict[str, Any] = state_dict(self)
        return state

    @functools.wraps(load_state_dict)
    def load(self: Any, state_dict: Any) -> None:
        from wds_datapipes.loading.service.loader import load_state, own_service, refuse_state

        if (service := own_service(self)) is not None:
            load_state(self, service, state_dict)
        else:
            refuse_state(state_dict)
            load_state_dict(self, state_dict)

    @functools.wraps(from_state)
    def load_without_pipeline(cls: Any, state: Any, reading_service: Any) -> Any:
        from wds_datapipes.loading.service.loader import refuse_pipeline

        refuse_pipeline(reading_service, state)
        return from_state(cls, state, reading_service)

    @functools.wraps(next_item)
    def next_or_end(self: Any) -> Any:
        try:
            return next_item(self)
        except StopIteration:
            if not self.dataloader._is_paused:
                self.dataloader._ended_iterator_id = self.iterator_id
            raise

    replace(DataLoader2, "state_dict", save)
    replace(DataLoader2, "load_state_dict", load)
    replace(DataLoader2, "from_state", classmethod(load_without_pipeline))
    replace(DataLoader2Iterator, "__next__", next_or_end)


@LOADER_REPAIRS.repair(issue=None)
def no_set_epoch() -> None:
    """``DataLoader2`` has no ``set_epoch``, which trainers call that choose an order by the number of the epoch.

    It has one now where a ``ShardReadingService`` is its reading service, or is in it. An iterator that has yielded
    nothing yet begins the chosen epoch: Lightning asks for it before it calls the hooks that choose.
    """
    from torchdata.dataloader2 import DataLoader2
    from torchdata.dataloader2.dataloader2 import DataLoader2Iterator

    next_item = DataLoader2Iterator.__next__

    @functools.wraps(next_item)
    def begin_again_and_next(self: Any) -> Any:
        loader = self.dataloader
        if loader.__dict__.pop("_begins_again", False) and self.iterator_id == loader.valid_iterator_id:
            loader._reset_iter = True
            self.iterator_id = iter(loader).iterator_id
        return next_item(self)

    def set_epoch(self: Any) -> Callable[[int], None]:
        from wds_datapipes.loading.service.loader import epoch_setter

        return epoch_setter(self)

    replace(DataLoader2, "set_epoch", property(set_epoch))
    replace(DataLoader2Iterator, "__next__", begin_again_and_next)


@LOADER_REPAIRS.repair(issue=None)
def no_length() -> None:
    """``DataLoader2`` has no ``len()``, also where its pipeline has one.

    It is how many items an epoch has on this rank, where the pipeline knows it, and a ``TypeError`` otherwise. A loader
    is true all the same.
    """
    from torchdata.dataloader2 import DataLoader2

    def length(self: Any) -> int:
        from wds_datapipes.loading.service.loader import length_of

        return length_of(self)

    replace(DataLoader2, "__len__", length)
    replace(DataLoader2, "__bool__", lambda _: True)
