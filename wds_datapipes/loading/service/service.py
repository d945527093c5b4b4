"""`ShardReadingService`: a multi-process reading service with its own transport."""

from __future__ import annotations

import copy
import inspect
import math
import multiprocessing.util
import sys
import weakref
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NoReturn

from wds_datapipes.arguments import check_integer
from wds_datapipes.datapipes import IterDataPipe, traverse_dps
from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import STATE
from wds_datapipes.loading.data_parallel import DataParallelGroup, Distributed, check_replicated, fact_of_seed, facts_of
from wds_datapipes.loading.distributed import Ranks
from wds_datapipes.loading.epoch import EpochStart, is_drawn, refuse_hidden_stages, seed_of, seed_stages
from wds_datapipes.loading.report import LoadingReport
from wds_datapipes.loading.service.pinning import pin_memory_of
from wds_datapipes.loading.service.state_manager import StateManager
from wds_datapipes.loading.splitting import (
    advice_for_torchrun,
    given_identity,
    is_split_by_rank,
    ranks_of_run,
    split_by_rank,
)
from wds_datapipes.loading.torchdata_api import (
    CheckpointableReadingServiceInterface,
    MultiProcessingReadingService,
    WorkerInfo,
    list_dps,
)
from wds_datapipes.loading.torchdata_patches.local_functions import explain_worker_pickling
from wds_datapipes.loading.transport.protocol import Command
from wds_datapipes.loading.workers.in_process import DeliveredCount, LocalItems, users_part
from wds_datapipes.loading.workers.launch import run_in_process, start_method, start_pool
from wds_datapipes.loading.workers.pool import WorkerPool
from wds_datapipes.pipes.sharding import advice_for_split
from wds_datapipes.pipes.state.replay import ReplayedItems
from wds_datapipes.redaction import short_repr
from wds_datapipes.user_warnings import warn_user

Pipe = IterDataPipe[Any]


