"""Extensions of ``DataLoader2`` under a `ShardReadingService`: states without pickle, ``set_epoch`` and a length."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import STATE, checkpoints_in, state_of
from wds_datapipes.loading.data_parallel import DataParallelGroup
from wds_datapipes.loading.lightning import unknown_length_error, without_ended_epoch
from wds_datapipes.loading.service.service import ShardReadingService
from wds_datapipes.loading.splitting import RankIdentity, WorkerIdentity, split_by_rank, split_by_worker
from wds_datapipes.loading.torchdata_api import DistributedReadingService
from wds_datapipes.loading.torchdata_patches.local_functions import copy_pipeline
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.inspection import upstream
from wds_datapipes.pipes.sharding import Instance
from wds_datapipes.pipes.state.description import descriptions

NO_PIPELINE = (
    "The state contains no pipeline, since functions and credentials may change. Create the loader with its pipeline, "
    "DataLoader2(pipe, reading_service=ShardReadingService(...)), and call load_state_dict(state)"
)


def own_service(loader: Any) -> ShardReadingService | None:
    """Return the `ShardReadingService` of a loader, which may be in a ``SequentialReadingService``."""
    return _own(loader.reading_service)


def save_state(loader: Any, service: ShardReadingService) -> dict[str, str]:
    """Return the state of a loader, which consists of the state of its service.

    Raises:
        StateError: there is no state, or there is another reading service.
    """
    _check_services(loader, service)
    if not loader._adapted and loader.datapipe is not None:
        service.describe(loader.datapipe)
    # The seed that was set since the previous epoch started.
    service.expect(loader._seed if loader._reset_seed else None)
    return service.state_dict()


def load_state(loader: Any, service: ShardReadingService, state: Any) -> None:
    """Load a state into a loader, which resumes with its own pipeline at the next iteration.

    A loader that has started restarts its workers, and its iterators become invalid.

    Raises:
        StateError: it is not a state, or is the state of another pipeline, or there is another reading service.
    """
    _check_services(loader, service)
    checkpoints = without_ended_epoch(checkpoints_in(state))
    pipe = loader._datapipe_before_reading_service_adapt
    if pipe is None:
        raise StateError(NO_PIPELINE)
    stages = descriptions(pipe)
    for checkpoint in checkpoints:
        checkpoint.check(stages)
    if loader._adapted:
        _restart(loader, service)
    service.load_state_dict(state_of(checkpoints), seeds_too=False)
    following = checkpoints[0].next
    if following is not None:
        loader.seed(following)


def _check_services(loader: Any, service: ShardReadingService) -> None:
    """Make sure that no other reading service splits the data or draws seeds, which no state contains.

    Raises:
        StateError: there is another one.
    """
    for other in _services(loader.reading_service):
        if other is not service:
            raise StateError(
                f"A ShardReadingService has no state after another reading service, {type(other).__name__}. Use "
                "ShardReadingService(distributed=True) alone, which splits the data between ranks itself"
            )


def _restart(loader: Any, service: ShardReadingService) -> None:
    """Reset a loader to its state before the first iteration."""
    loader.reading_service.finalize_iteration()
    loader.reading_service.finalize()
    service.reset()
    loader.datapipe = copy_pipeline(loader._datapipe_before_reading_service_adapt)
    loader._datapipe_iter, loader._adapted, loader._reset_iter, loader._is_paused = None, False, True, False
    loader._restarts = False
    if loader.valid_iterator_id is not None:
        loader.valid_iterator_id += 1


def refuse_state(state: Any) -> None:
    """Reject a state of this package if the loader has another reading service.

    Raises:
        StateError: it is a state of this package.
    """
    if _is_own(state):
        raise StateError(
            "This is the state of a ShardReadingService. To load it, create the loader with one: DataLoader2(pipe, "
            "reading_service=ShardReadingService(...))"
        )


def refuse_pipeline(service: Any, state: Any) -> None:
    """Reject creating a loader from a state of this package, or for a `ShardReadingService`.

    Raises:
        StateError: one of these was passed.
    """
    if _is_own(state) or _own(service) is not None:
        checkpoints_in(state)
        raise StateError(NO_PIPELINE)


def epoch_setter(loader: Any) -> Callable[[int], None]:
    """Return the function that selects the number of the next epoch of a loader.

    Raises:
        AttributeError: its reading service does not support this.
    """
    service = own_service(loader)
    if service is None:
        raise AttributeError(
            f"set_epoch requires a ShardReadingService, but the reading service is {loader.reading_service!r}"
        )

    def set_epoch(epoch: int) -> None:
        service.set_epoch(epoch)
        # An iterator that has yielded nothing yet begins the selected epoch instead.
        loader._restarts = not loader._reset_iter and not service.is_resumed

    return set_epoch


def length_of(loader: Any) -> int:
    """Return the number of items that a loader yields in an epoch, on this rank.

    Raises:
        TypeError: the pipeline does not know its length, or the ranks are not known yet.
    """
    pipe = loader._datapipe_before_reading_service_adapt
    services = list(_services(loader.reading_service))
    in_step = any(isinstance(each, DistributedReadingService) for each in services)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # list() calls this, too, and its caller did not request a length
            len(pipe)  # without a copy, for those that do not know their length
    except TypeError as error:
        raise unknown_length_error(error) from None
    own = own_service(loader)
    group = DataParallelGroup.of(True) if in_step else DataParallelGroup() if own is None else own.group_of(pipe)
    if not group.is_known:
        raise TypeError("The length depends on the rank, which is unknown until init_process_group is called")
    ranks, rank = group.identity
    workers = max([1, *(getattr(each, "num_workers", 0) for each in services)])
    known: dict[tuple[int, int], int] = loader.__dict__.setdefault("_lengths", {})
    if (rank, ranks) not in known:
        # In lockstep, all ranks end when the first one does.
        others = range(ranks) if in_step else [rank]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            known[rank, ranks] = min(length_of_rank(copy_pipeline(pipe), each, ranks, workers) for each in others)
    return known[rank, ranks]


def _own(service: Any) -> ShardReadingService | None:
    return next((each for each in _services(service) if isinstance(each, ShardReadingService)), None)


def _is_own(state: Any) -> bool:
    return isinstance(state, Mapping) and STATE in state


def _services(service: Any) -> Iterator[Any]:
    """Yield the reading services within a sequential one, or the service itself."""
    if (within := getattr(service, "reading_services", None)) is None:
        yield service
    else:
        for each in within:
            yield from _services(each)


def length_of_rank(pipe: Any, rank: int, ranks: int, workers: int) -> int:
    """Return the total number of items of all workers of a rank; each worker rounds its batches separately.

    Args:
        pipe: a copy of the pipeline, which is split here.
        rank: the rank.
        ranks: the number of ranks.
        workers: the number of workers of each rank.

    Raises:
        TypeError: the pipeline does not know its length.
    """
    own = RankIdentity(ranks, rank)
    if ranks > 1:
        split_by_rank(pipe, own)
    length = 0
    for worker in range(workers):
        split_by_worker(pipe, WorkerIdentity(workers, worker), own)
        for stage in upstream(pipe):  # the lengths that are declared for all workers of the rank
            declared(stage).share_length(Instance(rank, workers, worker))
        length += len(pipe)
    return length
