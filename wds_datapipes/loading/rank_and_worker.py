"""The rank and worker number of a process, and its share of the data."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info, graph_settings
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from wds_datapipes.pipes.sharding import number_instances, splitters

__all__ = ["ONLY_RANK", "RankIdentity", "WorkerIdentity", "own_worker", "split_by_rank", "split_by_worker"]


class RankIdentity(NamedTuple):
    """A rank.

    Attributes:
        ranks: among how many it is.
        rank: its number.
    """

    ranks: int
    rank: int


ONLY_RANK = RankIdentity(1, 0)


class WorkerIdentity(NamedTuple):
    """A worker, called as in torchdata's ``WorkerInfo``, which newer releases do not have.

    Attributes:
        num_workers: among how many it is.
        worker_id: its number.
    """

    num_workers: int
    worker_id: int


def own_worker() -> WorkerIdentity:
    """Return which worker of torch's ``DataLoader`` this process is; the main process is the only one."""
    info = get_worker_info()
    return WorkerIdentity(1, 0) if info is None else WorkerIdentity(info.num_workers, info.id)


def split_by_rank(pipe: Any, place: RankIdentity) -> Any:
    """Give a rank its share of the data."""
    return graph_settings.apply_sharding(pipe, *place, SHARDING_PRIORITIES.DISTRIBUTED)


def split_by_worker(pipe: Any, worker: Any, place: RankIdentity = ONLY_RANK) -> Any:
    """Give a worker its share of what its rank has.

    Args:
        pipe: the pipeline.
        worker: a `WorkerIdentity`, or torchdata's ``WorkerInfo``.
        place: of its rank, for stages whose ``apply_sharding`` does not take the kind of a split: they know the last
            split alone, which is that between all workers of all ranks.
    """
    graph_settings.apply_sharding(pipe, worker.num_workers, worker.worker_id, SHARDING_PRIORITIES.MULTIPROCESSING)
    number_instances(pipe)
    ranks, rank = place
    for splitter in splitters(pipe) if ranks > 1 else ():
        if len(inspect.signature(splitter.apply_sharding).parameters) < 3:  # as torch asks
            splitter.apply_sharding(ranks * worker.num_workers, worker.worker_id * ranks + rank)
    return pipe
