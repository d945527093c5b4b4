"""Which worker a process is, and its share of the data."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import get_worker_info, graph_settings
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from wds_datapipes.pipes.upstream import number_instances

__all__ = ["WorkerPlace", "own_worker", "split_by_rank", "split_by_worker"]


class WorkerPlace(NamedTuple):
    """A worker, called as in torchdata's ``WorkerInfo``, which newer releases do not have.

    Attributes:
        num_workers: among how many it is.
        worker_id: its number.
    """

    num_workers: int
    worker_id: int


def own_worker() -> WorkerPlace:
    """Return which worker of torch's ``DataLoader`` this process is; the main process is the only one."""
    info = get_worker_info()
    return WorkerPlace(1, 0) if info is None else WorkerPlace(info.num_workers, info.id)


def split_by_rank(pipe: Any, ranks: int, rank: int) -> Any:
    """Give a rank its share of the data."""
    return graph_settings.apply_sharding(pipe, ranks, rank, SHARDING_PRIORITIES.DISTRIBUTED)


def split_by_worker(pipe: Any, worker: Any) -> Any:
    """Give a worker its share of what its rank has.

    Args:
        pipe: the pipeline.
        worker: a `WorkerPlace`, or torchdata's ``WorkerInfo``.
    """
    graph_settings.apply_sharding(pipe, worker.num_workers, worker.worker_id, SHARDING_PRIORITIES.MULTIPROCESSING)
    number_instances(pipe)
    return pipe
