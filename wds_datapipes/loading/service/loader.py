"""``DataLoader2`` with a `ShardReadingService`: states without pickle, ``set_epoch`` and a length.

The first `ShardReadingService` to be created enables this class. Loaders with other reading services work as before.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from wds_datapipes.arguments import check_seed
from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.counted_epoch import without_counted_epoch
from wds_datapipes.loading.checkpoint.format import state_of
from wds_datapipes.loading.data_parallel_group import DataParallelGroup
from wds_datapipes.loading.service.service import ShardReadingService
from wds_datapipes.loading.splitting import split_by_rank, split_by_worker
from wds_datapipes.loading.state import LoaderState
from wds_datapipes.loading.torchdata_api import DataLoader2, DistributedReadingService, dataloader2
from wds_datapipes.loading.torchdata_patches.local_functions import copy_pipeline, find_local_classes
from wds_datapipes.loading.unknown_length import unknown_length_error
from wds_datapipes.loading.workers.loop_items import users_part
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import PipelineGraph
from wds_datapipes.pipes.state.pipeline_state import refusing_corrupt_states
from wds_datapipes.pipes.state.seeding import seed_stages
from wds_datapipes.seeds import SeedGenerator
from wds_datapipes.types import ALONE, Instance

NO_PIPELINE = (
    "The state contains no pipeline, because functions and credentials may change. Create the loader with its "
    "pipeline, DataLoader2(pipe, reading_service=ShardReadingService(...)), and call load_state_dict(state)"
)


class ShardDataLoader(DataLoader2):  # type: ignore[misc]  # torchdata has no types
    """A ``DataLoader2`` with a `ShardReadingService`, alone or in a ``SequentialReadingService``."""

    datapipe: Any
    _running: Any = None  # the pipeline of the main process, with the stages that count its items
    _restarts = False

    @property
    def _service(self) -> ShardReadingService:
        return next(each for each in _services(self.reading_service) if isinstance(each, ShardReadingService))

    @property
    def origin(self) -> tuple[Any, int | None, int]:
        """The pipeline before the split, the seed or ``None``, and the number of workers."""
        return self._datapipe_before_reading_service_adapt, self._seed, self._service.num_workers

    @property
    def _is_in_step(self) -> bool:
        """Whether torchdata's service splits the data between ranks and synchronizes them at each item."""
        return any(isinstance(each, DistributedReadingService) for each in _services(self.reading_service))

    def __iter__(self) -> _LoaderIterator:
        # The stages that count items are attached only here, because users access the last stage and call its methods.
        if self._running is not None and self.datapipe is users_part(self._running):
            self.datapipe = self._running
        try:
            super().__iter__()
        finally:
            self._running, self.datapipe = self.datapipe, users_part(self.datapipe)
        return _LoaderIterator(self, self.valid_iterator_id)

    def state_dict(self) -> dict[str, str]:
        """Return the state of the loader, which is that of its service.

        Raises:
            StateError: there is no state, or there is another reading service.
        """
        self._check_services()
        service = self._service
        if not self._adapted and self.datapipe is not None:
            service.describe(self.datapipe)
        # The seed set since the previous epoch started, if any.
        service.loop.expect(self._seed if self._reset_seed else None)
        return service.state_dict()

    def _check_services(self) -> None:
        """Check that no other reading service splits the data or draws seeds, because a state would not contain them.

        Raises:
            StateError: there is another one.
        """
        for other in _services(self.reading_service):
            if other is not self._service:
                raise StateError(
                    f"A ShardReadingService has no state after another reading service, {type(other).__name__}. Use "
                    "ShardReadingService(distributed=True) alone, which splits the data between ranks itself"
                )

    @refusing_corrupt_states()
    def load_state_dict(self, state_dict: Any, *, amend: bool = False) -> None:
        """Load a state into the loader, which resumes at the next iteration, with its own pipeline.

        If the loader has started, it restarts its workers, and its iterators become invalid.

        Args:
            state_dict: the state of any of the loaders.
            amend: whether the pipeline may change the run from here on, as for `StatefulShards`.

        Raises:
            StateError: the argument is not a state, or is that of another pipeline; or there is another reading
                service.
        """
        self._check_services()
        pipe = self._datapipe_before_reading_service_adapt
        if pipe is None:
            raise StateError(NO_PIPELINE)
        state = LoaderState(ALONE, pipe)
        state.load(state_dict, amend=amend)
        state.adopted(knows_ranks=False)  # only a check: the copy that runs adopts it, once the ranks are known
        checkpoints = without_counted_epoch(state.loaded, state_dict, state.graph)
        if self._adapted:
            self._restart()
        self._service.load_state_dict(state_of(checkpoints), seeds_too=False, amend=amend)
        following = checkpoints[0].epoch.next
        if following is not None:
            self.seed(following)

    def _restart(self) -> None:
        """Reset the loader to its state before the first iteration."""
        self.reading_service.finalize_iteration()
        self.reading_service.finalize()
        self._service.reset()
        self.datapipe = copy_pipeline(self._datapipe_before_reading_service_adapt)
        self._datapipe_iter, self._adapted, self._reset_iter, self._is_paused = None, False, True, False
        self._restarts = False
        if self.valid_iterator_id is not None:
            self.valid_iterator_id += 1

    def seed(self, seed: int) -> None:
        """Set the seed of the run that the next epoch begins.

        Args:
            seed: an unsigned integer of 64 bits.

        Raises:
            TypeError: it is not an integer.
            ValueError: it is out of range.
        """
        super().seed(check_seed(seed))

    def set_epoch(self, epoch: int) -> None:
        """Select the number of the next epoch, which determines its order together with the seed."""
        self._service.set_epoch(epoch)
        # An iterator that has yielded nothing yet begins the selected epoch instead.
        self._restarts = not self._reset_iter and not self._service.loop.is_resumed

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """Return the number of items that the loader yields in an epoch, on this rank.

        Raises:
            TypeError: the pipeline does not know its length, or the ranks are not known yet.
        """
        pipe, epoch = self._datapipe_before_reading_service_adapt, self._service.loop.epoch
        sources = filter(None, (declared(stage).phased_source() for stage in PipelineGraph(pipe).stages))
        if epoch.number >= 0 and any(source.unit == "row" for source in sources):
            pipe = copy_pipeline(pipe)
            seed_stages(pipe, SeedGenerator(epoch.seed), epoch)
            self.__dict__.pop("_lengths", None)  # the number of rows differs between epochs
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # list() calls this, too, without its caller's request
                len(pipe)  # fails without a copy if the length is unknown
        except TypeError as error:
            raise unknown_length_error(error) from None
        group = DataParallelGroup.of(True) if self._is_in_step else self._service.group_of(pipe)
        if not group.is_known:
            raise TypeError("The length depends on the rank, which is unknown until init_process_group is called")
        own = group.rank.on_worker(0, max(1, self._service.num_workers))
        known: dict[Instance, int] = self.__dict__.setdefault("_lengths", {})
        if own not in known:
            # In lockstep, all ranks end when the first one does.
            others = [replace(own, rank=rank) for rank in range(own.ranks)] if self._is_in_step else [own]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                known[own] = min(length_of_rank(copy_pipeline(pipe), each) for each in others)
        return known[own]


