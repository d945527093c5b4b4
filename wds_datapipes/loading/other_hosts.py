"""`RayReadingService`: a reading service whose workers are actors on any host of a Ray cluster."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from wds_datapipes.arguments import check_integer, checks_calls
from wds_datapipes.datapipes import IterDataPipe, MapDataPipe
from wds_datapipes.errors import StateError, text_of
from wds_datapipes.extras import require
from wds_datapipes.loading.data_parallel_group import Distributed
from wds_datapipes.loading.service.service import ShardReadingService
from wds_datapipes.loading.torchdata_api import extract_wrapper
from wds_datapipes.loading.transport.serialization import takes
from wds_datapipes.loading.workers.actor_connection import ActorConnection
from wds_datapipes.loading.workers.pooled_items import RunningWorkers
from wds_datapipes.loading.workers.remote_worker import RemoteWorker
from wds_datapipes.loading.workers.worker import WorkerJob
from wds_datapipes.pipes.graph import PipelineGraph
from wds_datapipes.pipes.inspection import call_of

#: Options of actors that would change the order, or leave actors behind.
FIXED = [
    "allow_out_of_order_execution",
    "concurrency_groups",
    "get_if_exists",
    "lifetime",
    "max_concurrency",
    "max_pending_calls",
    "max_restarts",
    "max_task_retries",
    "name",
]


@checks_calls
class RayReadingService(ShardReadingService):
    """A reading service for ``DataLoader2`` that reads with workers on any host of a Ray cluster.

    It yields the same items in the same order as a `ShardReadingService` with as many workers, and its states load into
    each other's loaders. Each worker is an actor, and small items share messages, which Ray's object store carries.
    Items arrive as copies, which are safe to keep and to change. A worker pauses once it has prefetched 64 MiB and at
    least two messages, so that the store does not spill. The actors end with the loader or with the program, even if
    that is killed. Call ``ray.init`` first. The package and all that the pipeline uses must be importable on each host
    that runs workers, and shards must be reachable from there.

    Args:
        num_workers: the number of workers of this rank.
        worker_options: options of the actors, as for ``.options()`` of a Ray actor, such as ``num_cpus`` (1 by
            default), ``resources``, ``scheduling_strategy`` (``"SPREAD"`` by default) or ``runtime_env``.
        restart: whether a new worker replaces one that has died, with its host or alone, and continues with the very
            next item; or how many may replace each worker. One that dies three times before another of its items
            arrives is not replaced.
        worker_init_fn: called in each worker when it starts, as for `ShardReadingService`.
        worker_reset_fn: called in each worker when an epoch begins, as for `ShardReadingService`.
        pin_memory: copy tensors to page-locked memory in a thread of the main process, for training on a GPU.
        timeout_s: how long to wait for a worker or another rank before raising an error, in seconds. ``None`` means no
            limit for a live worker and half an hour for a rank.
        distributed: the ranks between which the data is split, as for `ShardReadingService`.
        on_report: called with the statistics of each interval, as for `ShardReadingService`.
        report_every_s: the interval in seconds.

    Raises:
        MissingDependencyError: Ray is not installed.
        TypeError: an argument has the wrong type.
        ValueError: an argument has an invalid value; or, when the loader starts, the pipeline dispatches items.
        RuntimeError: when the loader starts, this process has not connected to a cluster.
        StateError: when the loader starts, workers cannot be replaced, because the pipeline has no state.
        WorkerDiedError: while iterating, a worker has died.
        WorkerTimeoutError: while iterating, a worker has sent nothing for ``timeout_s``.

    Examples:
        >>> service = RayReadingService(64, worker_options={"num_cpus": 2}, restart=True)  # doctest: +SKIP
        >>> with DataLoader2(pipe, reading_service=service) as loader:  # doctest: +SKIP
        ...     for batch in loader: ...
    """

    def __init__(
        self,
        num_workers: int,
        *,
        worker_options: Mapping[str, Any] | None = None,
        restart: bool | int = False,
        worker_init_fn: Callable[[Any, Any], Any] | None = None,
        worker_reset_fn: Callable[[Any, Any, Any], Any] | None = None,
        pin_memory: bool = False,
        timeout_s: float | None = None,
        distributed: Distributed = None,
        on_report: Callable[[dict[str, Any]], object] | None = None,
        report_every_s: float = 60.0,
    ) -> None:
        require("ray", extra="ray", purpose="read with workers on other hosts")
        super().__init__(
            check_integer("num_workers", num_workers, 1),
            worker_init_fn=worker_init_fn,
            worker_reset_fn=worker_reset_fn,
            pin_memory=pin_memory,
            timeout_s=timeout_s,
            distributed=distributed,
            on_report=on_report,
            report_every_s=report_every_s,
        )
        if found := [name for name in FIXED if name in (worker_options or {})]:
            raise ValueError(f"worker_options must not contain {found[0]!r}, which the loader itself sets")
        # Not within the resources of the process that trains, as the children of an actor of Ray Train would be.
        self.worker_options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", **(worker_options or {})}
        self.restart = restart if isinstance(restart, bool) else check_integer("restart", restart, 0)

    def _start_pool(self, jobs: Sequence[WorkerJob], dispatching: WorkerJob | None) -> RunningWorkers:
        """Start the actors."""
        if dispatching is not None:
            raise ValueError(
                ".sharding_round_robin_dispatch() sends items from one process to the workers of its host, and a "
                "RayReadingService has none there. Split the shards with .sharding_filter(), or use ShardReadingService"
            )
        if self.restart and self.loop.refusal:
            raise StateError(f"restart={self.restart} requires a pipeline with a state: {self.loop.refusal}")
        return ActorPool(
            jobs, self.worker_options, self.timeout_s, float("inf") if self.restart is True else self.restart
        )


class ActorPool:
    """Starts the actors of a loader, and ends them.

    Args:
        jobs: the job of each.
        options: their options in Ray.
        timeout_s: the maximum time to wait for a reply, in seconds; ``None`` means no limit.
        restarts: how many actors may replace those of each worker that die.

    Attributes:
        workers: the connection to each.
    """

    dispatcher = None

    def __init__(
        self, jobs: Sequence[WorkerJob], options: Mapping[str, Any], timeout_s: float | None, restarts: float
    ) -> None:
        import ray

        if not ray.is_initialized():
            raise RuntimeError(
                "A RayReadingService requires a connection to a Ray cluster, and this process has none. Call "
                'ray.init("auto") on a host of the cluster, or ray.init() for a cluster of this host alone'
            )
        self._owner_pid = os.getpid()
        first = jobs[0]
        code = pickle_code(extract_wrapper(first.pipe), first.init_fn, first.reset_fn)
        environment = {**ray.get_runtime_context().runtime_env, **(options.get("runtime_env") or {})}
        folder = None if "working_dir" in environment else str(Path.cwd())
        actor: Any = ray.remote(RemoteWorker).options(**options)
        stored = ray.put(code)  # once for all workers, and for those that replace them
        plain = [replace(job, pipe=None, init_fn=None, reset_fn=None) for job in jobs]
        starts = [partial(actor.remote, job, stored, folder) for job in plain]
        self.workers = [
            ActorConnection(f"Worker {number}", start, timeout_s, restarts) for number, start in enumerate(starts)
        ]
        for worker in self.workers:
            worker.others = self.workers

    def close(self) -> None:
        """End the actors."""
        if os.getpid() == self._owner_pid:  # a forked process has a copy of this object, but no connection to Ray
            for worker in self.workers:
                worker.cut()
                worker.close()


def pickle_code(pipe: Any, *functions: Any) -> bytes:
    """Return a pipeline and functions for other hosts; those of the main program are pickled by value.

    Raises:
        PicklingError: a stage or a function cannot be pickled; the message names it.
    """
    from ray import cloudpickle

    if (main := sys.modules["__main__"]).__name__ != "__main__":  # multiprocessing has spawned this process
        cloudpickle.register_pickle_by_value(main)
    try:
        return bytes(cloudpickle.dumps((pipe, *functions)))
    except Exception as error:
        parts = [
            (f"The attribute {name!r} of {call_of(stage)}", value)
            for stage in PipelineGraph(pipe).stages
            for name, value in vars(stage).items()
        ]
        for what, value in (*parts, *zip(("worker_init_fn", "worker_reset_fn"), functions, strict=True)):
            if not isinstance(value, IterDataPipe | MapDataPipe) and not takes(cloudpickle.dumps, value):
                raise pickle.PicklingError(
                    f"{what} cannot be sent to other hosts ({type(error).__name__}: {text_of(error)}). Open files, "
                    "locks and connections where they are used, or in worker_init_fn"
                ) from error
        raise
