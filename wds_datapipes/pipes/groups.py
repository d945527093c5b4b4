"""The groups of ranks and workers between which a stage splits the data, as torch sets them."""

from __future__ import annotations

from typing import Any

from wds_datapipes.datapipes import SHARDING_PRIORITIES
from wds_datapipes.pipes.inspection import attribute_of
from wds_datapipes.types import Instance

#: The groups of torch's ``ShardingFilter``: sharding priority -> number of instances, index of this instance.
Groups = dict[int, tuple[int, int]]


def groups_of(splitter: Any) -> Groups | None:
    """Return the groups between which a stage of any package splits the data; None if unknown."""
    groups: Groups | None = attribute_of(splitter, "groups")
    return groups


def rank_and_worker_in(groups: Groups) -> Instance:
    """Return the instance in separate groups of ranks and workers."""
    ranks, rank = groups.get(SHARDING_PRIORITIES.DISTRIBUTED, (1, 0))
    workers, worker = groups.get(SHARDING_PRIORITIES.MULTIPROCESSING, (1, 0))
    return Instance(rank, ranks, worker, workers)


def part_in(groups: Groups) -> tuple[int, int]:
    """Return the number of parts into which a stage splits the data, and the index of its own part.

    >>> [part_in({2: (2, rank), 3: (3, worker)}) for rank in range(2) for worker in range(3)]
    [(6, 0), (6, 2), (6, 4), (6, 1), (6, 3), (6, 5)]
    """
    if SHARDING_PRIORITIES.DEFAULT in groups:
        return groups[SHARDING_PRIORITIES.DEFAULT]
    instance = rank_and_worker_in(groups)
    return instance.count, instance.number
