"""The instance that a copy of a pipeline runs for: its rank and its worker, from the stages that split it or torch."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils.data import get_worker_info

from wds_datapipes.datapipes import SHARDING_PRIORITIES
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.pipes.groups import Groups, groups_of, rank_and_worker_in
from wds_datapipes.types import ALONE, Instance


def own_rank() -> Instance:
    """Return this rank of the default process group; the only rank without one."""
    is_in_group = dist.is_available() and dist.is_initialized()
    return Instance(dist.get_rank(), dist.get_world_size()) if is_in_group else ALONE


def own_worker(rank: Instance = ALONE) -> Instance:
    """Return this worker of torch's ``DataLoader`` on a rank; the main process counts as the only worker."""
    info = get_worker_info()
    return rank if info is None else rank.on_worker(info.id, info.num_workers)


def instance_of(pipe: Any) -> Instance:
    """Return the instance that a loader has set for a pipeline, in the stages that split its data."""
    return instance_in(_first_groups(pipe))


def instance_of_process(pipe: Any) -> Instance:
    """Return the instance of this process, from the stages that split the data, or else from torch."""
    groups = _first_groups(pipe)
    return instance_in(groups) if groups else own_worker(own_rank())


def instance_in(groups: Groups) -> Instance:
    """Return the instance that a loader has set in the groups of a stage that splits the data."""
    if SHARDING_PRIORITIES.DEFAULT not in groups:
        return rank_and_worker_in(groups)
    # torch's DataLoader numbers the workers of all ranks in a single group, like `Instance.number`.
    instances, number = groups[SHARDING_PRIORITIES.DEFAULT]
    info = get_worker_info()
    if info is None:
        return Instance(number, instances)
    ranks = max(instances // info.num_workers, 1)
    return Instance(number % ranks, ranks, info.id, info.num_workers)


def _first_groups(pipe: Any) -> Groups:
    """Return the groups of the first stage that knows any."""
    return next(filter(None, map(groups_of, graph_of(pipe).splitters)), {})