class _LoaderIterator(dataloader2.DataLoader2Iterator):  # type: ignore[misc]  # torchdata has no types
    """An iterator over an epoch; if another epoch is selected before the first item, it begins that one."""

    iterator_id: int

    def __next__(self) -> Any:
        loader = self.dataloader
        if loader._restarts:
            loader._restarts = False
            if self.iterator_id == loader.valid_iterator_id:
                loader._reset_iter = True
                self.iterator_id = iter(loader).iterator_id
        return super().__next__()


@functools.cache
def extend_loaders() -> None:
    """Turn each new ``DataLoader2`` with a `ShardReadingService` into a `ShardDataLoader`."""
    find_local_classes()
    # DataLoader2 copies its pipeline by pickle even without workers, which fails for lambdas.
    dataloader2.clone = copy_pipeline
    initialize = DataLoader2.__init__
    parameters = inspect.signature(initialize)

    @functools.wraps(initialize)
    def initialize_and_extend(self: Any, *arguments: Any, **options: Any) -> None:
        initialize(self, *arguments, **options)
        given = parameters.bind(self, *arguments, **options).arguments.get("reading_service")
        for own, each in zip(_services(self.reading_service), _services(given), strict=True):
            if isinstance(own, ShardReadingService):
                own.is_copied, each.is_copied = False, each.is_copied is not False  # it may be that of a loader
                self.__class__ = _extended(self.__class__)

    DataLoader2.__init__ = initialize_and_extend


@functools.cache
def _extended(cls: Any) -> Any:
    """Return the new class of a loader of class ``cls``, which may derive from ``DataLoader2``."""
    return ShardDataLoader if cls is DataLoader2 else type(cls.__name__, (cls, ShardDataLoader), {})


def _services(service: Any) -> Iterator[Any]:
    """Yield the reading services within a sequential one, or the service itself."""
    if (within := getattr(service, "reading_services", None)) is None:
        yield service
    else:
        for each in within:
            yield from _services(each)


def length_of_rank(pipe: Any, rank: Instance) -> int:
    """Return the number of items of all workers of a rank; each worker rounds its number of batches separately.

    Args:
        pipe: a copy of the pipeline, which is split here.
        rank: the rank, and its number of workers.

    Raises:
        TypeError: the pipeline does not know its length.
    """
    graph = PipelineGraph(pipe)
    if rank.ranks > 1:
        split_by_rank(graph, rank)
    length = 0
    for worker in range(rank.workers):
        instance = rank.on_worker(worker, rank.workers)
        split_by_worker(graph, instance)
        for stage in graph.stages:  # divides lengths that are declared for the whole rank
            declared(stage).share_length(instance)
        length += len(pipe)
    return length
