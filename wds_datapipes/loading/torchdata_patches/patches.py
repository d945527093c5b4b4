"""Patches of torchdata, and of two functions of torch, for defects that lose data, hang, or repeat an order.

torchdata 0.7.1 to 0.9.0 are the last releases with ``DataLoader2`` and its ``MultiProcessingReadingService``, and will
not be fixed (https://github.com/meta-pytorch/data/issues/1196). Once a program has imported ``wds_datapipes`` and
torchdata, in any order, these classes are patched, only in these releases. ``wds_datapipes.list_patches()`` lists the
patches; the environment variable ``WDS_DATAPIPES_PATCHES=0`` disables them.

Each patch is one function. The first line of its docstring describes the defect.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from wds_datapipes.errors import StateError
from wds_datapipes.loading.torchdata_patches.on_import import silence_banner, watch_imports
from wds_datapipes.user_warnings import warn_user

LOGGER = logging.getLogger("wds_datapipes")

#: The releases of torchdata with ``DataLoader2`` that the patches were tested with.
KNOWN_VERSIONS = ("0.7.1", "0.8.0", "0.9.0")


class Patch(NamedTuple):
    """A defect of torchdata or torch, and whether this process has patched it.

    Attributes:
        name: the name of the function that patches it.
        fault: the defect, in one sentence.
        applied: whether it is patched.
        reason: the reason why it is not patched, or "".
    """

    name: str
    fault: str
    applied: bool
    reason: str

    def __str__(self) -> str:
        state = "patched" if self.applied else f"not patched: {self.reason}"
        return f"{self.name}: {self.fault} [{state}]"


#: The patches of this process, by name. They replace attributes of modules, which exist once per process.
_done: dict[str, Patch] = {}


def list_patches() -> list[Patch]:
    """Return the known defects of torchdata and torch, and whether this process has patched each of them.

    This imports torchdata, if it is installed.

    Examples:
        >>> from wds_datapipes import list_patches
        >>> [patch.name for patch in list_patches()][:4]
        ['multiprocessing_service', 'repeated_order', 'split_orders', 'prefetch_threads']
        >>> [patch.name for patch in list_patches()][4:]
        ['endless_passes', 'later_passes', 'unknown_position', 'concurrent_traversals', 'stale_state']
    """
    apply_to_torchdata()
    apply_to_nodes()
    return [_done[patch.__name__] for patch in PATCHES]


def apply() -> None:
    """Patch torch, once per process, and torchdata as soon as it is imported."""
    if not _done:
        _apply(TORCH_PATCHES, _unwanted())
        watch_imports(apply_to_torchdata)


def apply_to_torchdata() -> None:
    """Patch torchdata, once per process."""
    if multiprocessing_service.__name__ not in _done:
        unwanted = _unwanted()
        _apply(DATALOADER2_PATCHES, unwanted or _reason_against())
        _apply([unknown_position], unwanted)


def apply_to_nodes() -> None:
    """Patch ``torchdata.nodes``, once per process; `PipelineNode` does so."""
    if stale_state.__name__ not in _done:
        _apply([stale_state], _unwanted())


def _unwanted() -> str:
    return "WDS_DATAPIPES_PATCHES=0 is set" if os.environ.get("WDS_DATAPIPES_PATCHES") == "0" else ""


def _apply(patches: Iterable[Callable[[], None]], against: str) -> None:
    """Apply patches, unless there is a reason against them."""
    for patch in patches:
        reason = against
        name = patch.__name__
        _done[name] = Patch(name, str(patch.__doc__).partition("\n")[0], applied=False, reason=reason)
        try:
            if not against:
                patch()
        except (ImportError, AttributeError) as error:  # a release without the patched code
            reason = str(error)
        _done[name] = _done[name]._replace(applied=not reason, reason=reason)


def multiprocessing_service() -> None:
    """``MultiProcessingReadingService`` fails in uneven epochs, hangs on failing workers, and repeats its order.

    Calling the class returns a `MultiProcessingService`, which runs the same pipelines on the workers of a
    `ShardReadingService`.
    """
    from torchdata.dataloader2 import MultiProcessingReadingService

    def create(cls: Any, *_: Any, **__: Any) -> Any:
        if cls is MultiProcessingReadingService:
            from wds_datapipes.loading.service.drop_in import MultiProcessingService

            cls = MultiProcessingService
        return object.__new__(cls)

    setattr(MultiProcessingReadingService, "__new__", staticmethod(create))


def repeated_order() -> None:
    """``DataLoader2`` without a seed has the same order in every epoch.

    It draws a seed from torch's generator inside ``fork_rng``, which restores the generator afterwards. The patch draws
    it as torch's ``DataLoader`` does, so ``torch.manual_seed`` still makes a run reproducible.
    """
    from torchdata.dataloader2.random import seed_generator

    def draw() -> int:
        from wds_datapipes.loading.loader_seed import draw_seed  # may be importing torchdata now

        return draw_seed()

    setattr(seed_generator, "_get_torch_random_seed", draw)


def split_orders() -> None:
    """A stage that splits the data itself, such as ``IndexedSamples``, splits a different order on each rank.

    torchdata's services recognize only ``.sharding_filter()``. The patch seeds stages as a `ShardReadingService` does.
    """
    from torchdata.dataloader2 import reading_service

    def set_graph_random_seed(datapipe: Any, seed_generator: Any) -> Any:
        from wds_datapipes.pipes.state.seeding import seed_stages  # may be importing torchdata now

        seed_stages(datapipe, seed_generator)
        return datapipe

    setattr(reading_service, "set_graph_random_seed", set_graph_random_seed)


def prefetch_threads() -> None:
    """``.prefetch()`` hangs if its source ends the thread, or if shut down at the wrong moment.

    The patch delivers every exception to the reader, and does not wait for a thread that has ended or waits for a
    worker.
    """
    from torchdata.datapipes.iter import PinMemory, Prefetcher

    from wds_datapipes.loading.torchdata_patches.stages import guard_thread

    for prefetcher in (Prefetcher, PinMemory):
        setattr(prefetcher, "thread_worker", staticmethod(guard_thread(prefetcher.thread_worker)))


def endless_passes() -> None:
    """``.cycle()`` loops forever without yielding anything in a worker or a rank without a shard.

    The same happens with an empty list. With the patch, it ends in such a worker. If no worker of a rank has a shard,
    or the list is empty, it raises an ``EmptySourceError``.
    """
    from torchdata.datapipes.iter import Cycler

    from wds_datapipes.loading.torchdata_patches.stages import EndingCycler

    setattr(Cycler, "__iter__", EndingCycler.__iter__)


def later_passes() -> None:
    """A ``.shuffle()`` that is iterated twice in an epoch of ``DataLoader`` has a different order in each worker.

    Only the first pass uses the seed that all workers share. With ``.sharding_filter().cycle(2)`` after the shuffle,
    some samples of the second pass come from several workers, and others from none. The patch derives the seed of each
    later pass from that of the previous one. Sources before the split that draw from the global generators, such as a
    ``RandomSampler``, then draw the same numbers in all workers.
    """
    import torch

    from wds_datapipes.datapipes import graph_settings
    from wds_datapipes.loading.splitting import has_own_stage
    from wds_datapipes.pipes.state.preparation import adapt_stages
    from wds_datapipes.pipes.state.seeding import derive_later_seeds
    from wds_datapipes.pipes.state.shard_order import guard_listings

    apply_random_seed = graph_settings.apply_random_seed

    @functools.wraps(apply_random_seed)
    def apply_seeds_of_all_passes(datapipe: Any, rng: Any) -> Any:
        if has_own_stage(datapipe):
            adapt_stages(datapipe)
        derive_later_seeds(datapipe)
        # The number is drawn from a copy, so that importing this package changes no order.
        copied = torch.Generator()
        copied.set_state((rng or torch.default_generator).get_state())
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=copied).item())
        guard_listings(datapipe, seed, drawn_only=True)
        return apply_random_seed(datapipe, rng)

    setattr(graph_settings, "apply_random_seed", apply_seeds_of_all_passes)


def unknown_position() -> None:
    """``StatefulDataLoader`` saves mid-epoch states of pipelines that lose and repeat samples.

    It saves only the state of the last stage, or counts batches to skip, even though the order of the epoch changes.
    With the patch, saving such a state issues a warning, and loading it raises a ``StateError``; both recommend
    `StatefulShards`. Loading the state of a `StatefulShards` on another rank raises a ``StateError``, too. With the
    patch, states also record how many steps a loop has received of an epoch that it left early.
    """
    from torchdata.stateful_dataloader import StatefulDataLoader

    state_dict, load_state_dict = StatefulDataLoader.state_dict, StatefulDataLoader.load_state_dict
    begin = StatefulDataLoader.__iter__

    @functools.wraps(begin)
    def leave_and_begin(self: Any) -> Any:
        from wds_datapipes.loading.stateful_dataset.dataset import StatefulShards

        if isinstance(self.dataset, StatefulShards):
            has_begun = self._iterator is not None and not self._initial_iter_for_state_dict
            self.dataset.begin_loop(self.batch_size, self._iterator if has_begun and self.num_workers else None)
        return begin(self)

    @functools.wraps(state_dict)
    def save_and_check(self: Any) -> dict[str, Any]:
        from wds_datapipes.loading.stateful_dataset.loader_states import missing_position

        state: dict[str, Any] = state_dict(self)
        if reason := missing_position(self, state):
            warn_user(reason)
        return state

    @functools.wraps(load_state_dict)
    def check_and_load(self: Any, state_dict: dict[str, Any]) -> None:
        from wds_datapipes.loading.stateful_dataset.loader_states import load_ended_epoch, missing_position

        if reason := missing_position(self, state_dict):
            raise StateError(reason)
        if not load_ended_epoch(self.dataset, state_dict):
            load_state_dict(self, state_dict)

    setattr(StatefulDataLoader, "__iter__", leave_and_begin)
    setattr(StatefulDataLoader, "state_dict", save_and_check)
    setattr(StatefulDataLoader, "load_state_dict", check_and_load)


def concurrent_traversals() -> None:
    """Two threads that traverse pipelines at once, as those of two loaders may, make torch fail, and so do some forks.

    It pickles pipelines with hooks that all threads share. With the patch, one thread waits for the other, and so does
    a fork.
    """
    from wds_datapipes.datapipes.traversal import lock_traversal

    lock_traversal()


def stale_state() -> None:
    """``torchdata.nodes.Loader`` keeps returning a state that it has loaded, if that was saved at the end of an epoch.

    It looks for an item ahead, and remembers the state before that item, even if there is none. With the patch, it
    forgets this state when an epoch begins.
    """
    from torchdata.nodes.loader import LoaderIterator

    reset = LoaderIterator.reset

    @functools.wraps(reset)
    def forget_and_reset(self: Any, *arguments: Any, **options: Any) -> None:
        self._cached_state_dict = None
        reset(self, *arguments, **options)

    setattr(LoaderIterator, "reset", forget_and_reset)


#: Patches of the releases of torchdata with ``DataLoader2``.
DATALOADER2_PATCHES = (multiprocessing_service, repeated_order, split_orders, prefetch_threads, endless_passes)
#: Patches of functions of torch, for every release that contains the patched code. No class of torch is patched.
TORCH_PATCHES = (later_passes, concurrent_traversals)
#: All patches, in the order of the documentation.
PATCHES = (*DATALOADER2_PATCHES, later_passes, unknown_position, concurrent_traversals, stale_state)


def _reason_against() -> str:
    """Import torchdata's DataLoader2; return the reason not to patch it, or ""."""
    if sys.platform != "linux":
        return f"the worker processes of this package require Linux, but this is {sys.platform}"
    with silence_banner():
        try:
            importlib.import_module("torchdata.dataloader2")
        except ImportError:
            return "torchdata is not installed, or has no DataLoader2"
    version = importlib.import_module("torchdata").__version__.partition("+")[0]
    if version in KNOWN_VERSIONS:
        return ""
    reason = f"torchdata {version} is not one of {', '.join(KNOWN_VERSIONS)}"
    LOGGER.warning("torchdata's own reading service is not patched: %s", reason)
    return reason
