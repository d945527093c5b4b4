"""`ShardReadingService`: a multi-process reading service with its own transport."""

from __future__ import annotations

import multiprocessing.util
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from wds_datapipes.arguments import check_integer, checks_calls
from wds_datapipes.errors import StateError
from wds_datapipes.loading.data_parallel_group import DataParallelGroup, Distributed, advice_for_torchrun, ranks_of_run
from wds_datapipes.loading.epoch_run import refuse_hidden_stages
from wds_datapipes.loading.report import LoadingReport
from wds_datapipes.loading.service.pinning import pin_memory_of
from wds_datapipes.loading.service.service_arguments import (
    check_functions,
    check_seconds,
    check_start_method,
    start_method,
)
from wds_datapipes.loading.service.service_loop import Loop
from wds_datapipes.loading.splitting import is_split_by_rank
from wds_datapipes.loading.torchdata_api import MultiProcessingReadingService
from wds_datapipes.loading.torchdata_patches.local_functions import explain_worker_pickling
from wds_datapipes.loading.transport.flow_control import MAIN_PREFETCH, WORKER_PREFETCH
from wds_datapipes.loading.workers.loop_items import Pipe, users_part
from wds_datapipes.pipes.graph import PipelineGraph, graph_of
from wds_datapipes.pipes.split_advice import advice_for_split, log_idle_processes
from wds_datapipes.user_warnings import warn_user

if TYPE_CHECKING:
    from wds_datapipes.loading.workers.pooled_items import RunningWorkers
    from wds_datapipes.loading.workers.worker import WorkerJob


