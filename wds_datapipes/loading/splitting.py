"""Which shards or samples a rank and a worker get.

A stage that splits a list gives instance i of n every n-th item, beginning with item i, where i is `Instance.number`.
Stages that split in another way do so themselves: `IndexedSamples` by a `BatchShare`, and `DirectoryShards` by a lock
for each shard.
"""

from __future__ import annotations

import inspect
from typing import Any

from wds_datapipes.datapipes import SHARDING_PRIORITIES, IterDataPipe
from wds_datapipes.loading.data_parallel_group import DataParallelGroup, given_rank, ranks_of_run
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import PipelineGraph, graph_of
from wds_datapipes.pipes.groups import groups_of
from wds_datapipes.pipes.inspection import call_of
from wds_datapipes.pipes.sharding import number_instances
from wds_datapipes.types import ALONE, Instance
from wds_datapipes.user_warnings import callers


def split_by_rank(pipe: Any, instance: Instance) -> Any:
    """Assign a rank its share of the data."""
    graph = graph_of(pipe)
    _split(graph, instance.ranks, instance.rank, SHARDING_PRIORITIES.DISTRIBUTED)
    return graph.pipe


def split_by_worker(pipe: Any, instance: Instance) -> Any:
    """Assign a worker its share of the data of its rank.

    Stages whose ``apply_sharding`` takes no sharding group are split between all workers of all ranks, because only the
    last split counts for them.
    """
    graph = graph_of(pipe)
    _split(graph, max(instance.workers, 1), instance.worker, SHARDING_PRIORITIES.MULTIPROCESSING)
    number_instances(graph)
    for splitter in graph.splitters if instance.ranks > 1 else ():
        if not _takes_group(splitter):
            splitter.apply_sharding(instance.count, instance.number)
    return graph.pipe


def _split(graph: PipelineGraph, count: int, number: int, group: SHARDING_PRIORITIES) -> None:
    """Assign an instance its share of the data, as torch's ``apply_sharding`` does.

    Raises:
        RuntimeError: data that one stage has split would be split again by another one.
    """
    for splitter in graph.splitters:
        before = graph.at(splitter)
        if any(declared(stage).process_boundary == "remote" for stage in before.stages):
            continue  # its items were already split between the workers
        splitter.apply_sharding(count, number, **({"sharding_group": group} if _takes_group(splitter) else {}))
        if others := [each for each in before.splitters if each is not splitter]:
            names = f"{call_of(splitter)} comes after {call_of(others[0])}"
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
        type(stage).__module__.partition(".")[0] == "wds_datapipes" for stage in graph_of(data).stages
    )


def is_split_by_rank(pipe: Any) -> bool:
    """Whether the program, or torchdata's ``DistributedReadingService``, has already assigned this rank its share."""
    graph = graph_of(pipe)
    return given_rank(graph) != ALONE or any(map(groups_of, graph.splitters))


def is_called_by_accelerate() -> bool:
    """Whether the caller was called by accelerate, whose loaders set the epoch of their dataset."""
    _, caller, *_ = callers()
    return str(caller.f_globals.get("__name__")).partition(".")[0] == "accelerate"


def check_replicated(pipe: Any, group: DataParallelGroup) -> None:
    """Check that the pipeline lets several ranks read the same data, if the group requires it.

    Raises:
        ValueError: a stage gives each shard to one process.
    """
    if group.is_replicated and any(declared(stage).shard_access == "claimed" for stage in graph_of(pipe).stages):
        raise ValueError(
            f"{ranks_of_run()} ranks share the data between {group.rank.ranks}, so some must read the same, but "
            "DirectoryShards gives each shard to one process. List the shards with ShardList"
        )
