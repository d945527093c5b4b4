"""`ShardReadingService`: a multi-process reading service with a transport of its own."""

from __future__ import annotations

import copy
import math
import multiprocessing.util
import operator
import sys
import weakref
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from torch.utils.data import IterDataPipe
from torchdata.dataloader2 import MultiProcessingReadingService
from torchdata.dataloader2.graph import list_dps, traverse_dps
from torchdata.dataloader2.reading_service import CheckpointableReadingServiceInterface

from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.loader_states import STATE
from wds_datapipes.loading.distributed import Ranks
from wds_datapipes.loading.rank_agreement import RankAgreement, facts_of
from wds_datapipes.loading.report import LoadingReport
from wds_datapipes.loading.seeding import guard_lists, seed_of, seed_stages
from wds_datapipes.loading.service.delivery import DeliveredCount
from wds_datapipes.loading.service.pinning import pin_memory_of
from wds_datapipes.loading.service.split_checks import advice_for_ranks, advice_for_split, place_given
from wds_datapipes.loading.service.state_manager import StateManager
from wds_datapipes.loading.transport.protocol import Command
from wds_datapipes.loading.workers.in_process import LocalItems
from wds_datapipes.loading.workers.launch import LaunchPlan
from wds_datapipes.loading.workers.pool import WorkerPool
from wds_datapipes.pipes.state.replay import ReplayedItems
from wds_datapipes.pipes.state.shard_order import remove_listings
from wds_datapipes.user_warnings import warn_user

__all__ = ["ShardReadingService"]

Pipe = IterDataPipe[Any]


