"""Patches of the worker processes and threads of torchdata's ``MultiProcessingReadingService``."""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["WORKER_PATCHES"]


def uneven_workers() -> None:
    """An epoch raises an exception if the workers yield different numbers of items.

    The next request and the next response each have a pointer that cycles through the workers. The two get out of
    step when a worker finishes, so that a finished worker receives a request: "Can not expect any response without
    submitted request", or "Can not request next item while we are still waiting response for previous request"
    (issues 1228 and 1310). The patch uses one pointer for both, and removes finished workers from the cycle.

    The same class stops two threads from answering to one worker, which is how a second ``iter()`` over a pipeline
    with ``sharding_round_robin_dispatch`` hangs (issue 1198).
    """
    from torchdata.dataloader2.communication import iter as receiving

    from wds_datapipes.loading.torchdata_patches.round_robin import LiveWorkers

    setattr(receiving, "_IterateQueueDataPipes", LiveWorkers)


def dead_workers() -> None:
    """The main process hangs if a worker is killed or calls exit.

    torchdata waits for the queue only. The patch waits for the queue and the process, and raises ``WorkerDiedError``.
    It also stops polling every millisecond, which limited each worker to about 800 items a second.
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

    setattr(protocol, "IterDataPipeQueueProtocolClient", WatchedClient)
    setattr(MultiProcessingReadingService, "initialize", initialize_and_watch)


def lost_errors() -> None:
    """The main process hangs if a worker cannot start or cannot pickle an item.

    torchdata sends only exceptions that an item raises. The patch sends all of them: those of ``worker_init_fn``,
    ``worker_reset_fn`` and ``apply_sharding``, an item that cannot be pickled, with the part at fault, an exception
    whose class cannot be pickled, and an exception that ends a prefetch thread.
    """
    from torchdata.dataloader2.communication import eventloop
    from torchdata.dataloader2.communication import iter as receiving
    from torchdata.datapipes.iter import PinMemory, Prefetcher

    from wds_datapipes.loading.torchdata_patches.round_robin import guard_thread
    from wds_datapipes.loading.torchdata_patches.worker_processes import SendableError, run_dispatcher, run_worker

    setattr(receiving, "ExceptionWrapper", SendableError)
    setattr(eventloop, "DataPipeToQueuesLoop", run_worker)
    setattr(eventloop, "MultipleDataPipesToQueuesLoop", run_dispatcher)
    for prefetcher in (Prefetcher, PinMemory):
        setattr(prefetcher, "thread_worker", staticmethod(guard_thread(prefetcher.thread_worker)))


def orphans() -> None:
    """Workers outlive a killed main process, and end at a Ctrl-C that the main process handles.

    A worker holds both ends of its queue, so the end of the main process does not wake it. With the patch, it has a
    `ParentWatch` of that process, and ignores SIGINT, as the workers of torch's ``DataLoader`` do.
    """
    from torchdata.dataloader2.communication import eventloop
    from torchdata.dataloader2.reading_service import MultiProcessingReadingService

    from wds_datapipes.loading.torchdata_patches.worker_processes import BoundLoop
    from wds_datapipes.loading.workers.parent_watch import ParentWatch

    initialize = MultiProcessingReadingService.initialize

    @functools.wraps(initialize)
    def initialize_and_watch_parent(self: Any, datapipe: Any) -> Any:
        self._parent_watch = ParentWatch()
        with self._parent_watch.as_current():
            return initialize(self, datapipe)

    for name in ("DataPipeToQueuesLoop", "MultipleDataPipesToQueuesLoop"):
        setattr(eventloop, name, BoundLoop(getattr(eventloop, name)))
    setattr(MultiProcessingReadingService, "initialize", initialize_and_watch_parent)


def shutdown() -> None:
    """Shutting down mid-epoch can hang, and leaves a busy worker running.

    ``finalize`` waits without a limit for responses that the prefetch thread may have taken already, and ignores that
    ``join`` timed out. The patch stops the thread, does not wait for responses, and kills workers that do not exit. At
    the end of the interpreter, it runs before the prefetch threads are frozen.
    """
    from torchdata.dataloader2.reading_service import MultiProcessingReadingService

    from wds_datapipes.loading.torchdata_patches.queues import end_service

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
        # A forked worker has a copy of the service and its queues, but does not own their processes.
        if not self._finalized and getattr(self, "_owner_pid", None) == os.getpid():
            self._finalized = True
            end_service(self)

    @atexit.register
    def finalize_all() -> None:
        for service in list(running):
            finalize(service)

    setattr(MultiProcessingReadingService, "initialize", initialize_or_finalize)
    setattr(MultiProcessingReadingService, "finalize", finalize)


def stuck_pause() -> None:
    """Pausing hangs if the prefetch thread has just ended.

    The thread reports the pause a last time, and ends a millisecond later. A second pause in between waits for another
    report. The patch also waits for the end of the thread, and discards the report of an earlier pause, which could be
    mistaken for this one while the thread continues.
    """
    from torchdata.datapipes.iter import Prefetcher

    from wds_datapipes.loading.torchdata_patches.round_robin import pause

    setattr(Prefetcher, "pause", pause)


#: Patches of the worker processes, each with the number of its issue in meta-pytorch/data.
WORKER_PATCHES: tuple[tuple[Callable[[], None], int | None], ...] = (
    (uneven_workers, 1310),
    (dead_workers, 1198),
    (lost_errors, None),
    (orphans, None),
    (shutdown, 1176),
    (stuck_pause, None),
)