class ShardReadingService(MultiProcessingReadingService, CheckpointableReadingServiceInterface):  # type: ignore[misc]  # torchdata has no types
    """A reading service for ``DataLoader2`` that reads with worker processes.

    It replaces torchdata's ``MultiProcessingReadingService``, alone or after a ``DistributedReadingService`` in a
    ``SequentialReadingService``. The main process takes one item from each worker in turn, so the order depends only on
    the pipeline and the seed; exhausted workers are skipped. One ``DataLoader2.seed()`` makes a whole run
    reproducible, with a different order in each epoch. Workers send items without waiting for requests. Small items
    share messages, and large arrays and tensors use shared memory that needs no room in ``/dev/shm``: they arrive as
    views of it, which are safe to keep. It requires Linux, unless ``num_workers`` is 0.

    Args:
        num_workers: the number of worker processes; with 0, the pipeline runs in the main process.
        multiprocessing_context: the start method: ``"fork"`` (the default if available), ``"spawn"`` or
            ``"forkserver"``.
        worker_prefetch_cnt: the number of messages that a worker prefetches. A message is an item, or as many small
            items as are made in a millisecond and fit in 512 KiB. With 0, each message is one item, and a worker
            prefetches one item.
        main_prefetch_cnt: the number of further messages that all workers together prefetch. Whatever the counts, a
            worker pauses once it has prefetched 64 MiB, unless that is less than two messages.
        worker_init_fn: called in each worker with the pipeline and torchdata's ``WorkerInfo`` when it starts; it
            returns the pipeline.
        worker_reset_fn: called in each worker with the pipeline, the ``WorkerInfo`` and the worker's ``SeedGenerator``
            when an epoch begins; it returns the pipeline.
        pin_memory: copy tensors to page-locked memory in a thread of the main process, for training on a GPU.
        timeout_s: how long to wait for a worker or another rank before raising an error, in seconds. ``None`` means no
            limit for a live worker, and half an hour for a rank.
        distributed: assign each rank a share of the data, and give all ranks the same seed. By default, all ranks of
            the default process group, if there is one, unless the pipeline is split between them already; ``True``
            requires a process group. A ``ProcessGroup`` or a one-dimensional ``DeviceMesh``, such as
            ``mesh["dp"]``, is the data-parallel group of this rank: ranks with the same place in their group, such as
            those of tensor parallelism, read the same items. All ranks of the default process group synchronize at the
            beginning of an epoch, and only then; their numbers of items are not made equal. The pair
            ``(rank, world_size)`` needs no process group, and nothing is synchronized: seed the loaders of all ranks
            alike. ``False`` declares that the pipeline already reads only the share of this rank, or that this rank
            alone has the loader.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has an invalid value, or this process is not in the group that it passes.
        RuntimeError: when an epoch begins, the ranks differ in their workers, shards or groups; or they cannot agree on
            a seed, and the loader has none.
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
        worker_prefetch_cnt: int = 10,
        main_prefetch_cnt: int = 10,
        worker_init_fn: Callable[[Any, Any], Any] | None = None,
        worker_reset_fn: Callable[[Any, Any, Any], Any] | None = None,
        *,
        pin_memory: bool = False,
        timeout_s: float | None = None,
        distributed: Distributed = None,
    ) -> None:
        num_workers = check_integer("num_workers", num_workers, 0)
        methods = multiprocessing.get_all_start_methods()
        if multiprocessing_context not in (None, *methods):
            raise ValueError(f"multiprocessing_context must be one of {methods}, not {multiprocessing_context!r}")
        if timeout_s is not None and not (isinstance(timeout_s, Real) and 0 < timeout_s < math.inf):
            raise ValueError(f"timeout_s must be a positive number of seconds or None, not {timeout_s!r}")
        if not isinstance(pin_memory, bool):
            raise TypeError(f"pin_memory must be True or False, not {pin_memory!r}")
        for name, function in {"worker_init_fn": worker_init_fn, "worker_reset_fn": worker_reset_fn}.items():
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function or None, not {function!r}")
        # With 0 workers, torchdata's class would recommend another service.
        from wds_datapipes.loading.torchdata_patches.dataloader2 import extend  # it needs this class

        extend()
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
        self.group = DataParallelGroup.of(distributed)
        self._knows_ranks = distributed is not None
        self._mp = num_workers > 0
        self._ranks: Ranks | None
        self._agreement: Ranks | None
        self._pool: WorkerPool | None
        self._local: LocalItems | None
        self._end: Callable[[], object] | None
        self._replayed: ReplayedItems | None
        self._running: Pipe  # the part of the main process, with the stages that count its items
        self.reset()

    def __repr__(self) -> str:
        given = self.group.given
        split = (given.rank, given.ranks) if given is not None else self.group.is_split if self._knows_ranks else None
        shown = [f"num_workers={self.num_workers}"]
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = split if name == "distributed" else getattr(self, name, parameter.default)
            if name != "num_workers" and value != parameter.default:
                shown.append(f"{name}={getattr(value, '__qualname__', None) or short_repr(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def __call__(self, *_: object) -> NoReturn:
        """Raise: ``DataLoader2`` calls its second positional argument, which is not the reading service."""
        raise TypeError(
            f"pass the reading service by name: DataLoader2(pipe, reading_service={type(self).__name__}(...))"
        )

    def initialize(self, datapipe: Pipe) -> Pipe:
        """Start the workers, and return the part of the pipeline that runs in the main process.

        Raises:
            RankLostError: another rank does not arrive in time.
            ValueError: a random stage is stored where it cannot be seeded.
        """
        refuse_hidden_stages(datapipe)
        self.group = self._manager.group = self.group_of(datapipe)
        if self.group.is_synchronized:
            self._ranks = Ranks(datapipe, self.group, self.timeout_s)
        try:
            with explain_worker_pickling(self, datapipe, start_method(self)):
                datapipe = self._running = self._split_datapipe(datapipe)
            self._end_datapipe = users_part(datapipe)
        except BaseException:
            _end(self._pool, self._ranks)
            raise
        # This also runs when the object is garbage-collected, and at interpreter exit.
        self._end = weakref.finalize(self, _end, self._pool, self._ranks)
        # A multiprocessing child, such as a forked rank, waits for its own children when it exits.
        multiprocessing.util.Finalize(self, self._end, exitpriority=0)
        return datapipe

    def initialize_iteration(
        self, seed_generator: Any, iter_reset_fn: Callable[[Pipe], Pipe] | None = None
    ) -> Callable[[Pipe], Pipe] | None:
        """Begin an epoch, in all workers and on all ranks.

        Args:
            seed_generator: the seed generator of the loader.
            iter_reset_fn: the reset function of a preceding reading service.

        Raises:
            RankLostError: another rank has failed or left, or does not arrive in time.
            RuntimeError: the ranks have different seeds, or none.
        """
        is_given = self._manager.resumed_from is None and not is_drawn(seed_generator)
        if self._agreement is not None and self._epoch == 0 and is_given:
            self._agreement.compare(fact_of_seed(seed_of(seed_generator)))
        resumed_from = self._manager.begin(seed_generator, self._ranks)
        self._epoch += 1
        # Without workers, all seeds are drawn here: from a copy, so that the next epoch does not depend on their
        # number.
        if self._pool is not None:
            seed_stages(self._running, seed_generator)
            payloads = [(seed_generator.spawn(number), iter_reset_fn) for number in range(self.num_workers)]
            resumed, turn = (None, 0) if resumed_from is None else (resumed_from.parts, resumed_from.turn)
            self._pool.begin(self._epoch, payloads, payloads[0], resumed=resumed, turn=turn)
        elif self._local is not None:
            start = EpochStart(
                copy.deepcopy(seed_generator),
                None if resumed_from is None else resumed_from.parts[0],
                self._manager.replay_reason_of_workers,
                iter_reset_fn=iter_reset_fn,
                worker_reset_fn=self.worker_reset_fn,
                info=WorkerInfo(1, 0),
            )
            self._local.begin(start, self._running)
            self._end_datapipe = users_part(self._running)
        if self._replayed is not None:
            self._replayed.begin(None if resumed_from is None else resumed_from.replay)
        self._manager.seeds.end(seed_generator)
        return None

    def set_epoch(self, epoch: int) -> None:
        """Select the number of the next epoch, which determines its order together with the seed of the loader.

        Args:
            epoch: the number. Without a selection, each epoch's order follows from that of the previous epoch.
        """
        self._manager.seeds.wanted = check_integer("epoch", epoch, 0)

    def group_of(self, datapipe: Pipe) -> DataParallelGroup:
        """Return the ranks that share the data: by default, all, unless the pipeline is split between them already."""
        if self._knows_ranks or ranks_of_run() == 1 or is_split_by_rank(datapipe):
            return self.group
        return DataParallelGroup.of(True)

    def describe(self, datapipe: Pipe) -> None:
        """Record the pipeline, for states that are saved before the first epoch begins."""
        self.group = self._manager.group = self.group_of(datapipe)
        self._manager.describe(datapipe)

    def expect(self, seed: int | None) -> None:
        """Record the seed that was set on the loader since the previous epoch began, or ``None``, for such states."""
        self._manager.expect(seed)

    @property
    def is_resumed(self) -> bool:
        """Whether the current epoch was resumed mid-epoch from a state."""
        return self._manager.is_resumed

    def reset(self) -> None:
        """Reset the service, whose workers have ended, to its state before it started them."""
        self._manager = StateManager(self.group, self.num_workers)
        self._ranks, self._agreement = None, None
        self._pool, self._local, self._end, self._replayed = None, None, None, None
        self._epoch = 0

    def checkpoint(self) -> bytes:
        """Return the state of the loop, as JSON; ``DataLoader2.state_dict()`` calls this.

        The thread that iterates may call it at any time. The workers continue meanwhile; items that they have
        prefetched are not in the state, and the resumed run makes them again.

        Raises:
            StateError: a stage of the pipeline has no position, and its epochs are not reproducible from seeds.
        """
        return self._manager.dumps((self._pool or self._local) if self._epoch else None, self._ranks, self._replayed)

    def restore(self, datapipe: Pipe, serialized_state: bytes) -> Pipe:
        """Start the workers and resume from a state; ``DataLoader2`` calls this after ``load_state_dict()``.

        Args:
            datapipe: the pipeline.
            serialized_state: the return value of `checkpoint`.

        Raises:
            StateError: the state belongs to another pipeline; or it is from a different number of ranks or workers, and
                either does not cover all ranks, or the pipeline cannot be resharded.
            RankLostError: another rank does not arrive in time.
        """
        self._manager.load(serialized_state)
        return self.initialize(datapipe)

    def state_dict(self) -> dict[str, str]:
        """Return the state of the loop, as a dictionary with one text: the return value of `checkpoint`.

        ``DataLoader2`` works on a copy of the service that is passed to it: use ``loader.reading_service``.

        Raises:
            StateError: a stage of the pipeline has no position, and its epochs are not reproducible from seeds.
        """
        return {STATE: self.checkpoint().decode()}

    def load_state_dict(self, state: Mapping[str, Any], *, seeds_too: bool = True) -> None:
        """Resume from a state with the loader's own pipeline. Call this before the first iteration.

        The seeds of that epoch and of later ones come from the state, if the loader was seeded; otherwise
        ``DataLoader2`` draws a new seed for each later epoch.

        Args:
            state: the return value of ``state_dict()`` of ``loader.reading_service``, ``DataLoader2``, `StatefulShards`
                or ``StatefulDataLoader``, or of `merge_states`.
            seeds_too: whether to seed the loader from a state saved between two epochs;
                ``DataLoader2.load_state_dict()`` does that itself.

        Raises:
            StateError: it is none of these, or the loader has started. When the first epoch begins: it belongs to
                another pipeline.
        """
        if self._end is not None:
            raise StateError(
                "A state must be loaded before the first epoch begins. Create another loader, and load the state into "
                "it"
            )
        self._manager.load(state, seeds_too=seeds_too)

    def finalize(self) -> None:
        """End the workers, whatever their state, and notify the other ranks.

        It takes less than a second, or two if other ranks do not respond, and can be called repeatedly.
        """
        if self._ranks is not None:
            self._ranks.leave(sys.exc_info()[1])  # DataLoader2 may call this while handling an error
        if self._end is not None:
            self._end()

    def report(self) -> LoadingReport:
        """Return statistics of the workers so far. This is cheap, and works after the end, too.

        ``DataLoader2`` works on a copy of the service that is passed to it: use ``loader.reading_service``.
        """
        if self._pool is not None:
            return self._pool.report(self._epoch)
        return LoadingReport(self._epoch, [] if self._local is None else [self._local.report()])

    def _split_datapipe(self, datapipe: Pipe) -> Pipe:
        """Split the pipeline between ranks and workers; return the part for the main process."""
        self._warn_of_repeated_data(datapipe)
        self._manager.describe(datapipe)
        check_replicated(datapipe, self.group)
        identity = self.group.identity if self.group.is_split else given_identity(datapipe)
        self._manager.given_rank = identity.rank if identity.ranks > 1 and not self.group.is_split else None
        if self._ranks is not None:
            self._manager.compare(self._ranks, datapipe)
        elif self.group.is_split or identity.ranks > 1:
            agreement = Ranks(datapipe)
            agreement.compare(facts_of(datapipe, self.group, workers=self.num_workers))
            self._agreement = agreement if self.group.is_split else None  # else torchdata's service shares the seed
        self._manager.find(datapipe, self._ranks)
        if self.group.is_split:
            datapipe = split_by_rank(datapipe, identity)
        items: Pipe
        if self.num_workers:
            datapipe, self._pool, items = start_pool(self, datapipe, self._manager, identity)
        else:
            datapipe, self._local = run_in_process(self, datapipe, self._manager, identity)
            items = self._local
        datapipe = pin_memory_of(datapipe) if self.pin_memory else datapipe
        if self._manager.replay_reason:
            self._replayed = ReplayedItems(datapipe, self._manager.replay_reason)
            return self._replayed
        if datapipe is items or self._manager.refusal:
            return datapipe
        supplier = self._pool or self._local
        return datapipe if supplier is None else DeliveredCount(datapipe, supplier)

    def _warn_of_repeated_data(self, datapipe: Pipe) -> None:
        """Warn if several workers or ranks read the same data."""
        if not self._knows_ranks and (advice := advice_for_torchrun()):
            warn_user(advice)
        if self.worker_init_fn is None and self.worker_reset_fn is None:  # they may split the data
            ranks = self.group.identity.ranks
            if advice := advice_for_split(datapipe, workers=max(self.num_workers, 1), ranks=ranks):
                warn_user(advice)

    def _pause(self, pause_fn: Callable[[Pipe], Pipe] | None = None) -> None:
        for stage in list_dps(traverse_dps(self._end_datapipe)):
            if callable(pause := getattr(stage, "pause", None)):
                pause()
        if self._pool is not None:
            self._pool.run_command(Command.PAUSE, [pause_fn] * self.num_workers, pause_fn)

    def _resume(self, resume_fn: Callable[[Pipe], Pipe] | None = None) -> None:
        if self._pool is not None:
            self._pool.run_command(Command.RESUME, [resume_fn] * self.num_workers, resume_fn)
        for stage in reversed(list_dps(traverse_dps(self._end_datapipe))):
            if callable(resume := getattr(stage, "resume", None)):
                resume()

    def _limit(self, num_batches: int | None, limit_fn: Callable[[Pipe, int | None], Pipe] | None = None) -> None:
        if limit_fn is None:
            return
        if self._pool is not None:
            if not self._pool.dispatches:
                num_batches = None  # as in torchdata: only dispatched items are limited in another process
            payloads = [(limit_fn, _share(num_batches, number, self.num_workers)) for number in range(self.num_workers)]
            self._pool.run_command(Command.LIMIT, payloads, (limit_fn, num_batches))
        limit_fn(self._end_datapipe, num_batches)


def _share(count: int | None, number: int, workers: int) -> int | None:
    """Return the number of items, out of ``count``, that a worker must make."""
    return None if count is None else count // workers + (number < count % workers)


def _end(pool: WorkerPool | None, ranks: Ranks | None) -> None:
    try:
        if ranks is not None:
            # An uncaught exception ends the interpreter, which stores it until then.
            ranks.leave(sys.exc_info()[1] or getattr(sys, "last_value", None))
    finally:
        if pool is not None:
            pool.close()
