"""`ShardReadingService`: a multi-process reading service with its own transport."""

from __future__ import annotations

import math
import multiprocessing.util
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

from wds_datapipes.arguments import check_integer, checks_calls
from wds_datapipes.errors import StateError
from wds_datapipes.loading.distributed import Ranks
from wds_datapipes.loading.epoch import is_drawn, refuse_hidden_stages, seed_of
from wds_datapipes.loading.report import LoadingReport
from wds_datapipes.loading.service.launch import run_in_process, start_method, start_workers
from wds_datapipes.loading.service.periodic_reports import PeriodicReports, share_report
from wds_datapipes.loading.service.pinning import pin_memory_of
from wds_datapipes.loading.service.state_manager import StateManager
from wds_datapipes.loading.splitting import (
    DataParallelGroup,
    Distributed,
    advice_for_torchrun,
    check_replicated,
    fact_of_seed,
    facts_of,
    given_rank,
    is_split_by_rank,
    ranks_of_run,
    split_by_rank,
)
from wds_datapipes.loading.torchdata_api import MultiProcessingReadingService
from wds_datapipes.loading.torchdata_patches.local_functions import explain_worker_pickling
from wds_datapipes.loading.transport.flow_control import MAIN_PREFETCH, WORKER_PREFETCH
from wds_datapipes.loading.workers.loop_items import DeliveredCount, LoopItems, Pipe, users_part
from wds_datapipes.pipes.sharding import advice_for_split, check_batch_sizes
from wds_datapipes.pipes.state.replay import ReplayedItems
from wds_datapipes.user_warnings import warn_user


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
        methods = multiprocessing.get_all_start_methods()
        if multiprocessing_context not in (None, *methods):
            raise ValueError(f"multiprocessing_context must be one of {methods}, not {multiprocessing_context!r}")
        for name, seconds, none in (("timeout_s", timeout_s, " or None"), ("report_every_s", report_every_s, "")):
            if (seconds is not None or not none) and not (isinstance(seconds, Real) and 0 < seconds < math.inf):
                raise ValueError(f"{name} must be a positive number of seconds{none}, not {seconds!r}")
        if not isinstance(pin_memory, bool):
            raise TypeError(f"pin_memory must be True or False, not {pin_memory!r}")
        functions = {"worker_init_fn": worker_init_fn, "worker_reset_fn": worker_reset_fn, "on_report": on_report}
        for name, function in functions.items():
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function or None, not {function!r}")
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
        self._ranks: Ranks | None
        self._agreement: Ranks | None
        self._items: LoopItems | None
        self._end: Callable[[], object] | None
        self._replayed: ReplayedItems | None
        self._reports: PeriodicReports | None
        self._running: Pipe  # the part of the main process, with the stages that count its items
        self.reset()

    def initialize(self, datapipe: Pipe) -> Pipe:
        """Start the workers, and return the part of the pipeline that runs in the main process.

        Raises:
            RankLostError: another rank does not arrive in time.
            ValueError: a stage that draws or splits is stored where loaders do not find it.
        """
        refuse_hidden_stages(datapipe)
        self.group = self.manager.group = self.group_of(datapipe)
        if self.group.is_synchronized:
            self._ranks = Ranks(datapipe, self.group, self.timeout_s)
        try:
            with explain_worker_pickling(start_method(self)):
                datapipe = self._running = self._split_datapipe(datapipe)
            self._end_datapipe = users_part(datapipe)
            several = self._ranks if self._ranks is not None and self._ranks.size > 1 else None
            if self._items is not None and (self.on_report is not None or several is not None):
                self._reports = PeriodicReports(self._items, several, weakref.ref(self), self.report_every_s)
        except BaseException:
            _end(self._items, self._ranks, self._reports)
            raise
        # The finalizer also runs when this object is garbage-collected, and at interpreter exit.
        self._end = weakref.finalize(self, _end, self._items, self._ranks, self._reports)
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
        if self._items is None:
            raise RuntimeError("a ShardReadingService must be initialized before its first epoch")
        is_seeded = not is_drawn(seed_generator)
        if self._agreement is not None and not self._items.epoch and self.manager.resumed_from is None and is_seeded:
            self._agreement.compare(fact_of_seed(seed_of(seed_generator)))
        is_known = is_seeded or self.manager.resumed_from is not None
        left = self.manager.left(self._items, self._ranks, self._replayed)
        resumed_from = self.manager.begin(seed_generator, self._ranks, left)
        self._items.place = self.manager.seeds.place(is_seeded=is_seeded) if is_known else None
        self._items.begin(seed_generator, resumed_from, iter_reset_fn, self._running)
        self._end_datapipe = users_part(self._running)
        if self._replayed is not None:
            self._replayed.begin(None if resumed_from is None else resumed_from.replay)
        self.manager.seeds.end(seed_generator)

    def set_epoch(self, epoch: int) -> None:
        """Select the number of the next epoch, which determines its order together with the seed of the loader.

        Args:
            epoch: the number. If none is selected, each epoch's order follows from that of the previous epoch.
        """
        self.manager.seeds.wanted = check_integer("epoch", epoch, 0)

    def group_of(self, datapipe: Pipe) -> DataParallelGroup:
        """Return the ranks that share the data: by default, all, unless the pipeline is already split between them."""
        if self._knows_ranks or ranks_of_run() == 1 or is_split_by_rank(datapipe):
            return self.group
        return DataParallelGroup.of(True)

    def describe(self, datapipe: Pipe) -> None:
        """Record the pipeline, for states that are saved before the first epoch begins."""
        self.group = self.manager.group = self.group_of(datapipe)
        self.manager.describe(datapipe)

    def reset(self) -> None:
        """Reset the service, whose workers have ended, to its state before they were started."""
        self.manager = StateManager(self.group, self.num_workers)
        self._ranks, self._agreement = None, None
        self._items, self._end, self._replayed, self._reports = None, None, None, None

    def state_dict(self) -> dict[str, str]:
        """Return the state of the loop, as a dictionary with a single string.

        The iterating thread may call it at any time. The workers continue meanwhile; the items that they have
        prefetched are not in the state, and the resumed run produces them again. ``DataLoader2`` works on a copy of the
        service that is passed to it: use ``loader.reading_service``.

        Raises:
            StateError: a stage of the pipeline has no position, and its epochs are not reproducible from seeds.
        """
        items = self._items
        return self.manager.state_dict(
            items if items is not None and items.epoch else None, self._ranks, self._replayed
        )

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
            StateError: the argument is none of these, or the loader has started. When the first epoch begins: the state
                belongs to another pipeline.
        """
        if self._end is not None:
            raise StateError(
                "A state must be loaded before the first epoch begins. Create a new loader, and load the state into it"
            )
        self.manager.load(state, seeds_too=seeds_too, amend=amend)

    def finalize(self) -> None:
        """Terminate the workers, whatever their state, and notify the other ranks.

        This takes less than a second, or less than two if other ranks do not respond, and can be repeated.
        """
        if self._ranks is not None:
            self._ranks.leave(sys.exc_info()[1])  # DataLoader2 may call this while handling an error
        if self._end is not None:
            self._end()

    def report(self, *, all_ranks: bool = False) -> LoadingReport:
        """Return statistics of the workers so far. This is cheap and works after the end, too.

        ``DataLoader2`` works on a copy of the service that is passed to it: use ``loader.reading_service``.

        Args:
            all_ranks: return one entry for each rank, with the sums of its workers. Ranks publish them every
                ``report_every_s`` seconds in the store of the process group, so this does not wait for them. It takes
                one request to the store per rank: call it on one rank only.

        Raises:
            RankLostError: the store does not respond.
            RuntimeError: the service does not know the other ranks of the run.
        """
        report = LoadingReport(0, []) if self._items is None else self._items.report()
        if not (all_ranks and report.workers):
            return report
        if self._ranks is not None:
            return share_report(report, self._ranks, reads=True)
        if ranks_of_run() > 1:
            raise RuntimeError("report(all_ranks=True) requires ShardReadingService(distributed=True), or a group")
        return replace(report, workers=[report.total], dispatcher=None)

    def _split_datapipe(self, datapipe: Pipe) -> Pipe:
        """Split the pipeline between ranks and workers; return the part for the main process."""
        self._warn_of_repeated_data(datapipe)
        self.manager.describe(datapipe)
        check_replicated(datapipe, self.group)
        rank = self.group.rank if self.group.is_split else given_rank(datapipe)
        check_batch_sizes(datapipe, rank.ranks, 1)
        self.manager.given_rank = rank.rank if rank.ranks > 1 and not self.group.is_split else None
        if self._ranks is not None:
            self.manager.compare(self._ranks, datapipe)
        elif self.group.is_split or rank.ranks > 1:
            agreement = Ranks(datapipe)
            agreement.compare(facts_of(datapipe, self.group, workers=self.num_workers))
            self._agreement = agreement if self.group.is_split else None  # else torchdata's service shares the seed
        self.manager.find(datapipe, self._ranks)
        if self.group.is_split:
            datapipe = split_by_rank(datapipe, rank)
        start = start_workers if self.num_workers else run_in_process
        datapipe, self._items = start(self, datapipe, rank)
        self._items.rank = rank.rank if self._ranks is None else self._ranks.rank
        datapipe = pin_memory_of(datapipe) if self.pin_memory else datapipe
        if self.manager.replay_reason:
            self._replayed = ReplayedItems(datapipe, self.manager.replay_reason)
            return self._replayed
        if datapipe is self._items or self.manager.refusal:
            return datapipe
        return DeliveredCount(datapipe, self._items)

    def _warn_of_repeated_data(self, datapipe: Pipe) -> None:
        """Warn if several workers or ranks read the same data."""
        if not self._knows_ranks and (advice := advice_for_torchrun()):
            warn_user(advice)
        if self.worker_init_fn is None and self.worker_reset_fn is None:  # they may split the data
            ranks = self.group.rank.ranks
            workers = max(self.num_workers, 1)
            if advice := advice_for_split(datapipe, workers=workers, ranks=ranks, dispatches=True):
                warn_user(advice)

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


class MultiProcessingService(ShardReadingService):
    """Replaces torchdata's ``MultiProcessingReadingService``, with the same arguments and defaults.

    Each rank reads all of the data, unless a ``DistributedReadingService`` comes first.
    """

    multiprocessing_context: str | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, distributed=False)
        # The default of torchdata is the start method of the program.
        self.multiprocessing_context = self.multiprocessing_context or multiprocessing.get_start_method(allow_none=True)


def _end(items: LoopItems | None, ranks: Ranks | None, reports: PeriodicReports | None) -> None:
    if reports is not None:
        reports.close()
    try:
        if ranks is not None:
            # The interpreter stores an uncaught exception until it ends.
            ranks.leave(sys.exc_info()[1] or getattr(sys, "last_value", None))
    finally:
        if items is not None:
            items.close()
