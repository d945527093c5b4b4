"""Launching the workers, and splitting a pipeline into their part and that of the main process."""

from __future__ import annotations

import multiprocessing
from typing import Any

from wds_datapipes.datapipes import IterDataPipe, traverse_dps
from wds_datapipes.loading.epoch import call_with_pipeline
from wds_datapipes.loading.service.state_manager import StateManager
from wds_datapipes.loading.splitting import RankIdentity, split_by_worker
from wds_datapipes.loading.torchdata_api import (
    DispatchedSource,
    WorkerInfo,
    attach_wrapper,
    find_lca_round_robin_sharding_dp,
    find_replicable_branches,
    list_dps,
    replace_dp,
)
from wds_datapipes.loading.workers.in_process import LocalItems
from wds_datapipes.loading.workers.pool import PooledItems, WorkerPool
from wds_datapipes.loading.workers.worker import WorkerJob
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.state.pipeline_state import spans_epochs

#: The maximum number of small items in a message.
MAX_TOGETHER = 256

Pipe = IterDataPipe[Any]


def run_in_process(
    service: Any, datapipe: Pipe, manager: StateManager, identity: RankIdentity
) -> tuple[Pipe, LocalItems]:
    """Run everything in the main process; return the pipeline, and the stage that makes the items.

    Args:
        service: the `ShardReadingService`, whose options are used.
        datapipe: the pipeline, split between the ranks.
        manager: the manager of the state.
        identity: the identity of this rank.
    """
    datapipe = split_by_worker(datapipe, WorkerInfo(1, 0), identity)
    if service.worker_init_fn is not None:
        datapipe = call_with_pipeline("worker_init_fn", service.worker_init_fn(datapipe, WorkerInfo(1, 0)))
    # FullSync, torchdata's stage that synchronizes ranks, prefetches an item, as it does with workers.
    waiting: Any = datapipe if declared(datapipe).syncs_ranks else None
    part = datapipe if waiting is None else waiting.datapipe
    manager.refuse(part, [])
    items = LocalItems(part)
    if waiting is None:
        return items, items
    waiting.datapipe = items
    return datapipe, items


def start_pool(
    service: Any, datapipe: Pipe, manager: StateManager, identity: RankIdentity
) -> tuple[Pipe, WorkerPool, PooledItems]:
    """Start the processes, each with its part of the pipeline.

    Args:
        service: the `ShardReadingService`, whose options are used.
        datapipe: the pipeline, split between the ranks.
        manager: the manager of the state.
        identity: the identity of this rank.

    Returns:
        tuple: the part of the main process, the pool, and the stage that receives their items.

    Raises:
        ValueError: the pipeline has no part that each worker can run.
    """
    graph = traverse_dps(datapipe)
    dispatching = find_lca_round_robin_sharding_dp(graph)
    if dispatching is not None:
        graph = replace_dp(graph, dispatching, DispatchedSource())
        ((datapipe, _),) = graph.values()
    branches = find_replicable_branches(graph)
    if len(branches) != 1:
        raise ValueError(
            f"The pipeline has {len(branches)} branches that workers could run, but exactly one is required: join them "
            "before the first stage that must stay in the main process (whose is_replicable() is False)."
        )
    # Small items share messages only if a worker may run ahead.
    window = 1 + service.worker_prefetch_cnt + -(-service.main_prefetch_cnt // service.num_workers)
    together = MAX_TOGETHER if service.worker_prefetch_cnt else 1
    own = {id(stage) for stage in list_dps(traverse_dps(branches[0]))}
    manager.refuse(branches[0], [stage for stage in list_dps(graph) if id(stage) not in own], dispatching)
    share = attach_wrapper(branches[0])
    infos = [WorkerInfo(service.num_workers, number) for number in range(service.num_workers)]
    records_state = not (manager.refusal or manager.replay_reason)
    functions = service.worker_init_fn, service.worker_reset_fn
    jobs = [
        WorkerJob(
            share,
            info,
            window,
            together,
            *functions,
            part,
            records_state,
            manager.replay_reason_of_workers,
            identity,
        )
        for info, part in zip(infos, manager.parts, strict=True)
    ]
    first = None
    if dispatching is not None:
        first = WorkerJob(attach_wrapper(dispatching), infos[0], window, together, reset_fn=service.worker_reset_fn)
    pool = WorkerPool(jobs, first, start_method(service), service.timeout_s)
    pool.spans_epochs = spans_epochs(branches[0])
    items = PooledItems(pool)
    if branches[0] is datapipe:
        return items, pool, items
    replace_dp(graph, branches[0], items)
    return datapipe, pool, items


def start_method(service: Any) -> str:
    """Return how a `ShardReadingService` starts its processes."""
    known = multiprocessing.get_all_start_methods()
    method: str | None = service.multiprocessing_context
    return method or ("fork" if "fork" in known else multiprocessing.get_start_method())
