"""Launching the workers: the part of a pipeline that they run, and the part of the main process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterDataPipe
from torchdata.dataloader2.graph import list_dps, replace_dp, traverse_dps
from torchdata.dataloader2.graph._serialization import attach_wrapper
from torchdata.dataloader2.graph.utils import _find_replicable_branches
from torchdata.dataloader2.utils import WorkerInfo
from torchdata.dataloader2.utils.dispatch import _DummyIterDataPipe, find_lca_round_robin_sharding_dp
from torchdata.datapipes.iter import FullSync

from wds_datapipes.loading.rank_and_worker import RankIdentity, split_by_worker
from wds_datapipes.loading.seeding import call_with_pipeline
from wds_datapipes.loading.service.state_manager import StateManager
from wds_datapipes.loading.workers.in_process import LocalItems
from wds_datapipes.loading.workers.pool import PooledItems, WorkerPool
from wds_datapipes.loading.workers.worker import WorkerJob
from wds_datapipes.pipes.state.pipeline_state import spans_epochs

__all__ = ["LaunchPlan"]

#: How many small items may share a message.
TOGETHER = 256

Pipe = IterDataPipe[Any]


@dataclass(frozen=True)
class LaunchPlan:
    """Who runs a pipeline.

    Attributes:
        workers: how many worker processes; with 0, it is the main process.
        method: how processes are started, such as ``"fork"``, or None for the first of these that there is.
        worker_prefetch: how many messages a worker makes ahead.
        main_prefetch: how many more all workers make ahead together.
        timeout_s: how long a worker may send nothing while it is waited for, in seconds; None is without limit.
        init_fn: the user's, called with the pipe and the worker when it starts.
        reset_fn: the user's, called with the pipe, the worker and the seed generator when an epoch begins.
        place: of this rank.
    """

    workers: int
    method: str | None
    worker_prefetch: int
    main_prefetch: int
    timeout_s: float | None
    init_fn: Callable[[Any, Any], Any] | None
    reset_fn: Callable[[Any, Any, Any], Any] | None
    place: RankIdentity

    def nobody(self, datapipe: Pipe, keeper: StateManager) -> tuple[Pipe, LocalItems]:
        """Leave all to the main process; return the pipeline, and where the items are made in it."""
        datapipe = split_by_worker(datapipe, WorkerInfo(1, 0), self.place)
        if self.init_fn is not None:
            datapipe = call_with_pipeline("worker_init_fn", self.init_fn(datapipe, WorkerInfo(1, 0)))
        # torchdata's stage for ranks that wait for each other takes an item ahead, as if it were behind workers.
        waiting = datapipe if isinstance(datapipe, FullSync) else None
        part = datapipe if waiting is None else waiting.datapipe
        keeper.refuse(part, [])
        items = LocalItems(part)
        if waiting is None:
            return items, items
        waiting.datapipe = items
        return datapipe, items

    def crew(self, datapipe: Pipe, keeper: StateManager) -> tuple[Pipe, WorkerPool, PooledItems]:
        """Start the processes, each with its part of the pipeline.

        Returns:
            tuple: the part of the main process, the processes, and where their items come in.

        Raises:
            ValueError: the pipeline has no part that each worker could run.
        """
        graph = traverse_dps(datapipe)
        dispatching = find_lca_round_robin_sharding_dp(graph)
        if dispatching is not None:
            graph = replace_dp(graph, dispatching, _DummyIterDataPipe())
            ((datapipe, _),) = graph.values()
        branches = _find_replicable_branches(graph)
        if len(branches) != 1:
            raise ValueError(
                f"The pipeline has {len(branches)} branches that workers could run, and one is needed: join what comes "
                "before the first stage that has to stay in the main process (whose is_replicable() is False)."
            )
        # Small items share messages only where a worker may be ahead at all.
        window = 1 + self.worker_prefetch + -(-self.main_prefetch // self.workers)
        together = TOGETHER if self.worker_prefetch else 1
        own = {id(stage) for stage in list_dps(traverse_dps(branches[0]))}
        if dispatching is not None:
            keeper.refusal = "sharding_round_robin_dispatch deals items to workers, and has no state"
        keeper.refuse(branches[0], [stage for stage in list_dps(graph) if id(stage) not in own])
        share = attach_wrapper(branches[0])
        infos = [WorkerInfo(self.workers, number) for number in range(self.workers)]
        tells_state = not (keeper.refusal or keeper.replay_reason)
        jobs = [
            WorkerJob(share, info, window, together, self.init_fn, self.reset_fn, part, tells_state, self.place)
            for info, part in zip(infos, keeper.parts, strict=True)
        ]
        first = None
        if dispatching is not None:
            first = WorkerJob(attach_wrapper(dispatching), infos[0], window, together, reset_fn=self.reset_fn)
        method = self.method
        if method is None:
            method = "fork" if "fork" in multiprocessing.get_all_start_methods() else multiprocessing.get_start_method()
        crew = WorkerPool(jobs, first, method, self.timeout_s)
        crew.lasts = spans_epochs(branches[0])
        items = PooledItems(crew)
        if branches[0] is datapipe:
            return items, crew, items
        replace_dp(graph, branches[0], items)
        return datapipe, crew, items
