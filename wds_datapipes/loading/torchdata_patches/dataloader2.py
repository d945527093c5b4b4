"""Patches of the seeds, orders and states of torchdata's ``DataLoader2``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from wds_datapipes.loading.torchdata_patches.shares import copied_by_workers, copied_data, endless_passes

__all__ = ["LOADER_PATCHES", "TORCH_PATCHES"]


def later_passes() -> None:
    """A ``.shuffle()`` that is iterated twice in one epoch of ``DataLoader`` has a different order in each worker.

    The seed that all workers share is used for the first pass only. With ``.sharding_filter().cycle(2)`` after the
    shuffle, some samples of the second pass come from several workers, and others from none. The patch derives the
    seed of each later pass from that of the pass before, and sources that draw from the global generators before the
    split, such as a ``RandomSampler``, draw the same in all workers.
    """
    import torch

    from wds_datapipes.datapipes import graph_settings
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

    setattr(graph_settings, "apply_random_seed", apply_seeds_of_all_passes)


def local_classes() -> None:
    """A stage of a local class, or one with a lambda in a list or a dictionary, raises an error in every loader.

    torch finds the stages of a pipeline by pickling each of them, and pickle finds no local functions and classes. The
    patch leaves functions and classes out of these pickles, which are never unpickled.
    """
    from wds_datapipes.datapipes import graph
    from wds_datapipes.loading.torchdata_patches.local_functions import tolerant_pickle

    setattr(graph, "pickle", tolerant_pickle())


def unknown_position() -> None:
    """``StatefulDataLoader`` saves mid-epoch states of a pipeline that lose and repeat samples.

    It saves the state of the last stage only, or counts batches and skips as many in an epoch with a different order.
    With the patch, saving such a state warns and loading it raises a ``StateError``; both recommend `StatefulShards`.
    Loading the state of a `StatefulShards` on another rank raises a ``StateError``, too.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return

    state_dict, load_state_dict = StatefulDataLoader.state_dict, StatefulDataLoader.load_state_dict

    @functools.wraps(state_dict)
    def save_and_check(self: Any) -> dict[str, Any]:
        from wds_datapipes.loading.stateful_dataset.dataset import check_saved

        state: dict[str, Any] = state_dict(self)
        check_saved(self, state)
        return state

    @functools.wraps(load_state_dict)
    def check_and_load(self: Any, state_dict: dict[str, Any]) -> None:
        from wds_datapipes.loading.stateful_dataset.dataset import check_loaded

        if not check_loaded(self, state_dict):
            load_state_dict(self, state_dict)

    setattr(StatefulDataLoader, "state_dict", save_and_check)
    setattr(StatefulDataLoader, "load_state_dict", check_and_load)


def repeated_order() -> None:
    """Every epoch repeats the order of the first, with or without ``DataLoader2.seed``.

    With a seed: the workers draw from copies of the loader's generator, and the original never advances. The patch
    reseeds it from itself after each epoch has begun: one ``seed()`` makes a whole run reproducible, and the first
    epoch does not change.

    Without a seed: since 0.8.0, a seed is drawn from torch's generator inside ``fork_rng``, which restores the
    generator. The patch draws it without ``fork_rng``, as 0.7.1 and torch's ``DataLoader`` do. ``torch.manual_seed``
    still makes a run reproducible; each epoch draws one number from torch's generator.
    """
    from torchdata.dataloader2.random import seed_generator as seeding
    from torchdata.dataloader2.reading_service import MultiProcessingReadingService

    from wds_datapipes.loading.seeding import draw_seed

    initialize_iteration = MultiProcessingReadingService.initialize_iteration

    @functools.wraps(initialize_iteration)
    def initialize_iteration_and_advance(self: Any, seed_generator: Any, iter_reset_fn: Any = None) -> Any:
        next_reset_fn = initialize_iteration(self, seed_generator, iter_reset_fn)
        if self._mp:
            seed_generator.seed(seed_generator.generate_shared_seed())
        return next_reset_fn

    setattr(MultiProcessingReadingService, "initialize_iteration", initialize_iteration_and_advance)
    setattr(seeding, "_get_torch_random_seed", draw_seed)


def uneven_ranks() -> None:
    """Leftover shards of an uneven split all go to the first ranks.

    Instances are numbered by rank and then by worker, so 6 shards on 2 ranks with 2 workers each are split into 4 and
    2, where torch's ``DataLoader`` gives 3 to each. The patch numbers them as torch's ``DataLoader`` does.
    """
    from torchdata.dataloader2 import reading_service

    from wds_datapipes.loading.torchdata_patches.worker_processes import process_init_fn

    setattr(reading_service, "process_init_fn", process_init_fn)


