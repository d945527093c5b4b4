"""The rank and the worker number of a process, and its share of the data."""

from __future__ import annotations

import inspect
import os
import sys
from typing import Any, NamedTuple

from torch import distributed as dist
from torch.utils.data import get_worker_info

from wds_datapipes.datapipes import SHARDING_PRIORITIES, IterDataPipe
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.inspection import call_of, sources_of, upstream
from wds_datapipes.pipes.sharding import check_batch_sizes, groups_of, number_instances, splitters


class RankIdentity(NamedTuple):
    """The identity of a rank.

    Attributes:
        ranks: the number of ranks.
        rank: the number of this rank.
    """

    ranks: int
    rank: int


ONLY_RANK = RankIdentity(1, 0)


class WorkerIdentity(NamedTuple):
    """The identity of a worker, with the field names of torchdata's ``WorkerInfo``, which newer releases lack.

    Attributes:
        num_workers: the number of workers.
        worker_id: the number of this worker.
    """

    num_workers: int
    worker_id: int


def own_worker() -> WorkerIdentity:
    """Return the identity of this worker of torch's ``DataLoader``; the main process counts as the only worker."""
    info = get_worker_info()
    return WorkerIdentity(1, 0) if info is None else WorkerIdentity(info.num_workers, info.id)


def split_by_rank(pipe: Any, identity: RankIdentity) -> Any:
    """Assign a rank its share of the data."""
    _split(pipe, *identity, SHARDING_PRIORITIES.DISTRIBUTED)
    return pipe


def split_by_worker(pipe: Any, worker: Any, identity: RankIdentity = ONLY_RANK) -> Any:
    """Assign a worker its share of the data of its rank.

    Args:
        pipe: the pipeline.
        worker: a `WorkerIdentity`, or torchdata's ``WorkerInfo``.
        identity: the identity of its rank, for stages whose ``apply_sharding`` takes no sharding group. Only the last
            split counts for them, so it is made between all workers of all ranks.
    """
    _split(pipe, worker.num_workers, worker.worker_id, SHARDING_PRIORITIES.MULTIPROCESSING)
    number_instances(pipe)
    ranks, rank = identity
    for splitter in splitters(pipe) if ranks > 1 else ():
        if not _takes_group(splitter):
            splitter.apply_sharding(ranks * worker.num_workers, worker.worker_id * ranks + rank)
    check_batch_sizes(pipe)
    return pipe


def _split(pipe: Any, count: int, number: int, group: SHARDING_PRIORITIES) -> None:
    """Assign an instance its share of the data, as torch's ``apply_sharding`` does.

    Raises:
        RuntimeError: data that one stage has split would be split again by another one.
    """
    for splitter in splitters(pipe):
        splitter.apply_sharding(count, number, **({"sharding_group": group} if _takes_group(splitter) else {}))
        if (first := next((each for source in sources_of(splitter) for each in splitters(source)), None)) is not None:
            names = f"{call_of(splitter)} comes after {call_of(first)}"
            raise RuntimeError(f"Sharding twice would lose data: {names}, which splits it already. Remove one of them")


def _takes_group(splitter: Any) -> bool:
    """Whether a stage that splits the data knows ranks from workers; the same check as in torch."""
    return len(inspect.signature(splitter.apply_sharding).parameters) >= 3


SPLIT_TWICE = (
    "StatefulShards assigns each rank its share of the data. accelerate or the Trainer would split this share again "
    "and skip most samples. Do not pass the loader to accelerator.prepare(), and move batches to the device in the "
    "loop; or pass the pipeline to DataLoader2 with a ShardReadingService"
)


def has_own_stage(data: Any) -> bool:
    """Whether a dataset is a pipeline with a stage of this package."""
    return isinstance(data, IterDataPipe) and any(
        type(stage).__module__.partition(".")[0] == "wds_datapipes" for stage in upstream(data)
    )


def is_split_by_rank(pipe: Any) -> bool:
    """Whether the program, or torchdata's ``DistributedReadingService``, has already assigned this rank its share."""
    return given_identity(pipe) != ONLY_RANK or any(map(groups_of, splitters(pipe)))


def advice_for_torchrun() -> str:
    """Return advice if torchrun has started several ranks, but torch knows only one; otherwise ""."""
    started = os.environ.get("WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in os.environ else "1"
    if started == "1" or ranks_of_run() > 1:
        return ""
    return (
        f"torchrun has started {started} ranks, but torch.distributed.init_process_group has not been called, so each "
        "rank reads all of the data. Call it before you create the loader, which then splits the data between ranks; "
        "distributed=False declares that the list belongs to this rank alone"
    )


def is_called_by_accelerate() -> bool:
    """Whether the caller was called by accelerate, whose loaders set the epoch of their dataset."""
    return str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0] == "accelerate"


def given_identity(pipe: Any) -> RankIdentity:
    """Return the rank that torchdata's ``DistributedReadingService`` has assigned to a pipeline."""
    is_given = ranks_of_run() > 1 and any(declared(stage).syncs_ranks for stage in upstream(pipe))
    return RankIdentity(dist.get_world_size(), dist.get_rank()) if is_given else ONLY_RANK


def ranks_of_run() -> int:
    """Return the number of ranks of the run that torch knows of in this process."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
