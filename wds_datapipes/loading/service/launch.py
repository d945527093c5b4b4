"""Split a pipeline into the workers' part and the main process's part, and start the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from wds_datapipes.datapipes import traverse_dps
from wds_datapipes.loading.epoch_run import call_with_pipeline
from wds_datapipes.loading.splitting import split_by_worker
from wds_datapipes.loading.torchdata_api import (
    WorkerInfo,
    attach_wrapper,
    find_dispatched,
    find_replicable_branches,
    list_dps,
    replace_dp,
)
from wds_datapipes.loading.transport.flow_control import items_together, messages_ahead
from wds_datapipes.loading.workers.dispatch import DispatchedItems
from wds_datapipes.loading.workers.in_process import LocalItems
from wds_datapipes.loading.workers.loop_items import LoopItems, Pipe
from wds_datapipes.loading.workers.pooled_items import PooledItems, RunningWorkers
from wds_datapipes.loading.workers.worker import WorkerJob
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import PipelineGraph
from wds_datapipes.types import Instance

StartPool: TypeAlias = Callable[[Sequence[WorkerJob], "WorkerJob | None"], RunningWorkers]
"""Starts the workers with these jobs, and the dispatching process, if there is one."""


def run_in_process(service: Any, datapipe: Pipe, rank: Instance) -> tuple[Pipe, LoopItems]:
    """Run everything in the main process; return the pipeline, and the stage that produces the items.

    Args:
        service: the `ShardReadingService`, whose options and states are used.
        datapipe: the pipeline, split between the ranks.
        rank: this rank.
    """
    datapipe = split_by_worker(datapipe, rank.on_worker(0, 1))
    if service.worker_init_fn is not None:
        datapipe = call_with_pipeline("worker_init_fn", service.worker_init_fn(datapipe, WorkerInfo(1, 0)))
    # torchdata's FullSync, which synchronizes ranks, prefetches one item, as it does with workers.
    waiting: Any = datapipe if declared(datapipe).process_boundary == "ranks" else None
    part = datapipe if waiting is None else waiting.datapipe
    graph = PipelineGraph(part)
    service.loop.refuse(graph, [])
    items = LocalItems(graph, service.worker_reset_fn, service.loop.replay_reason)
    if waiting is None:
        return items, items
    waiting.datapipe = items
    return datapipe, items


def start_workers(service: Any, start_pool: StartPool, datapipe: Pipe, rank: Instance) -> tuple[Pipe, LoopItems]:
    """Start the workers, each with its part of the pipeline.

    Args:
        service: the `ShardReadingService`, whose options and states are used.
        start_pool: starts them.
        datapipe: the pipeline, split between the ranks.
        rank: this rank.

    Returns:
        tuple: the main process's part, and the stage that receives the workers' items.

    Raises:
        ValueError: the pipeline has no part that each worker can run.
    """
    graph, loop = traverse_dps(datapipe), service.loop
    dispatched = find_dispatched(graph)
    if dispatched is not None:
        graph = replace_dp(graph, dispatched, DispatchedItems())
        ((datapipe, _),) = graph.values()
    stages = list_dps(graph)
    branches = find_replicable_branches(graph)
    if len(branches) != 1:
        raise ValueError(
            f"The pipeline has {len(branches)} branches that workers could run, but exactly one is required: join them "
            "before the first stage that must stay in the main process (whose is_replicable() is False)."
        )
    window = messages_ahead(service.num_workers, service.worker_prefetch_cnt, service.main_prefetch_cnt)
    together = items_together(service.worker_prefetch_cnt)
    own = {id(stage) for stage in list_dps(traverse_dps(branches[0]))}
    part, upstream = PipelineGraph(branches[0]), None if dispatched is None else PipelineGraph(dispatched)
    loop.refuse(part, [stage for stage in stages if id(stage) not in own], upstream)
    share = attach_wrapper(branches[0])
    jobs = [
        WorkerJob(
            share,
            rank.on_worker(number, service.num_workers),
            window,
            together,
            service.worker_init_fn,
            service.worker_reset_fn,
            resumed=resumed,
            records_state=not loop.refusal,
            replay_reason=loop.replay_reason,
            name=f"worker process {number}",
        )
        for number, resumed in enumerate(loop.parts)
    ]
    dispatching = None
    if dispatched is not None:
        # It has no state: to resume, it makes the items of the epoch again, as the workers do.
        dispatching = WorkerJob(
            attach_wrapper(dispatched),
            rank.on_worker(0, 1),
            window,
            together,
            None,
            service.worker_reset_fn,
            resumed=None,
            records_state=False,
            replay_reason="",
            name="dispatching process",
        )
    items = PooledItems(
        start_pool(jobs, dispatching), part.spans_epochs, upstream is not None and upstream.spans_epochs
    )
    if branches[0] is datapipe:
        return items, items
    replace_dp(graph, branches[0], items)
    return datapipe, items