def lists_drawn_in_workers() -> None:
    """A list or an order that is drawn before the split, except by torch's ``.shuffle()``, differs between workers.

    So a source that draws from the global generators, such as a user's ``random.shuffle`` or a ``RandomSampler``, and a
    stage that splits the data itself, such as `IndexedSamples`, repeat some items and omit others. The patch seeds the
    generators from the epoch's seed while the list is made, and all stages as a `ShardReadingService` does.
    """
    from torchdata.dataloader2 import reading_service
    from torchdata.dataloader2.utils import worker

    from wds_datapipes.loading.seeding import seed_of, seed_stages
    from wds_datapipes.pipes.state.shard_order import seed_listings

    def set_seeds_of_lists_too(datapipe: Any, seed_generator: Any) -> Any:
        seed_listings(datapipe, seed_of(seed_generator))
        return set_seeds(datapipe, seed_generator)

    def set_seeds(datapipe: Any, seed_generator: Any) -> Any:
        seed_stages(datapipe, seed_generator)
        return datapipe

    setattr(worker, "set_graph_random_seed", set_seeds_of_lists_too)
    setattr(reading_service, "set_graph_random_seed", set_seeds)


def unseeded_service() -> None:
    """``DataLoader2.seed`` has no effect without a reading service.

    Seeds reach the pipeline through a reading service. The patch uses ``InProcessReadingService``, the documented
    default, if a seed is set and there is no reading service.
    """
    from torchdata.dataloader2 import DataLoader2, InProcessReadingService

    seed = DataLoader2.seed

    @functools.wraps(seed)
    def seed_through_service(self: Any, value: int) -> None:
        seed(self, value)
        if self.reading_service is None:
            self.reading_service = InProcessReadingService()

    setattr(DataLoader2, "seed", seed_through_service)


def local_functions() -> None:
    """``DataLoader2`` raises an error for a pipeline with lambdas or local functions, even without workers.

    It copies its pipeline by pickling it. The patch copies by `copy.deepcopy` what cannot be pickled. Workers that are
    not forked, and the states of torchdata's reading services, still need to pickle the pipeline: the error names the
    stage, the function, and what to do.
    """
    import importlib
    import multiprocessing

    from torchdata.dataloader2.reading_service import MultiProcessingReadingService

    from wds_datapipes.loading.torchdata_patches.local_functions import copy_pipeline, explain_worker_pickling

    initialize = MultiProcessingReadingService.initialize

    @functools.wraps(initialize)
    def initialize_or_explain(self: Any, datapipe: Any) -> Any:
        method = self.multiprocessing_context or multiprocessing.get_start_method()
        with explain_worker_pickling(self, datapipe, method):
            return initialize(self, datapipe)

    setattr(importlib.import_module("torchdata.dataloader2.dataloader2"), "clone", copy_pipeline)
    setattr(MultiProcessingReadingService, "initialize", initialize_or_explain)


def pickled_pipeline() -> None:
    """``DataLoader2.load_state_dict`` resumes the pipeline pickled in the state instead of the loader's own.

    A transform or a token that has changed since is replaced by the old one, and checkpoints contain credentials.
    With a ``ShardReadingService``, the state is that of the service, without a pickle. Loading it compares the
    pipelines and resumes the loader's own, even if the loader was iterated before. ``DataLoader2.from_state`` has no
    pipeline to resume, and raises an error.

    Other services do not know the position of the loop. Requesting a state mid-epoch warns about it.
    """
    from torchdata.dataloader2 import DataLoader2
    from torchdata.dataloader2.dataloader2 import DataLoader2Iterator

    from wds_datapipes.loading.torchdata_patches.local_functions import explain_pickling

    from_state, next_item = DataLoader2.from_state.__func__, DataLoader2Iterator.__next__
    state_dict, load_state_dict = DataLoader2.state_dict, DataLoader2.load_state_dict

    @functools.wraps(state_dict)
    def save(self: Any) -> dict[str, Any]:
        from wds_datapipes.loading.service.loader import own_service, save_state, warn_of_lost_position

        if (service := own_service(self)) is not None:
            return save_state(self, service)
        warn_of_lost_position(self, getattr(self, "_ended_iterator_id", None))
        with explain_pickling(
            self._datapipe_before_reading_service_adapt,
            "The state of a DataLoader2 without ShardReadingService contains the pickled pipeline",
            otherwise="; or use ShardReadingService, whose state contains no pickle",
        ):
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

    setattr(DataLoader2, "state_dict", save)
    setattr(DataLoader2, "load_state_dict", load)
    setattr(DataLoader2, "from_state", classmethod(load_without_pipeline))
    setattr(DataLoader2Iterator, "__next__", next_or_end)


def uncounted_items() -> None:
    """A reading service must replace the last stage in ``DataLoader2.datapipe`` to count the items of the loop.

    Users look at that stage, and call its methods. The patch leaves it there, and iterates over the stages that a
    `ShardReadingService` adds after it.
    """
    from torchdata.dataloader2 import DataLoader2

    iterate = DataLoader2.__iter__

    @functools.wraps(iterate)
    def iterate_and_count(self: Any) -> Any:
        from wds_datapipes.loading.workers.in_process import users_part

        running = self.__dict__.get("_running")
        if running is not None and self.datapipe is users_part(running):
            self.datapipe = running
        try:
            return iterate(self)
        finally:
            self._running, self.datapipe = self.datapipe, users_part(self.datapipe)

    setattr(DataLoader2, "__iter__", iterate_and_count)


