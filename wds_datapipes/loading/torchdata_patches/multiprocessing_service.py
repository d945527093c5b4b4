"""Patches of the worker processes and threads of torchdata's ``MultiProcessingReadingService``."""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from typing import Any

from wds_datapipes.loading.torchdata_patches.replace import PatchRecord, replace

__all__ = ["WORKER_REPAIRS"]

WORKER_REPAIRS = PatchRecord()


@WORKER_REPAIRS.repair(issue=1310)
def uneven_workers() -> None:
    """An epoch ends in an exception when the workers do not yield equally many items.

    The next request and the next answer each have a pointer that goes round the workers, and the two fall out of step
    when a worker has finished, so that a worker is asked that has ended: "Can not expect any response without
    submitted request", or "Can not request next item while we are still waiting response for previous request"
    (issues 1228 and 1310). One pointer serves both now, and a worker that has finished leaves the round.

    The same class stops two threads from answering to one worker, which is how a second ``iter()`` over a pipeline
    with ``sharding_round_robin_dispatch`` hangs (issue 1198).
    """
    from torchdata.dataloader2.communication import iter as receiving

    from wds_datapipes.loading.torchdata_patches.round_robin import LiveWorkers

    replace(receiving, "_IterateQueueDataPipes", LiveWorkers)


@WORKER_REPAIRS.repair(issue=1198)
def dead_workers() -> None:
    """The main process waits for ever for a worker that was killed, or that called exit.

    All waiting is for the queue alone. It is for the queue and the process now, and raises ``WorkerDiedError``. Waiting
    also no longer means asking again every millisecond, which limited each worker to about 800 items a second.
    """
    from torchdata.dataloader2.communication import protocol
    from torchdata.dataloader2.reading_service import MultiProcessingReadingService

    from wds_datapipes.loading.torchdata_patches.round_robin import WatchedClient

    initialize = MultiProcessingReadingService.initialize

    @functools.wraps(initialize)
    def initialize_and_watch(self: Any, datapipe: Any) -> Any:
        end_datapipe = initialize(self, datapipe)
        for index, (process, _, _) in enumerate(self._worker_processes):
            inbox = self._worker_datapipes[index].protocol.inbox
            inbox.watch(f"Worker {index}", process)
            if self._dispatch_process is not None:
                inbox.watch("The dispatching process", self._dispatch_process[0])
        return end_datapipe

    replace(protocol, "IterDataPipeQueueProtocolClient", WatchedClient)
    replace(MultiProcessingReadingService, "initialize", initialize_and_watch)


@WORKER_REPAIRS.repair(issue=None)
def lost_errors() -> None:
    """A worker that cannot start, or cannot pickle an item, leaves the main process waiting for ever.

    Only what an item raises is sent. Now everything is: what ``worker_init_fn``, ``worker_reset_fn`` and
    ``apply_sharding`` raise, an item that cannot be pickled, with the part at fault, an exception whose class cannot
    be pickled, and what ends a prefetch thread.
    """
    from torchdata.dataloader2.communication import eventloop
    from torchdata.dataloader2.communication import iter as receiving
    from torchdata.datapipes.iter import PinMemory, Prefetcher

    from wds_datapipes.loading.torchdata_patches.worker_processes import SendableError, run_dispatcher, run_worker
    from wds_datapipes.loading.workers.prefetch_thread import guard_thread

    replace(receiving, "ExceptionWrapper", SendableError)
    replace(eventloop, "DataPipeToQueuesLoop", run_worker)
    replace(eventloop, "MultipleDataPipesToQueuesLoop", run_dispatcher)
    for prefetcher in (Prefetcher, PinMemory):
        replace(prefetcher, "thread_worker", staticmethod(guard_thread(prefetcher.thread_worker)))


@WORKER_REPAIRS.repair(issue=None)
def orphans() -> None:
    """Workers outlive a main process that is killed, and die of a Ctrl-C that the main process means to handle.

    A worker holds both ends of its queue, so the end of the main process does not wake it. It holds a `ParentWatch` of
    that process now, and ignores SIGINT, as the workers of torch's ``DataLoader`` do.
    """
    from torchdata.dataloader2.communication import eventloop
    from torchdata.dataloader2.reading_service import MultiProcessingReadingService

    from wds_datapipes.loading.torchdata_patches.worker_processes import BoundLoop
    from wds_datapipes.loading.workers.parent_watch import ParentWatch

    initialize = MultiProcessingReadingService.initialize

    @functools.wraps(initialize)
    def initialize_with_lifeline(self: Any, datapipe: Any) -> Any:
        self._lifeline = ParentWatch()
        with self._lifeline.as_current():
            return initialize(self, datapipe)

    for name in ("DataPipeToQueuesLoop", "MultipleDataPipesToQueuesLoop"):
        replace(eventloop, name, BoundLoop(getattr(eventloop, name)))
    replace(MultiProcessingReadingService, "initialize", initialize_with_lifeline)


@WORKER_REPAIRS.repair(issue=1176)
def shutdown() -> None:
    """Shutting down in the middle of an epoch can hang, and leaves a worker that takes long.

    ``finalize`` waits for answers that the prefetch thread may have taken already, without a limit, and does not
    notice that ``join`` ran out of time. It stops the thread now, does not wait for answers, and ends what has not
    ended by itself. At the end of the interpreter it runs before the prefetch threads are frozen.
    """
    from torchdata.dataloader2.reading_service import MultiProcessingReadingService

    from wds_datapipes.loading.workers.shutdown import end_service

    running: weakref.WeakSet[Any] = weakref.WeakSet()
    initialize = MultiProcessingReadingService.initialize

    @functools.wraps(initialize)
    def initialize_or_finalize(self: Any, datapipe: Any) -> Any:
        self._owner_pid = os.getpid()
        running.add(self)
        try:
            return initialize(self, datapipe)
        except BaseException:
            finalize(self)
            raise

    @functools.wraps(MultiProcessingReadingService.finalize)
    def finalize(self: Any) -> None:
        # A forked worker has a copy of the service, and with it of the queues; their processes are not its own.
        if not self._finalized and getattr(self, "_owner_pid", None) == os.getpid():
            self._finalized = True
            end_service(self)

    @atexit.register
    def finalize_all() -> None:
        for service in list(running):
            finalize(service)

    replace(MultiProcessingReadingService, "initialize", initialize_or_finalize)
    replace(MultiProcessingReadingService, "finalize", finalize)


@WORKER_REPAIRS.repair(issue=None)
def stuck_pause() -> None:
    """Pausing waits for ever for a prefetch thread that has just come to its end.

    The thread says a last time that it has paused, and ends a millisecond later. Pausing again in between waits for it
    to say so again. The wait is for the end of the thread, too. What the thread has said of an earlier pause no longer
    counts: it could be taken for this one while the thread goes on.
    """
    from torchdata.datapipes.iter import Prefetcher

    from wds_datapipes.loading.workers.prefetch_thread import pause

    replace(Prefetcher, "pause", pause)