class ShardReadingService(MultiProcessingReadingService, CheckpointableReadingServiceInterface):  # type: ignore[misc]  # torchdata has no types
    """Reads with worker processes, for ``DataLoader2``.

    It takes the place of torchdata's ``MultiProcessingReadingService``, alone or behind a ``DistributedReadingService``
    in a ``SequentialReadingService``. The main process takes one item from each worker in turn, so the order follows
    from the pipeline and the seed; a worker that has no more leaves the round. One ``DataLoader2.seed()`` makes a run
    reproducible, with another order in each epoch. Workers send what they make without being asked, small items several
    at a time, and large arrays and tensors through shared memory that needs no room in ``/dev/shm``: they arrive as
    views of it, which are safe to keep. It needs Linux, unless ``num_workers`` is 0.

    Args:
        num_workers: how many worker processes there are; with 0, the pipeline runs in the main process.
        multiprocessing_context: how they are started: ``"fork"`` (the default where there is one), ``"spawn"`` or
            ``"forkserver"``.
        worker_prefetch_cnt: how many messages a worker makes ahead. A message is an item, or as many small ones as are
            made in a millisecond or fit in 64 KiB. With 0, each is one item, and a worker makes one item ahead.
        main_prefetch_cnt: how many messages more all workers together make ahead. Whatever the counts, a worker stops
            once it has made 64 MiB ahead, unless that is less than two messages.
        worker_init_fn: called in each worker with the pipeline and torchdata's ``WorkerInfo`` when it starts; it
            returns the pipeline.
        worker_reset_fn: called in each worker with the pipeline, the ``WorkerInfo`` and the worker's ``SeedGenerator``
            when an epoch begins; it returns the pipeline.
        pin_memory: copy tensors to page-locked memory in a thread of the main process, as training on a GPU wants.
        timeout_s: how long to wait for a worker, or for another rank, before it is an error, in seconds. None is for
            ever for a worker that lives, and half an hour for a rank.
        distributed: give each rank of ``torch.distributed`` a part of the data, and all of them one seed. Ranks wait
            for each other at the beginning of an epoch only; nothing makes their numbers of items equal. False says
            that the pipeline reads what this rank has to read alone; by default that is assumed, with a warning where
            there are several ranks.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: an argument makes no sense.
        WorkerDiedError: while iterating, a worker process has ended.
        WorkerTimeoutError: while iterating, a worker has sent nothing for ``timeout_s``.
        RankLostError: when an epoch begins, another rank has failed or left, or does not come within ``timeout_s``.

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
        distributed: bool | None = None,
    ) -> None:
        # DataLoader2 needs it later, when no more files may be opened.
        from wds_datapipes.loading.service import loader  # noqa: F401

        num_workers = _count("num_workers", num_workers)
        methods = multiprocessing.get_all_start_methods()
        if multiprocessing_context not in (None, *methods):
            raise ValueError(f"multiprocessing_context is one of {methods}, not {multiprocessing_context!r}")
        if timeout_s is not None and not (isinstance(timeout_s, Real) and 0 < timeout_s < math.inf):
            raise ValueError(f"timeout_s is a number of seconds above 0, or None, not {timeout_s!r}")
        if not isinstance(pin_memory, bool):
            raise TypeError(f"pin_memory is True or False, not {pin_memory!r}")
        if distributed is not None and not isinstance(distributed, bool):
            raise TypeError(f"distributed is True, False or None, not {distributed!r}")
        for name, function in {"worker_init_fn": worker_init_fn, "worker_reset_fn": worker_reset_fn}.items():
            if function is not None and not callable(function):
                raise TypeError(f"{name} is a function or None, not {function!r}")
        # With 0 workers, torchdata's class would advise another service.
        super().__init__(
            max(num_workers, 1),
            multiprocessing_context,
            _count("worker_prefetch_cnt", worker_prefetch_cnt),
            _count("main_prefetch_cnt", main_prefetch_cnt),
            worker_init_fn,
            worker_reset_fn,
        )
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.timeout_s = timeout_s
        self.distributed = distributed is True
        self._knows_ranks = distributed is not None
        self._mp = num_workers > 0
        self._ranks: Ranks | None
        self._crew: WorkerPool | None
        self._local: LocalItems | None
        self._end: Callable[[], object] | None
        self._replayed: ReplayedItems | None
        self.begin_again()

    def initialize(self, datapipe: Pipe) -> Pipe:
        """Start the workers, and return what is left of the pipeline for the main process.

        Raises:
            RankLostError: another rank does not come in time.
        """
        if self.distributed:
            self._ranks = Ranks(self.timeout_s)
        try:
            datapipe = self._end_datapipe = self._share_out(datapipe)
        except BaseException:
            _end(self._crew, self._ranks)
            raise
        # Also when this object is forgotten, and at the end of the interpreter.
        self._end = weakref.finalize(self, _end, self._crew, self._ranks)
        # A process of multiprocessing, such as a rank that was forked, waits for its own when it ends.
        multiprocessing.util.Finalize(self, self._end, exitpriority=0)
        return datapipe

    def initialize_iteration(
        self, seed_generator: Any, iter_reset_fn: Callable[[Pipe], Pipe] | None = None
    ) -> Callable[[Pipe], Pipe] | None:
        """Begin an epoch, in all workers and on all ranks.

        Args:
            seed_generator: that of the loader.
            iter_reset_fn: that of a reading service before this one.

        Raises:
            RankLostError: another rank will not come, or does not come in time.
        """
        going_on = self._keeper.begin(seed_generator, self._ranks)
        self._epoch += 1
        # Without workers, all seeds are drawn here: from a copy, so that the next epoch does not depend on how many.
        here = seed_generator if self._crew is not None else copy.deepcopy(seed_generator)
        seed = seed_of(here)
        if self._local is not None:
            remove_listings(self._local.source)
        seed_stages(self._end_datapipe, here)
        if self._crew is not None:
            numbers = range(self.num_workers)
            payloads = [(seed_generator.spawn(number), iter_reset_fn) for number in numbers]
            resumed, turn = (None, 0) if going_on is None else (going_on.parts, going_on.turn)
            self._crew.begin(self._epoch, payloads, payloads[0], resumed=resumed, turn=turn)
        elif self._local is not None:
            self._local.reset_with(iter_reset_fn, self.worker_reset_fn, here)
            guard_lists(self._local.source, seed)
            if going_on is not None:
                self._local.go_on_from(going_on.parts[0])
        if self._replayed is not None:
            self._replayed.begin(None if going_on is None else going_on.replay)
        self._keeper.seeds.end(seed_generator)
        return None

    def set_epoch(self, epoch: int) -> None:
        """Have the order of the next epoch follow from its number and the seed of the loader, as some trainers want it.

        Args:
            epoch: the number. Without it, the order of an epoch follows from that of the epoch before.
        """
        self._keeper.seeds.set_epoch(_count("epoch", epoch))

    def know(self, datapipe: Pipe) -> None:
        """Take note of the pipeline before the first epoch begins, for the states that are saved until then."""
        self._keeper.describe(datapipe)

    def expect(self, seed: int | None, *, is_shared: bool) -> None:
        """Take note of the seed of the next epoch, for the states that are saved before it begins.

        Args:
            seed: what the loader was given since the last epoch began; None if there is nothing.
            is_shared: whether a reading service before this one draws the seed that all ranks share from it.
        """
        self._keeper.expect(seed, is_shared=is_shared)

    @property
    def is_resumed(self) -> bool:
        """Whether the present epoch was begun in its middle, from a state."""
        return self._keeper.is_resumed

    def begin_again(self) -> None:
        """Put the service, which has ended its workers, back to where it was before it started them."""
        self._keeper = StateManager(self.distributed, self.num_workers)
        self._ranks, self._crew, self._local, self._end, self._replayed = None, None, None, None, None
        self._epoch = 0

    def checkpoint(self) -> bytes:
        """Return where the loop is, as JSON; ``DataLoader2.state_dict()`` calls this.

        It can be called at any time by the thread that iterates. The workers go on meanwhile. What they have made
        ahead is not in it, and is made again by whoever goes on from it.

        Raises:
            StateError: a stage of the pipeline has no position, and an epoch does not follow from its seeds.
        """
        return self._keeper.dumps((self._crew or self._local) if self._epoch else None, self._ranks, self._replayed)

    def restore(self, datapipe: Pipe, serialized_state: bytes) -> Pipe:
        """Start the workers, to go on where a state was saved; ``DataLoader2`` calls this after ``load_state_dict()``.

        Args:
            datapipe: the pipeline.
            serialized_state: what `checkpoint` has returned.

        Raises:
            StateError: the state is not one of this pipeline. Or it is of another number of ranks or workers, and not
                that of all ranks, or the pipeline cannot be dealt anew.
            RankLostError: another rank does not come in time.
        """
        self._keeper.load(serialized_state)
        return self.initialize(datapipe)

    def state_dict(self) -> dict[str, str]:
        """Return where the loop is, as a dictionary of one text: what `checkpoint` returns.

        ``DataLoader2`` works with a copy of the service that it is given: ask ``loader.reading_service``.

        Raises:
            StateError: a stage of the pipeline has no position, and an epoch does not follow from its seeds.
        """
        return {STATE: self.checkpoint().decode()}

    def load_state_dict(self, state: Mapping[str, Any], *, seeds_too: bool = True) -> None:
        """Go on from a state with the pipeline that the loader has, before it is iterated for the first time.

        The seeds of that epoch and of those after it come from the state, if the loader was seeded; otherwise
        ``DataLoader2`` draws another seed for each epoch after it.

        Args:
            state: what ``state_dict()`` of ``loader.reading_service``, ``DataLoader2``, `StatefulShards` or
                ``StatefulDataLoader`` has returned; or `merge_states`.
            seeds_too: whether to seed the loader from the state between two epochs; ``DataLoader2.load_state_dict()``
                does that itself.

        Raises:
            StateError: it is none of these, or the loader has begun. When the first epoch begins: it is not one of this
                pipeline.
        """
        if self._end is not None:
            raise StateError("A state is loaded before the first epoch begins. Make another loader for it")
        self._keeper.load(state, seeds_too=seeds_too)

    def finalize(self) -> None:
        """End the workers, whatever they are at, and tell the other ranks.

        It takes less than a second, or two where other ranks do not answer, and can be repeated.
        """
        if self._ranks is not None:
            self._ranks.leave(sys.exc_info()[1])  # DataLoader2 comes here with an error in hand
        if self._end is not None:
            self._end()

    def report(self) -> LoadingReport:
        """Return what the workers have done so far; it costs next to nothing, and works after the end, too.

        ``DataLoader2`` works with a copy of the service that it is given: ask ``loader.reading_service``.
        """
        if self._crew is not None:
            return self._crew.report(self._epoch)
        return LoadingReport(self._epoch, [] if self._local is None else [self._local.report()])

    def _share_out(self, datapipe: Pipe) -> Pipe:
        """Give the pipeline to the ranks and to the workers; return what is left for the main process."""
        self._warn_of_repeated_data(datapipe)
        self._keeper.describe(datapipe)
        place = place_given(datapipe) if self._ranks is None else self._ranks.place
        if self._ranks is not None:
            self._keeper.compare(self._ranks, datapipe)
        elif place.ranks > 1:
            RankAgreement(datapipe, place).compare(facts_of(datapipe, self.num_workers))
        self._keeper.find(datapipe, self._ranks)
        if self._ranks is not None:
            datapipe = self._ranks.split(datapipe)
        hiring = LaunchPlan(
            self.num_workers,
            self.multiprocessing_context,
            self.worker_prefetch_cnt,
            self.main_prefetch_cnt,
            self.timeout_s,
            self.worker_init_fn,
            self.worker_reset_fn,
            place,
        )
        items: Pipe
        if self.num_workers:
            datapipe, self._crew, items = hiring.crew(datapipe, self._keeper)
        else:
            datapipe, self._local = hiring.nobody(datapipe, self._keeper)
            items = self._local
        datapipe = pin_memory_of(datapipe) if self.pin_memory else datapipe
        if self._keeper.replay_reason:
            self._replayed = ReplayedItems(datapipe, self._keeper.replay_reason)
            return self._replayed
        if datapipe is items or self._keeper.refusal:
            return datapipe
        supplier = self._crew or self._local
        return datapipe if supplier is None else DeliveredCount(datapipe, supplier)

    def _warn_of_repeated_data(self, datapipe: Pipe) -> None:
        """Warn where several workers or ranks read the same."""
        if not self._knows_ranks and (advice := advice_for_ranks(datapipe)):
            warn_user(advice)
        if self.worker_init_fn is None and self.worker_reset_fn is None:  # they may split the data
            ranks = 1 if self._ranks is None else self._ranks.size
            if advice := advice_for_split(datapipe, workers=max(self.num_workers, 1), ranks=ranks):
                warn_user(advice)

    def _pause(self, pause_fn: Callable[[Pipe], Pipe] | None = None) -> None:
        for stage in list_dps(traverse_dps(self._end_datapipe)):
            if callable(pause := getattr(stage, "pause", None)):
                pause()
        if self._crew is not None:
            self._crew.tell(Command.PAUSE, [pause_fn] * self.num_workers, pause_fn)

    def _resume(self, resume_fn: Callable[[Pipe], Pipe] | None = None) -> None:
        if self._crew is not None:
            self._crew.tell(Command.RESUME, [resume_fn] * self.num_workers, resume_fn)
        for stage in reversed(list_dps(traverse_dps(self._end_datapipe))):
            if callable(resume := getattr(stage, "resume", None)):
                resume()

    def _limit(self, num_batches: int | None, limit_fn: Callable[[Pipe, int | None], Pipe] | None = None) -> None:
        if limit_fn is None:
            return
        if self._crew is not None:
            if not self._crew.dispatches:
                num_batches = None  # as torchdata has it: only what is dispatched is limited in another process
            payloads = [(limit_fn, _share(num_batches, number, self.num_workers)) for number in range(self.num_workers)]
            self._crew.tell(Command.LIMIT, payloads, (limit_fn, num_batches))
        limit_fn(self._end_datapipe, num_batches)


def _count(name: str, value: Any) -> int:
    """Return the number that an argument is, if it makes sense."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is a number from 0, not {value!r}") from None
    if count < 0:
        raise ValueError(f"{name} is a number from 0, not {value!r}")
    return count


def _share(count: int | None, number: int, workers: int) -> int | None:
    """Return how many of ``count`` items one of the workers has to make."""
    return None if count is None else count // workers + (number < count % workers)


def _end(crew: WorkerPool | None, ranks: Ranks | None) -> None:
    try:
        if ranks is not None:
            # An error that nothing has caught ends the interpreter, and is kept there until then.
            ranks.leave(sys.exc_info()[1] or getattr(sys, "last_value", None))
    finally:
        if crew is not None:
            crew.close()