def no_set_epoch() -> None:
    """``DataLoader2`` has no ``set_epoch``, which trainers call to select the order of an epoch.

    The patch adds it if the reading service is, or contains, a ``ShardReadingService``. An iterator that has yielded
    nothing yet starts the selected epoch: Lightning creates it before it calls the hooks that select the epoch.
    """
    from torchdata.dataloader2 import DataLoader2
    from torchdata.dataloader2.dataloader2 import DataLoader2Iterator

    next_item = DataLoader2Iterator.__next__

    @functools.wraps(next_item)
    def restart_and_next(self: Any) -> Any:
        loader = self.dataloader
        if loader.__dict__.pop("_restarts", False) and self.iterator_id == loader.valid_iterator_id:
            loader._reset_iter = True
            self.iterator_id = iter(loader).iterator_id
        return next_item(self)

    def set_epoch(self: Any) -> Callable[[int], None]:
        from wds_datapipes.loading.service.loader import epoch_setter

        return epoch_setter(self)

    setattr(DataLoader2, "set_epoch", property(set_epoch))
    setattr(DataLoader2Iterator, "__next__", restart_and_next)


def no_length() -> None:
    """``DataLoader2`` has no ``len()``, even if its pipeline has one.

    The length is the number of items of an epoch on this rank; it is a ``TypeError`` if the pipeline does not know it.
    A loader stays true in a boolean context. If ``.with_length()`` declares it, another number of items in an epoch is
    a warning, and on several ranks an error.
    """
    from torchdata.dataloader2 import DataLoader2
    from torchdata.dataloader2.dataloader2 import DataLoader2Iterator

    next_item = DataLoader2Iterator.__next__

    @functools.wraps(next_item)
    def next_and_count(self: Any) -> Any:
        try:
            item = next_item(self)
        except StopIteration:
            if not self.dataloader._is_paused and (length := _declared_length(self)) is not None:
                length.end()
            raise
        if (length := _declared_length(self)) is not None:
            try:
                length.count()
            except RuntimeError:
                self.dataloader.shutdown()
                raise
        return item

    def length(self: Any) -> int:
        from wds_datapipes.loading.service.loader import length_of

        return length_of(self)

    setattr(DataLoader2Iterator, "__next__", next_and_count)
    setattr(DataLoader2, "__len__", length)
    setattr(DataLoader2, "__bool__", lambda _: True)


def late_shuffle() -> None:
    """``DataLoader(shuffle=True)`` holds 10,000 items at the end of a pipeline without ``.shuffle()``, in each worker.

    Its warning does not say where to shuffle instead. The patch adds a warning that does.
    """
    from wds_datapipes.datapipes import graph_settings
    from wds_datapipes.pipes.graph import upstream
    from wds_datapipes.pipes.stage import Stage
    from wds_datapipes.user_warnings import warn_user

    apply_shuffle_settings = graph_settings.apply_shuffle_settings

    @functools.wraps(apply_shuffle_settings)
    def apply_and_advise(datapipe: Any, shuffle: bool | None = None) -> Any:
        if shuffle:
            stages = list(upstream(datapipe))
            can_shuffle = any(hasattr(stage, "set_shuffle") and hasattr(stage, "set_seed") for stage in stages)
            if not can_shuffle and any(isinstance(stage, Stage) for stage in stages):
                warn_user(
                    "DataLoader(shuffle=True) found no .shuffle() in the pipeline, so torch shuffles at its end, and "
                    "holds 10,000 items in each worker. Put .shuffle() after the list of shards, which shuffles the "
                    "whole list, and .shuffle_samples(1000) after .group_samples()"
                )
        return apply_shuffle_settings(datapipe, shuffle)

    setattr(graph_settings, "apply_shuffle_settings", apply_and_advise)


def _declared_length(iterator: Any) -> Any:
    """Return the declared length of the epoch of a ``DataLoader2Iterator``, or None."""
    if "_declared" not in vars(iterator):
        from wds_datapipes.loading.service.loader import declared_length_of

        iterator._declared = declared_length_of(iterator.dataloader)
    return iterator._declared


#: Patches of torch's ``DataLoader`` and of ``StatefulDataLoader``, for any release of torchdata, in the same form.
TORCH_PATCHES: tuple[tuple[Callable[[], None], int | None], ...] = (
    (later_passes, None),
    (local_classes, None),
    (copied_data, None),
    (unknown_position, None),
    (late_shuffle, None),
)


#: Patches of ``DataLoader2``, each with the number of its issue in meta-pytorch/data.
LOADER_PATCHES: tuple[tuple[Callable[[], None], int | None], ...] = (
    (repeated_order, None),
    (uneven_ranks, None),
    (lists_drawn_in_workers, None),
    (copied_by_workers, None),
    (endless_passes, None),
    (unseeded_service, None),
    (local_functions, None),
    (pickled_pipeline, None),
    (uncounted_items, None),
    (no_set_epoch, None),
    (no_length, None),
)