@checks_calls
class ShardReadingService(MultiProcessingReadingService):  # type: ignore[misc]  # torchdata has no types
    """A reading service for ``DataLoader2`` that reads with worker processes.

    It replaces torchdata's ``MultiProcessingReadingService``, alone or after a ``DistributedReadingService`` in a
    ``SequentialReadingService``. The main process takes one item from each worker in turn and skips exhausted workers,
    so the order depends only on the pipeline, the seed and the number of workers. One call of ``DataLoader2.seed()``
    makes a whole run reproducible, with a different order in each epoch. Workers send items without waiting for
    requests. Small items share messages. Large arrays and tensors travel in shared memory that takes no space in
    ``/dev/shm``, and arrive as views of it, which are safe to keep. Worker processes require Linux.

    Args:
        num_workers: the number of worker processes; with 0, the pipeline runs in the main process.
        multiprocessing_context: the start method: ``"fork"`` (the default if available), ``"spawn"`` or
            ``"forkserver"``.
        worker_prefetch_cnt: the number of messages that a worker prefetches. A message holds one item, or as many small
            items as are produced in half a millisecond and fit into 512 KiB. With 0, each message holds one item, and a
            worker prefetches one item.
        main_prefetch_cnt: the number of additional messages that all workers together prefetch. Regardless of both
            counts, a worker pauses once it has prefetched 64 MiB and at least two messages.
        worker_init_fn: called in each worker when it starts, with the pipeline and torchdata's ``WorkerInfo``; it
            returns the pipeline.
        worker_reset_fn: called in each worker when an epoch begins, with the pipeline, the ``WorkerInfo`` and the
            worker's ``SeedGenerator``; it returns the pipeline.
        pin_memory: copy tensors to page-locked memory in a thread of the main process, for training on a GPU.
        timeout_s: how long to wait for a worker or another rank before raising an error, in seconds. ``None`` means no
            limit for a live worker and half an hour for a rank.
        distributed: the ranks between which the data is split; they use the same seed. By default, all ranks of the
            default process group, if there is one and the pipeline is not split between them yet; ``True`` requires a
            process group. A ``ProcessGroup`` or a one-dimensional ``DeviceMesh``, such as ``mesh["dp"]``, is the
            data-parallel group of this rank: ranks at the same place in their groups, as in tensor parallelism, read
            the same items. All ranks of the default process group synchronize only at the beginning of an epoch; their
            numbers of items may differ. The pair ``(rank, world_size)`` needs no process group and synchronizes
            nothing: give the loaders of all ranks the same seed. ``False`` declares that the pipeline already reads
            only the share of this rank, or that no other rank has a loader.
        on_report: called with the statistics of each interval, in the form of `LoadingReport.as_dict`, in a thread of
            the main process, even while the loop waits. On rank 0, they include those of all ranks, under names that
            begin with ``all_ranks_``. Exceptions are logged. After the loader has shut down, it is not called again.
        report_every_s: the interval in seconds.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has an invalid value, or this process is not in the group that it passes.
        RuntimeError: when an epoch begins, the ranks differ in their workers, shards or groups; or the loader has no
            seed, and the ranks cannot agree on one.
        WorkerDiedError: while iterating, a worker process has ended.
        WorkerTimeoutError: while iterating, a worker has sent nothing for ``timeout_s``.
        RankLostError: when an epoch begins, another rank has failed or left, or does not arrive within ``timeout_s``.

    Examples:
        >>> from torchdata.dataloader2 import DataLoader2
        >>> from wds_datapipes.testing import build_shard
        >>> for name in "abc":
        ...     _ = build_shard(f"{name}.tar", [{"__key__": f"{name}{n}", "cls": str(n)} for n in range(2)])
        >>> pipe = ShardList("{a..c}.tar").sharding_filter().load_wds_shards().group_samples().to_tuple("__key__")
        >>> with DataLoader2(pipe, reading_service=ShardReadingService(num_workers=2)) as loader:
        ...     print([key for key, in loader])
        ...     print(loader.reading_service.report().items)
        ['a0', 'b0', 'a1', 'b1', 'c0', 'c1']
        6
    """

    def __init__(
        self,
        num_workers: int = 0,
        multiprocessing_context: str | None = None,
        worker_prefetch_cnt: int = WORKER_PREFETCH,
        main_prefetch_cnt: int = MAIN_PREFETCH,
        worker_init_fn: Callable[[Any, Any], Any] | None = None,
        worker_reset_fn: Callable[[Any, Any, Any], Any] | None = None,
        *,
        pin_memory: bool = False,
        timeout_s: float | None = None,
        distributed: Distributed = None,
        on_report: Callable[[dict[str, Any]], object] | None = None,
        report_every_s: float = 60.0,
    ) -> None:
        num_workers = check_integer("num_workers", num_workers, 0)
        check_start_method(multiprocessing_context)
        check_seconds("timeout_s", timeout_s, is_optional=True)
        check_seconds("report_every_s", report_every_s)
        if not isinstance(pin_memory, bool):
            raise TypeError(f"pin_memory must be True or False, not {pin_memory!r}")
        check_functions(worker_init_fn=worker_init_fn, worker_reset_fn=worker_reset_fn, on_report=on_report)
        # Given 0 workers, torchdata's class would recommend another service.
        from wds_datapipes.loading.service.loader import extend_loaders  # which needs this class

        extend_loaders()
        super().__init__(
            max(num_workers, 1),
            multiprocessing_context,
            check_integer("worker_prefetch_cnt", worker_prefetch_cnt, 0),
            check_integer("main_prefetch_cnt", main_prefetch_cnt, 0),
            worker_init_fn,
            worker_reset_fn,
        )
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.timeout_s = timeout_s
        # Wrapped in a lambda, which is not copied with the service, because the function may have state.
        self.on_report = None if on_report is None else lambda report: on_report(report)
        self.report_every_s = report_every_s
        self.group = DataParallelGroup.of(distributed)
        self._knows_ranks = distributed is not None
        self._has_limit = self._is_paused = False
        self._mp = num_workers > 0
        self.loop: Loop
        self._end: Callable[[], object] | None
        self._running: Any = None  # the part of the main process, with the stages that count its items
        self.is_copied: bool | None = None  # whether a loader works on a copy of it; None if no loader has it
        self.reset()

    def initialize(self, datapipe: Pipe) -> Pipe:
        """Start the workers, and return the part of the pipeline that runs in the main process.

        Raises:
            RankLostError: another rank does not arrive in time.
            ValueError: a stage that draws or splits is stored where loaders do not find it.
        """
        from wds_datapipes.loading.service.launch import run_in_process, start_workers  # no worker launches others

        graph = PipelineGraph(datapipe)
        refuse_hidden_stages(graph)
        self.describe(graph)
        self._warn_of_split(datapipe)
        start = partial(start_workers, self, self._start_pool) if self.num_workers else partial(run_in_process, self)
        loop = self.loop
        try:
            with explain_worker_pickling(start_method(self.multiprocessing_context)):
                datapipe = loop.start(start)
                datapipe = pin_memory_of(datapipe) if self.pin_memory else datapipe
                datapipe = self._running = loop.count(datapipe)
            self._end_datapipe = users_part(datapipe)
            loop.begin_reports(weakref.ref(self), self.report_every_s, calls=self.on_report is not None)
        except BaseException:
            loop.close()
            raise
        # The finalizer also runs when this object is garbage-collected, and at interpreter exit.
        self._end = weakref.finalize(self, loop.close)
        # A multiprocessing child, such as a forked rank, waits for its own children when it exits.
        multiprocessing.util.Finalize(self, self._end, exitpriority=0)
        return datapipe

    def initialize_iteration(self, seed_generator: Any, iter_reset_fn: Callable[[Pipe], Pipe] | None = None) -> None:
        """Begin an epoch in all workers and on all ranks.

        Args:
            seed_generator: the seed generator of the loader.
            iter_reset_fn: the reset function of a preceding reading service.

        Raises:
            RankLostError: another rank has failed or left, or does not arrive in time.
            RuntimeError: the ranks have different seeds, or none.
        """
        self.loop.begin(seed_generator, iter_reset_fn, self._running)
        self._end_datapipe = users_part(self._running)

    def set_epoch(self, epoch: int) -> None:
        """Select the number of the next epoch, which determines its order together with the seed of the loader.

        Args:
            epoch: the number. If none is selected, each epoch's order follows from that of the previous epoch.

        Raises:
            RuntimeError: ``DataLoader2`` works on a copy of this service: use ``loader.reading_service``.
        """
        self._refuse_copied(RuntimeError)
        self.loop.select(check_integer("epoch", epoch, 0))

    def group_of(self, datapipe: Any) -> DataParallelGroup:
        """Return the ranks that share the data: by default, all, unless the pipeline is already split between them."""
        if self._knows_ranks or ranks_of_run() == 1 or is_split_by_rank(datapipe):
            return self.group
        return DataParallelGroup.of(True)

    def describe(self, datapipe: Any) -> None:
        """Record the pipeline, or its graph, for states that are saved before the first epoch begins."""
        graph = graph_of(datapipe)
        self.group = self.group_of(graph)
        self.loop.describe(graph, self.group)

    def reset(self) -> None:
        """Reset the service, whose workers have ended, to its state before they were started."""
        self.loop, self._end = Loop(self.group, self.num_workers, self.timeout_s), None

    def state_dict(self) -> dict[str, str]:
        """Return the state of the loop, as a dictionary with a single string.

        The iterating thread may call it at any time. The workers continue meanwhile; the items that they have
        prefetched are not in the state, and the resumed run produces them again.

        Raises:
            StateError: a stage of the pipeline has no position, and its epochs are not reproducible from seeds; or
                ``DataLoader2`` works on a copy of this service: use ``loader.reading_service``.
        """
        self._refuse_copied(StateError)
        return self.loop.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, seeds_too: bool = True, amend: bool = False) -> None:
        """Resume from a state with the loader's own pipeline. Call this before the first iteration.

        The seeds of that epoch and of later ones come from the state if the saved loader was seeded; otherwise,
        ``DataLoader2`` draws a new seed for each later epoch.

        Args:
            state: the return value of ``state_dict()`` of ``loader.reading_service``, ``DataLoader2``, `StatefulShards`
                or ``StatefulDataLoader``, or of `merge_states`.
            seeds_too: whether to seed the loader from a state saved between two epochs;
                ``DataLoader2.load_state_dict()`` does that itself.
            amend: whether the pipeline may change the run from here on, as for `StatefulShards`.

        Raises:
            StateError: the argument is none of these, or the loader has started; or ``DataLoader2`` works on a copy of
                this service: use ``loader.reading_service``. When the first epoch begins: the state belongs to another
                pipeline.
        """
        self._refuse_copied(StateError)
        if self._end is not None:
            raise StateError(
                "A state must be loaded before the first epoch begins. Create a new loader, and load the state into it"
            )
        self.loop.load(state, seeds_too=seeds_too, amend=amend)

    def finalize(self) -> None:
        """Terminate the workers, whatever their state, and notify the other ranks.

        This takes less than a second, or less than two if other ranks do not respond, and can be repeated.
        """
        if self.loop.ranks is not None:
            self.loop.ranks.leave(sys.exc_info()[1])  # DataLoader2 may call this while handling an error
        if self._end is not None:
            self._end()

    def report(self, *, all_ranks: bool = False) -> LoadingReport:
        """Return statistics of the workers so far. This is cheap and works after the end, too.

        Args:
            all_ranks: return one entry for each rank, with the sums of its workers. Ranks publish them every
                ``report_every_s`` seconds in the store of the process group, so this does not wait for them. It takes
                one request to the store per rank: call it on one rank only.

        Raises:
            RankLostError: the store does not respond.
            RuntimeError: the service does not know the other ranks of the run; or ``DataLoader2`` works on a copy of
                it: use ``loader.reading_service``.
        """
        self._refuse_copied(RuntimeError)
        return self.loop.report(all_ranks=all_ranks)

    def _refuse_copied(self, kind: type[Exception]) -> None:
        """Raise an error of some kind if a loader works on a copy of this service, which does not see what follows."""
        if self.is_copied:
            raise kind("DataLoader2 works on a copy of the service that is passed to it: use loader.reading_service")

    def _start_pool(self, jobs: Sequence[WorkerJob], dispatching: WorkerJob | None) -> RunningWorkers:
        """Start the worker processes."""
        from wds_datapipes.loading.workers.pool import WorkerPool  # only this class needs it

        return WorkerPool(jobs, start_method(self.multiprocessing_context), self.timeout_s, dispatching)

    def _warn_of_split(self, datapipe: Pipe) -> None:
        """Warn if several workers or ranks read the same data, or if some have none."""
        if not self._knows_ranks and (advice := advice_for_torchrun()):
            warn_user(advice)
        if self.worker_init_fn is None and self.worker_reset_fn is None:  # they may split the data
            ranks = self.group.rank.ranks
            workers = max(self.num_workers, 1)
            if advice := advice_for_split(datapipe, workers=workers, ranks=ranks, dispatches=True):
                warn_user(advice)
            log_idle_processes(datapipe, workers=workers, ranks=ranks)

    # States are exact without pausing the workers, and DataLoader2 itself counts items up to a limit.

    def _pause(self, *_: object) -> None:
        if self.num_workers == 0 and not self._has_limit:
            raise _no_workers_error("pause")
        self._is_paused = True

    def _resume(self, *_: object) -> None:
        if self.num_workers == 0 and not self._is_paused:
            raise _no_workers_error("resume")
        self._is_paused = False

    def _limit(self, num_batches: int | None, *_: object) -> None:
        self._has_limit = num_batches is not None


def _no_workers_error(verb: str) -> RuntimeError:
    """Return the error for what only worker processes do, as torchdata's service raises it."""
    return RuntimeError(
        f"There are no worker processes to {verb}: with num_workers=0, the pipeline runs only while the loop takes "
        "an item"
    )
